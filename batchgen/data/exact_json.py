"""JSON that loses nothing: every digit survives, and only strict JSON is ever written.

The readers decode records with `LineDecoder`; the sink writes with `encode`. Python's own parser does the
work; the hooks below decide what it leaves open (big numbers, NaN, surrogates, depth, duplicate keys).
"""

from __future__ import annotations

import base64
import json
import math
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from json.encoder import encode_basestring
from typing import Any

from batchgen.json_problem import json_problem
from batchgen.types import ErrorClass, RowFailure

MAX_DEPTH = 200
MAX_INT_DIGITS = 4300
"""Python's own default limit; as a constant of ours it does not move with PYTHONINTMAXSTRDIGITS."""

REPLACEMENT = "\ufffd"

_SURROGATE = re.compile("[\ud800-\udfff]")
_SURROGATE_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
# A string, closed or not (so that no byte is scanned twice), or one bracket.
_BRACKETS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"?|[\[{\]}]', re.DOTALL)
_PLAIN_SCALARS = frozenset({str, int, float, bool, type(None)})
_INTEGERS = frozenset({int})


class ExactFloat(float):
    """A float whose JSON text is not its `repr`; `text` is what is written to JSON again."""

    __slots__ = ("text",)
    text: str

    def __new__(cls, text: str) -> ExactFloat:
        self = super().__new__(cls, text)
        self.text = text
        return self

    def __reduce__(self) -> tuple[type[ExactFloat], tuple[str]]:
        return ExactFloat, (self.text,)


@dataclass(slots=True)
class Decoded:
    """One JSON object, with codes for what was repaired and the columns where NaN became null."""

    values: dict[str, Any]
    notes: tuple[str, ...]
    nonfinite: tuple[str, ...]


class LineDecoder:
    """Decodes the records of one reader. Not thread-safe: the hooks gather notes on the instance.

    Args:
        replace_invalid: bytes that are not UTF-8 and lone surrogates become U+FFFD instead of an error.
        strict: duplicate keys, NaN, infinities and raw control characters are errors, not notes.
        unit: what a record is called in messages.
    """

    def __init__(self, replace_invalid: bool, *, strict: bool = False, unit: str = "line") -> None:
        self._replace_invalid = replace_invalid
        self._refuse_repairs = strict
        self._unit = unit
        self._notes: list[str] = []
        self._quick = self._decoder(strict=True, parse_int=_quick_int())
        self._strict = self._decoder(strict=True)
        self._lenient = self._decoder(strict=False)

    def decode(self, data: bytes) -> Decoded:
        """One object from one record.

        Raises:
            RowFailure: invalid_json, invalid_unicode or number_out_of_range; the message names no place.
        """
        if self._notes:
            self._notes = []
        text = self._text(data)
        _check_depth(data)
        values = self._parse(text)
        if not isinstance(values, dict):
            kind = _json_kind(values)
            raise RowFailure(ErrorClass.INVALID_JSON, f"the {self._unit} holds {kind}, not an object {{...}}")
        nonfinite: tuple[str, ...] = ()
        if "nan_replaced" in self._notes:
            values, nonfinite = _without_nonfinite(values)
        if b"\\" in data and _SURROGATE_ESCAPE.search(data):
            values = self._without_surrogates(values)
        return Decoded(values, tuple(self._notes), nonfinite)

    def _decoder(self, strict: bool, parse_int: Callable[[str], int] | None = None) -> json.JSONDecoder:
        return json.JSONDecoder(
            parse_float=_exact_float,
            parse_int=parse_int or _bounded_int,
            parse_constant=self._constant,
            object_pairs_hook=self._object,
            strict=strict,
        )

    def _text(self, data: bytes) -> str:
        try:
            return data.decode()
        except UnicodeDecodeError as e:
            if self._replace_invalid:
                self._note("invalid_unicode_replaced")
                return data.decode(errors="replace")
            raise RowFailure(
                ErrorClass.INVALID_UNICODE,
                f"byte 0x{data[e.start]:02x} at byte {e.start} of the {self._unit} is not valid UTF-8; "
                "repair it or set input.unicode: replace",
            ) from None

    def _parse(self, text: str) -> Any:
        try:
            values, end = self._quick.raw_decode(text)
            if end == len(text):
                return values
        except (ValueError, RecursionError):
            pass
        return self._parse_with_care(text)

    def _parse_with_care(self, text: str) -> Any:
        """The same for what is not plain: space around it, something to repair, or to complain about."""
        try:
            try:
                return self._strict.decode(text)
            except json.JSONDecodeError as e:
                if self._refuse_repairs or not e.msg.startswith("Invalid control character"):
                    raise
            values = self._lenient.decode(text)
            self._note("control_character")
            return values
        except json.JSONDecodeError as e:
            raise RowFailure(
                ErrorClass.INVALID_JSON, f"not valid JSON: {json_problem(e)} of the {self._unit}"
            ) from None
        except RecursionError:
            raise _too_deep() from None

    def _note(self, code: str) -> None:
        if code not in self._notes:
            self._notes.append(code)

    def _constant(self, text: str) -> float:
        if self._refuse_repairs:
            raise _not_strict(f"{text} is no JSON number; write null")
        self._note("nan_replaced")
        return math.nan

    def _object(self, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) != len(pairs):
            if self._refuse_repairs:
                names = [name for name, _ in pairs]
                twice = next(name for place, name in enumerate(names) if name in names[:place])
                raise _not_strict(
                    f"the key {clean_text(twice)[:100]!r} occurs twice in one object; remove one"
                )
            self._note("duplicate_key")
        return values

    def _without_surrogates(self, values: dict[str, Any]) -> dict[str, Any]:
        def repair(text: str) -> str:
            found = _SURROGATE.search(text)
            if found is None:
                return text
            if not self._replace_invalid:
                raise RowFailure(
                    ErrorClass.INVALID_UNICODE,
                    f"the lone surrogate \\u{ord(found.group()):04x} is not a character; "
                    "repair it or set input.unicode: replace",
                )
            self._note("invalid_unicode_replaced")
            return _SURROGATE.sub(REPLACEMENT, text)

        def walk(value: Any) -> Any:
            if isinstance(value, str):
                return repair(value)
            if isinstance(value, list):
                return [walk(v) for v in value]
            if isinstance(value, dict):
                return {repair(k): walk(v) for k, v in value.items()}
            return value

        repaired: dict[str, Any] = walk(values)
        return repaired


def encode(value: Any) -> str:
    """Strict JSON on one line, whatever a row can hold.

    Exact floats keep their text, Decimals and integers every digit; NaN and infinities become null, bytes
    base64, lone surrogates U+FFFD. Line separators of Unicode are escaped, so that readers which split text
    on them see one line too.
    """
    return one_line(draft(value))


def one_line(text: str) -> str:
    """What `encode` gives, from JSON that was put together of drafts."""
    if text.isascii():
        return text
    text = text.replace("\x85", "\\u0085").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return clean_text(text)


def clean_text(text: str) -> str:
    """`text` with lone surrogates replaced by U+FFFD, so that it can always be stored as UTF-8."""
    return text if text.isascii() else _SURROGATE.sub(REPLACEMENT, text)


_encode_plain = json.JSONEncoder(ensure_ascii=False, allow_nan=False, check_circular=False).encode


def draft(value: Any) -> str:
    """JSON as `encode` writes it, but with lone surrogates and separators of lines in its strings."""
    write = _WRITERS.get(type(value))
    if write is None:
        write = next((w for type_, w in _WRITERS.items() if isinstance(value, type_)), None)
        if write is None:
            raise TypeError(f"a {type(value).__name__} has no JSON form")
    return write(value)


def draft_members(value: Mapping[Any, Any]) -> str:
    """Those of an object, without the braces around them, as `draft` writes them."""
    return ", ".join([f"{encode_basestring(str(k))}: {draft(v)}" for k, v in value.items()])


def _encode_dict(value: dict[Any, Any]) -> str:
    return f"{{{draft_members(value)}}}"


def _encode_list(value: list[Any] | tuple[Any, ...]) -> str:
    types = set(map(type, value))
    if types == _INTEGERS:
        # Python writes such a list, of token ids mostly, as JSON does.
        return repr(value if type(value) is list else list(value))
    if types <= _PLAIN_SCALARS:
        plain = _try_plain(value)
        if plain is not None:
            return plain
    return "[" + ", ".join(map(draft, value)) + "]"


# The most special type first, for values of types derived from these.
_WRITERS: dict[type, Callable[[Any], str]] = {
    str: encode_basestring,
    type(None): lambda value: "null",
    bool: lambda value: "true" if value else "false",
    ExactFloat: lambda value: value.text,
    float: lambda value: repr(value) if math.isfinite(value) else "null",
    int: int.__repr__,
    Decimal: lambda value: str(value) if value.is_finite() else "null",
    bytes: lambda value: f'"{base64.b64encode(value).decode()}"',
    dict: _encode_dict,
    list: _encode_list,
    tuple: _encode_list,
}


def _try_plain(value: Any) -> str | None:
    try:
        return _encode_plain(value)
    except ValueError:  # NaN or an infinity, which only the slow path turns into null
        return None


def _exact_float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise _out_of_range(text)
    return value if repr(value) == text else ExactFloat(text)


def _quick_int() -> Callable[[str], int]:
    """`int` itself, which the parser then need not call, where Python's limit is as strict as ours."""
    return int if 0 < sys.get_int_max_str_digits() <= MAX_INT_DIGITS else _bounded_int


def _bounded_int(text: str) -> int:
    if len(text) > MAX_INT_DIGITS:
        raise _out_of_range(text)
    try:
        return int(text)
    except ValueError:  # PYTHONINTMAXSTRDIGITS may be set below our own limit
        raise _out_of_range(text) from None


def _out_of_range(text: str) -> RowFailure:
    shown = text if len(text) <= 40 else f"{text[:20]}... of {len(text):,} characters"
    return RowFailure(
        ErrorClass.NUMBER_OUT_OF_RANGE,
        f"the number {shown} is too large (a double, or an integer of up to {MAX_INT_DIGITS} digits); "
        "write it as a string",
    )


def _not_strict(problem: str) -> RowFailure:
    return RowFailure(ErrorClass.INVALID_JSON, f"{problem}, or set input.strict_json: false")


def _check_depth(data: bytes) -> None:
    if data.count(b"[") + data.count(b"{") <= MAX_DEPTH:
        return
    depth = 0
    for token in _BRACKETS.finditer(data):
        first = data[token.start()]
        if first in b"[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise _too_deep()
        elif first in b"]}":
            depth -= 1


def _too_deep() -> RowFailure:
    return RowFailure(ErrorClass.INVALID_JSON, f"the JSON is nested deeper than {MAX_DEPTH} levels")


def _json_kind(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return "null" if value is None else "a boolean"
    if isinstance(value, (str, list)):
        return "a string" if isinstance(value, str) else "a list"
    return "a number"


def _without_nonfinite(values: dict[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    columns = [name for name, value in values.items() if _has_nonfinite(value)]
    return {k: _nonfinite_to_null(v) if k in columns else v for k, v in values.items()}, tuple(columns)


def _has_nonfinite(value: Any) -> bool:
    if isinstance(value, float):
        return not math.isfinite(value)
    if isinstance(value, dict):
        return any(map(_has_nonfinite, value.values()))
    return isinstance(value, list) and any(map(_has_nonfinite, value))


def _nonfinite_to_null(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {k: _nonfinite_to_null(v) for k, v in value.items()}
    return [_nonfinite_to_null(v) for v in value] if isinstance(value, list) else value
