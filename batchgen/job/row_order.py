"""`run.order`: by what rows are sorted within the open window, which uses it while it has a row's values.

The engine's worker sorts what it has once more by token ids; here equal columns stand for equal ids.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Mapping
from hashlib import blake2b
from typing import Any

OrderKey = Callable[[int, Iterable[Any], int], Any]
"""From a row's ordinal, the values that its prompt needs, and their size, to what it is sorted by."""


def _by_input(row: int, values: Iterable[Any], size: int) -> int:
    return row


def _by_length(row: int, values: Iterable[Any], size: int) -> int:
    return -size


def _by_prefix(row: int, values: Iterable[Any], size: int) -> bytes:
    return b"\0".join(map(_flat, values))


def _flat(value: Any) -> bytes:
    """Bytes of a value such that values with equal beginnings have equal beginnings."""
    if isinstance(value, str):
        return value.encode(errors="surrogatepass")
    if isinstance(value, bytes):
        return value
    if isinstance(value, Mapping):
        return b"\0".join(map(_flat, value.values()))
    if isinstance(value, list | tuple):
        try:
            return array("q", value).tobytes()
        except (TypeError, OverflowError):
            return b"\0".join(map(_flat, value))
    return repr(value).encode(errors="surrogatepass")


ORDERS: Mapping[str, OrderKey] = {"input": _by_input, "prefix": _by_prefix, "length": _by_length}
"""`prefix` puts rows with equal beginnings together, `length` the longest first."""


def shuffled(seed: int) -> OrderKey:
    """The order of `input.shuffle`: by a hash of the row's ordinal, the same in every attempt."""
    key = seed.to_bytes(8, "little")

    def by_hash(row: int, values: Iterable[Any], size: int) -> bytes:
        return blake2b(row.to_bytes(8, "little"), digest_size=8, key=key).digest()

    return by_hash
