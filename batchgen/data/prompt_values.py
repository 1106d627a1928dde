"""The values of a row as a prompt needs them, fit to be sent to a worker. The supervisor calls it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from decimal import Decimal
from typing import Any

import msgpack

from batchgen.data.packer import RowPacker
from batchgen.data.row import Row

# What msgpack does not know, integers beyond 64 bits too, goes as its text.
_packer = RowPacker(default=str)
_MIN_INT, _MAX_INT = -(2**63), 2**64 - 1


def prompt_values(row: Row, names: Iterable[str]) -> dict[str, Any]:
    """Those of `names` that the row has, made of what msgpack can carry.

    Decimals and integers beyond 64 bits become the string of their digits, which is how a template would
    print them. A column in which the reader put null for NaN or an infinity is NaN itself: what goes through
    to the output may be repaired, a prompt may not. A name that the row lacks is left out.
    """
    if not row.nonfinite:
        return {name: _portable(row.values[name]) for name in names if name in row.values}
    return {
        name: math.nan if name in row.nonfinite else _portable(row.values[name])
        for name in names
        if name in row.values
    }


def pack_prompt_values(row: Row, names: Iterable[str]) -> bytes:
    """The same, as msgpack: compact to keep, and never packed again."""
    values = {name: row.values[name] for name in names if name in row.values}
    for name in row.nonfinite:
        if name in values:
            values[name] = math.nan
    return _packer.pack(values)


def unpack_prompt_values(packed: bytes) -> dict[str, Any]:
    """The values again."""
    values: dict[str, Any] = msgpack.unpackb(packed, strict_map_key=False, unicode_errors="surrogatepass")
    return values


def _portable(value: Any) -> Any:
    if isinstance(value, list):
        return [_portable(v) for v in value]
    if isinstance(value, dict):
        return {k: _portable(v) for k, v in value.items()}
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return value if _MIN_INT <= value <= _MAX_INT else str(value)
    if isinstance(value, float):
        return float(value)
    return str(value) if isinstance(value, Decimal) else value
