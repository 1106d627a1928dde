"""Values of JSON and CSV rows as the types that `input.schema` declares, or why they do not fit.

`InputSet` checks every row while it reads; the passthrough makes Arrow arrays of the same values. A value
fits where it can be held without loss:

    bool                   true, false
    integers               whole numbers in range, 3.0 too
    float32, float64       numbers in range, rounded to the nearest; whole numbers only if held exactly
    string                 texts; numbers and booleans as they are spelled in JSON
    binary                 base64
    date32                 2024-05-01
    timestamp              2024-05-01T10:00:00.5+02:00; whole numbers count units since 1970. With a zone,
                           a text without offset is UTC; without a zone, an offset does not fit
    time32, time64         10:00:00.5
    duration               PT1.5S; whole numbers count units
    decimal128             numbers, and texts that spell one
    list, struct, map      of values that fit; a struct takes no members that it does not declare

From CSV every value is a text, and is read as its type spells it; lists, structs and maps are JSON.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import date
from decimal import Decimal
from functools import lru_cache
from typing import Any, cast

import numpy as np

from batchgen.data.declared_types import Declared, read_type
from batchgen.data.exact_json import ExactFloat, encode
from batchgen.data.row import Row
from batchgen.grammar import counted
from batchgen.types import ErrorClass, RowError, RowFailure

_Convert = Callable[[Any], Any]

_SHOWN = 60
_DIGITS = {"s": 0, "ms": 3, "us": 6, "ns": 9}
_LARGEST_FLOAT32 = float(np.finfo(np.float32).max)
_CLOCK = r"(?P<h>[01]\d|2[0-3]):(?P<m>[0-5]\d):(?P<s>[0-5]\d)(?:[.,](?P<fraction>\d{1,18}))?"
_TIME = re.compile(_CLOCK, re.ASCII)
_TIMESTAMP = re.compile(
    rf"(?P<day>\d{{4}}-\d\d-\d\d)(?:[T ]{_CLOCK}\s?(?P<zone>Z|z|[+-](?:[01]\d|2[0-3]):?[0-5]\d)?)?", re.ASCII
)
_DURATION = re.compile(r"(?P<sign>-?)PT(?P<s>\d{1,18})(?:[.,](?P<fraction>\d{1,18}))?S", re.ASCII)
_NUMBER = re.compile(r"[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,5})?", re.ASCII)
_EPOCH_DAY = date(1970, 1, 1).toordinal()


class _Misfit(Exception):
    """A value does not fit; `out_of_range` where a number is too large."""

    def __init__(self, why: str = "", *, out_of_range: bool = False) -> None:
        super().__init__(why)
        self.out_of_range = out_of_range


class DeclaredColumn:
    """One column of `input.schema`.

    Args:
        name: of the column.
        type_: its type in canonical spelling.
    """

    def __init__(self, name: str, type_: str) -> None:
        self.name = name
        self.type = read_type(type_)
        self._convert = _nullable(self.type)

    def value(self, value: Any) -> Any:
        """The value as `pyarrow.array` takes it for the type.

        Raises:
            RowFailure: number_out_of_range or invalid_param; names column, value and type.
        """
        try:
            return self._convert(value)
        except _Misfit as misfit:
            range_ = misfit.out_of_range
            why = f" ({misfit})" if str(misfit) else ""
            raise RowFailure(
                ErrorClass.NUMBER_OUT_OF_RANGE if range_ else ErrorClass.INVALID_PARAM,
                f"column {self.name!r}: {_show(value)} is not a value of the type {self.type} that "
                f"input.schema declares{why}",
            ) from None

    def of_text(self, text: str) -> Any:
        """A CSV value as JSON would have it: what prompts and `input.where` see. Raises RowFailure.

        An empty one is null, but for strings.
        """
        kind = self.type.kind
        if kind != "string" and not text.strip():
            return None
        if kind in _KEPT_AS_TEXT:
            self.value(text)
            return text
        value = _parsed(text) if kind in ("list", "struct", "map") else _scalar_of_text(kind, text)
        self.value(text if value is _UNREADABLE else value)
        return value

    def fits(self, value: Any) -> bool:
        """Whether `value` has one in the type."""
        try:
            self._convert(value)
        except _Misfit:
            return False
        return True


def apply_schema(columns: Iterable[DeclaredColumn], row: Row, *, from_text: bool) -> None:
    """Checks the declared columns of a row; one whose value does not fit gets an error.

    Args:
        columns: of `input.schema`.
        row: of JSON or CSV.
        from_text: every value is a text, and becomes what JSON would have.
    """
    if row.error is not None:
        return
    try:
        for column in columns:
            value = row.values.get(column.name)
            if value is None:
                continue
            if from_text and isinstance(value, str):
                cast(dict[str, Any], row.values)[column.name] = column.of_text(value)
            else:
                column.value(value)
    except RowFailure as failure:
        place = f"line {row.line}" if row.line else f"row {row.ordinal}"
        row.error = RowError(failure.error.error_class, f"{row.file} {place}: {failure.error.message}")


@lru_cache(maxsize=1024)
def declared_column(name: str, type_: str) -> DeclaredColumn:
    """The column, made once."""
    return DeclaredColumn(name, type_)


def _show(value: Any) -> str:
    text = encode(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


_KEPT_AS_TEXT = {"string", "binary", "date32", "timestamp", "time32", "time64", "duration"}
_UNREADABLE = object()


def _scalar_of_text(kind: str, text: str) -> Any:
    stripped = text.strip()
    if kind == "bool":
        return {"true": True, "false": False}.get(stripped.lower(), _UNREADABLE)
    if not _NUMBER.fullmatch(stripped):
        return _UNREADABLE
    number = Decimal(stripped)
    if kind == "decimal128":
        return number
    whole = number == number.to_integral_value() if number.adjusted() < _MOST_DIGITS else False
    if whole and not kind.startswith("float"):
        return int(number)
    return ExactFloat(stripped)


_MOST_DIGITS = 40


def _parsed(text: str) -> Any:
    from batchgen.data.exact_json import LineDecoder

    try:
        return LineDecoder(replace_invalid=False).decode(b'{"v": ' + text.encode() + b"}").values["v"]
    except (RowFailure, KeyError, UnicodeEncodeError):
        return _UNREADABLE


def _nullable(type_: Declared) -> _Convert:
    convert = _converter(type_)
    return lambda value: None if value is None else convert(value)


def _converter(type_: Declared) -> _Convert:
    kind = type_.kind
    if "int" in kind:
        bits, signed = int(kind.lstrip("uint")), not kind.startswith("u")
        least, most = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
        return lambda value: _integer(value, least, most)
    if kind.startswith("float"):
        return lambda value: _float(value, _LARGEST_FLOAT32 if kind == "float32" else None)
    simple: Mapping[str, _Convert] = {"bool": _bool, "string": _string, "binary": _binary, "date32": _date}
    if kind in simple:
        return simple[kind]
    if type_.unit:
        timed = {"timestamp": _timestamp, "duration": _duration}.get(kind, _time)
        return lambda value: timed(value, type_)
    if kind == "decimal128":
        return lambda value: _decimal(value, type_.precision, type_.scale)
    return _nested(type_)


def _bool(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _Misfit
    return value


def _integer(value: Any, least: int, most: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        raise _Misfit
    if not isinstance(value, int):
        exact = Decimal(value.text) if isinstance(value, ExactFloat) else Decimal(value)
        if exact.adjusted() > _MOST_DIGITS:
            raise _Misfit(out_of_range=True)
        if exact != exact.to_integral_value():
            raise _Misfit
        value = int(exact)
    if not least <= value <= most:
        raise _Misfit(out_of_range=True)
    return int(value)


def _float(value: Any, most: float | None) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        raise _Misfit
    try:
        number = float(value)
    except OverflowError:
        raise _Misfit(out_of_range=True) from None
    if number in (float("inf"), float("-inf")) or (most is not None and abs(number) > most):
        raise _Misfit(out_of_range=True)
    held = float(np.float32(number)) if most is not None else number
    if isinstance(value, int) and int(held) != value:
        raise _Misfit("it cannot hold all digits")
    return number


def _string(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool | int | float | Decimal):
        return encode(value)
    raise _Misfit


def _binary(value: Any) -> bytes:
    if isinstance(value, str):
        try:
            return base64.b64decode(value, validate=True)
        except (binascii.Error, ValueError):
            raise _Misfit("it is not base64") from None
    raise _Misfit


def _date(value: Any) -> date:
    match = _TIMESTAMP.fullmatch(value) if isinstance(value, str) else None
    if match is None or match["h"] is not None:
        raise _Misfit
    return _day(match["day"])


def _day(text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise _Misfit("there is no such day") from None


def _fraction(digits: str | None, unit: str) -> int:
    """Digits behind the point as a number of units."""
    places = _DIGITS[unit]
    digits = digits or ""
    if digits[places:].strip("0"):
        raise _Misfit(f"it has digits finer than {unit}")
    return int(digits[:places].ljust(places, "0") or "0")


def _clock(match: re.Match[str], unit: str) -> int:
    seconds = int(match["h"]) * 3600 + int(match["m"]) * 60 + int(match["s"])
    return int(seconds * 10 ** _DIGITS[unit] + _fraction(match["fraction"], unit))


def _timestamp(value: Any, type_: Declared) -> int:
    if isinstance(value, int):
        return _integer(value, -(2**63), 2**63 - 1)
    match = _TIMESTAMP.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise _Misfit
    if match["zone"] and type_.zone is None:
        raise _Misfit("the type has no zone")
    days = _day(match["day"]).toordinal() - _EPOCH_DAY
    units = days * 86400 * 10 ** _DIGITS[type_.unit]
    if match["h"] is not None:
        units += _clock(match, type_.unit)
    zone = match["zone"]
    if zone and zone not in "Zz":
        sign = -1 if zone[0] == "-" else 1
        minutes = int(zone[1:3]) * 60 + int(zone[-2:])
        units -= sign * minutes * 60 * 10 ** _DIGITS[type_.unit]
    return _integer(units, -(2**63), 2**63 - 1)


def _time(value: Any, type_: Declared) -> int:
    match = _TIME.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise _Misfit
    return _clock(match, type_.unit)


def _duration(value: Any, type_: Declared) -> int:
    if isinstance(value, int):
        return _integer(value, -(2**63), 2**63 - 1)
    match = _DURATION.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise _Misfit
    units = int(match["s"]) * 10 ** _DIGITS[type_.unit] + _fraction(match["fraction"], type_.unit)
    return _integer(-units if match["sign"] else units, -(2**63), 2**63 - 1)


def _decimal(value: Any, precision: int, scale: int) -> Decimal:
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal | str):
        raise _Misfit
    text = encode(value) if not isinstance(value, str) else value.strip()
    if not _NUMBER.fullmatch(text):
        raise _Misfit
    sign, digits, exponent = Decimal(text).as_tuple()
    assert isinstance(exponent, int)
    written = "".join(map(str, digits)).lstrip("0")
    stripped = written.rstrip("0")
    exponent += len(written) - len(stripped)
    if stripped and -exponent > scale:
        raise _Misfit(f"it has more than {counted(scale, 'digit')} behind the point")
    if stripped and len(stripped) + exponent > precision - scale:
        raise _Misfit(out_of_range=True)
    return Decimal((sign, tuple(map(int, stripped)), exponent)) if stripped else Decimal(0)


def _nested(type_: Declared) -> _Convert:
    inner = {name: _nullable(field) for name, field in type_.fields}

    def struct(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise _Misfit
        for name in value:
            if name not in inner:
                raise _Misfit(f"it has a member {name!r} that the struct does not declare")
        return {name: convert(value.get(name)) for name, convert in inner.items()}

    def list_(value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise _Misfit
        return [item(v) for v in value]

    def map_(value: Any) -> list[tuple[str, Any]]:
        if not isinstance(value, dict):
            raise _Misfit
        return [(name, item(v)) for name, v in value.items()]

    if type_.kind == "struct":
        return struct
    (item,) = inner.values()
    return list_ if type_.kind == "list" else map_
