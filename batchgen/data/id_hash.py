"""Hashes of row ids, and the ids that `input.duplicate_ids: suffix` makes. Used by the ledger of ids.

A made-up id is an id with `#k` behind it, k from 2. The hash of such a text is a function of the hash before
the `#` and of k, so that the hash of a made-up id needs no text, and equals that of a real id which is
spelled the same.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

BYTES = 16
"""128 bits: among 10**9 ids, two different ones share a hash with a probability of 10**-21."""

_LEAST = 2


def hash_id(text: str) -> bytes:
    """Hash of an id as it stands in the output."""
    if "#" not in text:
        return _hash(text)
    pieces = text.split("#")
    numbers: list[int] = []
    while len(pieces) > 1 and (number := _number(pieces[-1])) is not None:
        numbers.append(number)
        pieces.pop()
    found = _hash("#".join(pieces))
    for number in reversed(numbers):
        found = hash_suffixed(found, number)
    return found


def hash_suffixed(before: bytes, number: int) -> bytes:
    """Hash of the id `…#number` from the hash of what stands before the `#`."""
    return hashlib.blake2b(b"%s#%d" % (before, number), digest_size=BYTES, person=b"suffix").digest()


def suffixed(text: str, numbers: Iterable[int]) -> str:
    """The made-up id: each number behind a `#`."""
    return text + "".join(f"#{number}" for number in numbers)


def looks_suffixed(text: str) -> bool:
    """Whether a made-up id could be spelled like this."""
    return "#" in text and _number(text.rpartition("#")[2]) is not None


def _hash(text: str) -> bytes:
    return hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=BYTES).digest()


def _number(digits: str) -> int | None:
    """The number that `#k` would print like this. A count of rows has at most 18 digits."""
    if not (digits.isascii() and digits.isdecimal()) or digits[0] == "0" or len(digits) > 18:
        return None
    number = int(digits)
    return number if number >= _LEAST else None
