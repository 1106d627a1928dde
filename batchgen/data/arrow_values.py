"""Arrow columns as Python values that mean the same under every version of pyarrow.

`ParquetReader` converts each batch once; prompts, ids, content hashes and JSONL output all use the result:

    integers, floats, booleans, strings, null   themselves (float16 and float32 as the equal double)
    decimals                                    Decimal, all digits
    binary                                      bytes (base64 in JSON)
    date, time, timestamp                       ISO 8601 with all digits of the unit; `Z` if zoned
    duration                                    ISO 8601 seconds, `PT1.500S`
    list                                        list
    struct                                      dict, null fields included
    map with string keys                        dict; with other or repeated keys a list of [key, value]
    dictionary, extension                       the values they stand for
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

import msgpack
import numpy as np
import pyarrow as pa

from batchgen.data.row import digest

_DIGITS = {"s": 0, "ms": 3, "us": 6, "ns": 9}


@dataclass(frozen=True, slots=True)
class Undecodable:
    """Stands for a string whose bytes are not UTF-8."""

    data: bytes

    @property
    def offset(self) -> int:
        """Index of the first byte that is not UTF-8."""
        try:
            self.data.decode()
        except UnicodeDecodeError as e:
            return e.start
        return len(self.data)


def unsupported_type(type_: pa.DataType) -> str | None:
    """Why a column of this type cannot be read, or None."""
    if isinstance(type_, pa.BaseExtensionType):
        return unsupported_type(type_.storage_type)
    if pa.types.is_dictionary(type_):
        return unsupported_type(type_.value_type)
    if pa.types.is_nested(type_):
        if _nested_converter(type_) is None:
            return f"the Arrow type {type_} is not supported; write it as a list or struct"
        children = (type_.field(i).type for i in range(type_.num_fields))
        return next(filter(None, map(unsupported_type, children)), None)
    if _is_plain(type_) or _is_text(type_) or _converter(type_) is not None:
        return None
    return f"the Arrow type {type_} is not supported; cast the column to another type or a string"


def to_python(array: pa.Array) -> list[Any]:
    """One Python value for each element, as the table above says.

    Strings that are not UTF-8 come back as `Undecodable`.
    """
    type_ = array.type
    if isinstance(type_, pa.BaseExtensionType):
        return to_python(array.storage)
    if pa.types.is_dictionary(type_):
        return to_python(array.dictionary_decode())
    if _is_plain(type_):
        return _as_they_are(array)
    if _is_text(type_):
        return _texts(array)
    converter = _converter(type_) or _nested_converter(type_)
    if converter is None:
        raise TypeError(unsupported_type(type_))
    return converter(array)


def values_digest(values: list[Any]) -> bytes:
    """Content hash of one row's values, in column order: over msgpack, whose encoding is fixed."""
    return digest(msgpack.packb(values, default=_pack_other))


def _pack_other(value: Any) -> msgpack.ExtType:
    if isinstance(value, Decimal):
        return msgpack.ExtType(1, str(value).encode())
    if isinstance(value, Undecodable):
        return msgpack.ExtType(2, value.data)
    raise TypeError(f"a {type(value).__name__} has no content hash")


def find_undecodable(value: Any) -> Undecodable | None:
    """The first undecodable string inside `value`, in reading order."""
    if isinstance(value, Undecodable):
        return value
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, list):
        return next(filter(None, map(find_undecodable, value)), None)
    return None


def replace_undecodable(value: Any) -> Any:
    """`value` with every undecodable string decoded, bad bytes as U+FFFD."""
    if isinstance(value, Undecodable):
        return value.data.decode(errors="replace")
    if isinstance(value, dict):
        return {replace_undecodable(k): replace_undecodable(v) for k, v in value.items()}
    return [replace_undecodable(v) for v in value] if isinstance(value, list) else value


def drop_null_fields(value: Any) -> Any:
    """`value` with null members left out of every dict: Arrow fills struct fields that a row never had."""
    if isinstance(value, dict):
        return {k: drop_null_fields(v) for k, v in value.items() if v is not None}
    return [drop_null_fields(v) for v in value] if isinstance(value, list) else value


def _is_plain(type_: pa.DataType) -> bool:
    t = pa.types
    if t.is_float16(type_):
        return False
    plain = (t.is_null, t.is_boolean, t.is_integer, t.is_floating, t.is_decimal)
    return any(test(type_) for test in plain) or _is_binary(type_)


def _is_binary(type_: pa.DataType) -> bool:
    t = pa.types
    tests = (t.is_binary, t.is_large_binary, t.is_fixed_size_binary, t.is_binary_view)
    return any(test(type_) for test in tests)


def _is_text(type_: pa.DataType) -> bool:
    t = pa.types
    return any(test(type_) for test in (t.is_string, t.is_large_string, t.is_string_view))


def _converter(type_: pa.DataType) -> Callable[[pa.Array], list[Any]] | None:
    t = pa.types
    table = (
        (t.is_float16, _half_floats),
        (t.is_date, _dates),
        (t.is_timestamp, _timestamps),
        (t.is_time, _times),
        (t.is_duration, _durations),
    )
    return next((convert for test, convert in table if test(type_)), None)


def _nested_converter(type_: pa.DataType) -> Callable[[pa.Array], list[Any]] | None:
    t = pa.types
    table = (
        (t.is_map, _maps),
        (t.is_list, _lists),
        (t.is_large_list, _lists),
        (t.is_fixed_size_list, _fixed_lists),
        (t.is_struct, _structs),
    )
    return next((convert for test, convert in table if test(type_)), None)


def _as_they_are(array: pa.Array) -> list[Any]:
    values: list[Any] = array.to_pylist()
    return values


def _texts(array: pa.Array) -> list[Any]:
    try:
        return _as_they_are(array)
    except UnicodeDecodeError:
        large = pa.types.is_large_string(array.type)
        return [_text(data) for data in array.view(_binary_of(array.type, large)).to_pylist()]


def _binary_of(type_: pa.DataType, large: bool) -> pa.DataType:
    if pa.types.is_string_view(type_):
        return pa.binary_view()
    return pa.large_binary() if large else pa.binary()


def _text(data: bytes | None) -> Any:
    try:
        return None if data is None else data.decode()
    except UnicodeDecodeError:
        return Undecodable(data or b"")


def _half_floats(array: pa.Array) -> list[Any]:
    return _as_they_are(array.cast(pa.float32()))


def _integers(array: pa.Array) -> list[int | None]:
    width = array.type.bit_width
    return _as_they_are(array.view(pa.int32() if width == 32 else pa.int64()))


def _each(array: pa.Array, format: Callable[[int], str]) -> list[Any]:
    return [None if value is None else format(value) for value in _integers(array)]


def _dates(array: pa.Array) -> list[Any]:
    if pa.types.is_date32(array.type):
        return _each(array, lambda days: str(np.datetime64(days, "D")))
    return _each(array, lambda ms: str(np.datetime64(ms, "ms").astype("M8[D]")))


def _timestamps(array: pa.Array) -> list[Any]:
    unit, zone = array.type.unit, "Z" if array.type.tz is not None else ""
    return _each(array, lambda value: f"{np.datetime64(value, unit)}{zone}")


def _times(array: pa.Array) -> list[Any]:
    digits = _DIGITS[array.type.unit]

    def format(value: int) -> str:
        seconds, fraction = divmod(value, 10**digits)
        clock = f"{seconds // 3600:02}:{seconds // 60 % 60:02}:{seconds % 60:02}"
        return f"{clock}.{fraction:0{digits}}" if digits else clock

    return _each(array, format)


def _durations(array: pa.Array) -> list[Any]:
    digits = _DIGITS[array.type.unit]

    def format(value: int) -> str:
        seconds, fraction = divmod(abs(value), 10**digits)
        sign = "-" if value < 0 else ""
        return f"{sign}PT{seconds}.{fraction:0{digits}}S" if digits else f"{sign}PT{seconds}S"

    return _each(array, format)


def _offsets(array: pa.Array) -> tuple[list[int], int, int]:
    """Offsets relative to the first child in use, and where the children in use begin and end."""
    offsets = array.offsets.to_pylist()
    start = offsets[0] if offsets else 0
    end = offsets[-1] if offsets else 0
    return [offset - start for offset in offsets], start, end


def _lists(array: pa.Array) -> list[Any]:
    offsets, start, end = _offsets(array)
    children = to_python(array.values.slice(start, end - start))
    valid = array.is_valid().to_pylist()
    return [children[offsets[i] : offsets[i + 1]] if ok else None for i, ok in enumerate(valid)]


def _fixed_lists(array: pa.Array) -> list[Any]:
    size = array.type.list_size
    children = to_python(array.values.slice(array.offset * size, len(array) * size))
    valid = array.is_valid().to_pylist()
    return [children[i * size : (i + 1) * size] if ok else None for i, ok in enumerate(valid)]


def _structs(array: pa.Array) -> list[Any]:
    names = [array.type.field(i).name for i in range(array.type.num_fields)]
    columns = [to_python(array.field(i)) for i in range(array.type.num_fields)]
    valid = array.is_valid().to_pylist()
    return [
        dict(zip(names, (column[i] for column in columns), strict=True)) if ok else None
        for i, ok in enumerate(valid)
    ]


def _maps(array: pa.Array) -> list[Any]:
    offsets, start, end = _offsets(array)
    keys = to_python(array.keys.slice(start, end - start))
    items = to_python(array.items.slice(start, end - start))
    valid = array.is_valid().to_pylist()
    return [
        _map(keys[offsets[i] : offsets[i + 1]], items[offsets[i] : offsets[i + 1]]) if ok else None
        for i, ok in enumerate(valid)
    ]


def _map(keys: list[Any], items: list[Any]) -> Any:
    if all(isinstance(key, str) for key in keys) and len(set(keys)) == len(keys):
        return dict(zip(keys, items, strict=True))
    return [[key, item] for key, item in zip(keys, items, strict=True)]
