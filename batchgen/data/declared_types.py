"""The types of `input.schema`: from what the job file says to an Arrow type, and back to one spelling.

    type    = name | "list<" type ">" | "map<string, " type ">" | "struct<" field { ", " field } ">"
    field   = name ": " type                             a name in `backquotes` may hold anything
    name    = bool | int8 … int64 | uint8 … uint64 | float32 | float64 | string | binary | date32
            | timestamp[unit] | timestamp[unit, UTC] | time32[s] | time32[ms] | time64[us] | time64[ns]
            | duration[unit] | decimal128(precision, scale)          unit = s | ms | us | ns

In a job file a map of names to types is a struct, and a list of one type a list. What Arrow itself prints
(`timestamp[us, tz=UTC]`, `list<item: string>`) is understood too. Standard library only; pyarrow is imported
when an Arrow type is asked for.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa

SCALARS = (
    "bool",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "float32",
    "float64",
    "string",
    "binary",
    "date32",
)
EXAMPLES = "int64, float64, string, bool, timestamp[us, UTC], decimal128(10, 2), list<string>, {a: int64}"

_ALIASES = {"double": "float64", "float": "float32", "utf8": "string", "date": "date32", "boolean": "bool"}
_UNITS = {
    "timestamp": ("s", "ms", "us", "ns"),
    "duration": ("s", "ms", "us", "ns"),
    "time32": ("s", "ms"),
    "time64": ("us", "ns"),
}
_TOKEN = re.compile(
    r"\s*(?:(?P<name>[^\W\d][\w/+-]*)|(?P<number>\d+)|`(?P<quoted>[^`]+)`|(?P<mark>[<>\[\](),:=]))"
)
_PLAIN_NAME = re.compile(r"[^\W\d]\w*")
_MAX_NESTING = 20
_MAX_PRECISION = 38


@dataclass(frozen=True, slots=True)
class Declared:
    """One type.

    Args:
        kind: one of `SCALARS`, timestamp, duration, time32, time64, decimal128, list, map or struct.
        unit: of a time.
        zone: "UTC" for a timestamp that has one.
        precision, scale: of a decimal.
        fields: of a struct; of a list or map one, named "item".
    """

    kind: str
    unit: str = ""
    zone: str | None = None
    precision: int = 0
    scale: int = 0
    fields: tuple[tuple[str, Declared], ...] = ()

    def __str__(self) -> str:
        inner = ", ".join(f"{_shown(name)}: {type_}" for name, type_ in self.fields)
        match self.kind:
            case "list":
                return f"list<{self.fields[0][1]}>"
            case "map":
                return f"map<string, {self.fields[0][1]}>"
            case "struct":
                return f"struct<{inner}>"
            case "decimal128":
                return f"decimal128({self.precision}, {self.scale})"
            case "timestamp" if self.zone:
                return f"timestamp[{self.unit}, {self.zone}]"
            case _:
                return f"{self.kind}[{self.unit}]" if self.unit else self.kind

    def arrow(self) -> pa.DataType:
        """The Arrow type."""
        import pyarrow as pa

        match self.kind:
            case "list":
                return pa.list_(self.fields[0][1].arrow())
            case "map":
                return pa.map_(pa.string(), self.fields[0][1].arrow())
            case "struct":
                return pa.struct([(name, type_.arrow()) for name, type_ in self.fields])
            case "decimal128":
                return pa.decimal128(self.precision, self.scale)
            case "timestamp":
                return pa.timestamp(self.unit, self.zone)
            case _ if self.unit:
                made: pa.DataType = getattr(pa, self.kind)(self.unit)
                return made
            case _:
                simple: pa.DataType = pa.type_for_alias(self.kind)
                return simple


def read_type(value: Any) -> Declared:
    """A type as a job file gives it: a text, a map (struct) or a list of one (list).

    Raises:
        ValueError: says what is wrong.
    """
    return _read(value, 0)


def _read(value: Any, depth: int) -> Declared:
    if depth > _MAX_NESTING:
        raise ValueError(f"nested deeper than {_MAX_NESTING} levels")
    if isinstance(value, str):
        return _Parser(value, depth).whole()
    if isinstance(value, list) and len(value) == 1:
        return Declared("list", fields=(("item", _read(value[0], depth + 1)),))
    if isinstance(value, Mapping) and value and all(isinstance(name, str) and name for name in value):
        fields = tuple((name, _read(inner, depth + 1)) for name, inner in value.items())
        if any("`" in name for name in value):
            raise ValueError("the name of a field cannot hold a backquote")
        return Declared("struct", fields=fields)
    raise ValueError("a type is a text, a map of names to types, or a list of one type")


def _shown(name: str) -> str:
    return name if _PLAIN_NAME.fullmatch(name) else f"`{name}`"


class _Parser:
    def __init__(self, text: str, depth: int) -> None:
        self._text = text
        self._at = 0
        self._depth = depth

    def whole(self) -> Declared:
        found = self._type()
        if self._text[self._at :].strip():
            raise ValueError(f"{self._text[self._at :].strip()!r} after the type {found}")
        return found

    def _type(self) -> Declared:
        self._depth += 1
        if self._depth > _MAX_NESTING:
            raise ValueError(f"nested deeper than {_MAX_NESTING} levels")
        found = self._named(self._need("name"))
        self._depth -= 1
        return found

    def _named(self, name: str) -> Declared:
        kind = _ALIASES.get(name, name)
        if kind in SCALARS:
            return Declared(kind)
        if kind in _UNITS:
            return self._timed(kind)
        match kind:
            case "decimal128":
                return self._decimal()
            case "list":
                self._need("mark", "<")
                self._label("item") or self._label("element")
                return self._closed(Declared("list", fields=(("item", self._type()),)))
            case "map":
                self._need("mark", "<")
                if self._named(self._need("name")).kind != "string":
                    raise ValueError("the keys of a map are strings")
                self._need("mark", ",")
                return self._closed(Declared("map", fields=(("item", self._type()),)))
            case "struct":
                self._need("mark", "<")
                return self._closed(Declared("struct", fields=self._fields()))
        raise ValueError(f"{name!r} is no type")

    def _timed(self, kind: str) -> Declared:
        self._need("mark", "[")
        unit, zone = self._need("name"), None
        if unit not in _UNITS[kind]:
            raise ValueError(f"the unit of {kind} is one of {', '.join(_UNITS[kind])}")
        if kind == "timestamp" and self._take("mark", ","):
            if self._take("name", "tz"):
                self._need("mark", "=")
            zone = self._need("name")
            if zone != "UTC":
                raise ValueError(
                    "the zone of a timestamp is UTC; other offsets in the data are converted to it"
                )
        self._need("mark", "]")
        return Declared(kind, unit, zone)

    def _decimal(self) -> Declared:
        self._need("mark", "(")
        precision = int(self._need("number"))
        self._need("mark", ",")
        scale = int(self._need("number"))
        self._need("mark", ")")
        if not (1 <= precision <= _MAX_PRECISION and scale <= precision):
            raise ValueError(f"a decimal128 has 1 to {_MAX_PRECISION} digits, and no more behind its point")
        return Declared("decimal128", precision=precision, scale=scale)

    def _fields(self) -> tuple[tuple[str, Declared], ...]:
        fields: dict[str, Declared] = {}
        while not fields or self._take("mark", ","):
            name = self._take("name") or self._take("quoted")
            if name is None:
                raise ValueError("a struct has fields such as struct<a: int64, b: string>")
            if name in fields:
                raise ValueError(f"the field {name!r} twice")
            self._need("mark", ":")
            fields[name] = self._type()
        return tuple(fields.items())

    def _closed(self, found: Declared) -> Declared:
        self._need("mark", ">")
        return found

    def _label(self, name: str) -> bool:
        """Passes over the name that Arrow prints before the type of a list's values."""
        before = self._at
        if self._take("name", name) and self._take("mark", ":"):
            return True
        self._at = before
        return False

    def _take(self, kind: str, text: str | None = None) -> str | None:
        match = _TOKEN.match(self._text, self._at)
        if match is None or match.lastgroup != kind or (text is not None and match[kind] != text):
            return None
        self._at = match.end()
        return match[kind]

    def _need(self, kind: str, text: str | None = None) -> str:
        found = self._take(kind, text)
        if found is None:
            what = {"name": "the name of a type", "number": "a number"}.get(kind, repr(text))
            raise ValueError(f"{what} is missing at character {self._at + 1}")
        return found
