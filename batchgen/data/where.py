"""`input.where`: which rows of the input are selected. `InputSet` asks it of every row that it reads.

The expression is parsed by `where_syntax` and evaluated on the row's exact Python values, never by Python's
own eval, so that it means the same for every format: integers and decimals with all digits, times as their
ISO 8601 text (which sorts as time does), a column that a row lacks as null.

Null, and NaN, which counts as null, goes through every operator and function but `is null` and `coalesce`;
`and`, `or` and `not` know three values, as in SQL. A row is selected where the whole is true. Numbers are
compared exactly; a float meets a decimal by its shortest text, so that `price = 0.1` finds the decimal 0.1.
`/` is true division; `a % b` has the sign of b. Values of two kinds are never equal and never ordered: to
compare them is an error of the row.
"""

from __future__ import annotations

import difflib
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Context, Decimal, InvalidOperation, Overflow
from typing import Any

from batchgen.data.row import Row
from batchgen.data.where_syntax import (
    FUNCTIONS,
    Column,
    IsNull,
    Literal,
    Node,
    OneOf,
    Operation,
    fail_at,
    parse,
)
from batchgen.types import ErrorClass, RowError, RowFailure

_Evaluate = Callable[[Mapping[str, Any]], Any]

# Enough for the 76 digits of the widest decimals and a product of two of them.
_DECIMALS = Context(prec=160)
_MARK = "input.where: "
_SPELLED = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,6})?", re.ASCII)
_COMPARE: Mapping[str, Callable[[Any, Any], bool]] = {
    "=": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
_CALCULATE: Mapping[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "%": operator.mod,
}
_CALCULATE_DECIMALS: Mapping[str, Callable[[Decimal, Decimal], Decimal]] = {
    "+": _DECIMALS.add,
    "-": _DECIMALS.subtract,
    "*": _DECIMALS.multiply,
    "/": _DECIMALS.divide,
}


class Where:
    """A parsed expression.

    Args:
        text: of `input.where`.

    Raises:
        UsageError: it is not an expression; shows where.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self._tree = parse(text)
        self._evaluate = _compiled(self._tree)
        self._columns: dict[str, int] = {}
        _gather_columns(self._tree, self._columns)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that it looks at, in order."""
        return tuple(self._columns)

    def require_columns(self, known: Sequence[str]) -> None:
        """Raises UsageError for a column that the input does not have, with the nearest one."""
        for name, at in self._columns.items():
            if known and name not in known:
                near = difflib.get_close_matches(name, known, n=1)
                hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known)}"
                fail_at(self.text, at, f"the input has no column {name!r}; {hint}")

    def selects(self, values: Mapping[str, Any]) -> bool:
        """Whether the row with these values is selected.

        Raises:
            RowFailure: invalid_param or number_out_of_range, where the expression has no value for them.
        """
        try:
            value = self._evaluate(values)
        except (ZeroDivisionError, OverflowError, InvalidOperation, Overflow) as error:
            zero = isinstance(error, ZeroDivisionError)
            what = "a division by zero" if zero else "a number beyond what can be computed"
            raise RowFailure(ErrorClass.NUMBER_OUT_OF_RANGE, f"{_MARK}{what}") from None
        if value is None or isinstance(value, bool):
            return value is True
        raise RowFailure(ErrorClass.INVALID_PARAM, f"{_MARK}it gives {kind_of(value)}, not true or false")

    def apply(self, row: Row) -> None:
        """Sets `row.selected`. A row that cannot be read stays; one without an answer gets an error."""
        if row.error is not None:
            return
        try:
            row.selected = self.selects(row.values)
        except RowFailure as failure:
            where = f"line {row.line}" if row.line else f"row {row.ordinal}"
            message = f"{row.file} {where}: {failure.error.message}"
            row.error = RowError(failure.error.error_class, message)


def is_unanswered(error: RowError) -> bool:
    """Whether a row has this error because there was no answer for it."""
    return f": {_MARK}" in error.message


def kind_of(value: Any) -> str:
    """What a value is, in words."""
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float | Decimal):
        return "a number"
    names = {str: "a text", bytes: "binary data", list: "a list", dict: "a struct", type(None): "null"}
    return names.get(type(value), f"a {type(value).__name__}")


def _gather_columns(node: Node, found: dict[str, int]) -> None:
    match node:
        case Column(at=at, path=path):
            found.setdefault(path[0], at)
        case Operation(operands=operands):
            for operand in operands:
                _gather_columns(operand, found)
        case IsNull(operand=operand) | OneOf(operand=operand):
            _gather_columns(operand, found)


def _compiled(node: Node) -> _Evaluate:
    """A function of a row's values that gives the value of `node`."""
    match node:
        case Literal(value=value):
            return lambda values: value
        case Column():
            return _column(node)
        case IsNull(operand=operand):
            inner = _compiled(operand)
            return lambda values: inner(values) is None
        case OneOf():
            return _one_of(node)
        case Operation(operator="and" | "or" as word, operands=operands):
            return _logical([_boolean(word, operand) for operand in operands], decided_by=word == "or")
        case Operation(operator="not", operands=(operand,)):
            inner = _boolean("not", operand)
            return lambda values: None if (value := inner(values)) is None else not value
        case Operation(operator="negate", operands=(operand,)):
            return _arithmetic("-", Literal(operand.at, 0), operand)
        case Operation(operator=name, operands=operands):
            if name in _COMPARE:
                return _comparison(name, *operands)
            if name in _CALCULATE:
                return _arithmetic(name, *operands)
            return _function(name, operands)
    raise TypeError(f"{node} is no part of an expression")


def _fail(problem: str) -> RowFailure:
    return RowFailure(ErrorClass.INVALID_PARAM, f"{_MARK}{problem}")


def _name(node: Node) -> str:
    """What to call the value of `node` in a message."""
    match node:
        case Column():
            return f"column {node.name!r}"
        case Literal(value=value):
            return repr(value)
        case Operation(operator=word) if word in FUNCTIONS:
            return f"{word}(…)"
        case _:
            return f"the value at character {node.at + 1}"


def _column(node: Column) -> _Evaluate:
    first, *fields = node.path
    if not fields:
        return lambda values: _without_nan(values.get(first))

    def nested(values: Mapping[str, Any]) -> Any:
        value = values.get(first)
        for depth, field in enumerate(fields):
            if value is None:
                return None
            if not isinstance(value, dict):
                path = ".".join((first, *fields[:depth]))
                raise _fail(f"column {path!r} is {kind_of(value)} and has no field {field!r}")
            value = value.get(field)
        return _without_nan(value)

    return nested


def _without_nan(value: Any) -> Any:
    return None if isinstance(value, float) and value != value else value


def _boolean(word: str, node: Node) -> _Evaluate:
    inner = _compiled(node)

    def evaluate(values: Mapping[str, Any]) -> bool | None:
        value = inner(values)
        if value is None or isinstance(value, bool):
            return value
        raise _fail(f"`{word}` needs true or false, and {_name(node)} is {kind_of(value)}")

    return evaluate


def _logical(operands: Sequence[_Evaluate], *, decided_by: bool) -> _Evaluate:
    """`or` is decided by a true, `and` by a false; null only if nothing decides."""

    def evaluate(values: Mapping[str, Any]) -> Any:
        unknown = False
        for operand in operands:
            value = operand(values)
            if value is decided_by:
                return decided_by
            unknown = unknown or value is None
        return None if unknown else not decided_by

    return evaluate


def _comparison(sign: str, left_node: Node, right_node: Node) -> _Evaluate:
    left, right, compare = _compiled(left_node), _compiled(right_node), _COMPARE[sign]
    ordered = sign not in ("=", "!=")

    def evaluate(values: Mapping[str, Any]) -> Any:
        a, b = left(values), right(values)
        if a is None or b is None:
            return None
        kind = _comparable(a)
        if kind is None or kind is not _comparable(b) or (ordered and kind is bool):
            signs = f"{_name(left_node)} is {kind_of(a)}, {_name(right_node)} is {kind_of(b)}"
            raise _fail(f"{signs}, and `{sign}` cannot compare them")
        return compare(*_alike(a, b))

    return evaluate


def _comparable(value: Any) -> type | None:
    """Values of one such class can be compared."""
    if isinstance(value, str):
        return str
    if isinstance(value, bool):
        return bool
    if isinstance(value, int | float | Decimal):
        return float
    return bytes if isinstance(value, bytes) else None


def _alike(a: Any, b: Any) -> tuple[Any, Any]:
    """Two values of one class, a float beside a decimal as the decimal of its shortest text."""
    if isinstance(a, Decimal) and isinstance(b, float):
        return a, Decimal(repr(float(b)))
    if isinstance(b, Decimal) and isinstance(a, float):
        return Decimal(repr(float(a))), b
    return a, b


def _one_of(node: OneOf) -> _Evaluate:
    inner, wanted = _compiled(node.operand), node.values
    kind = _comparable(wanted[0])

    def evaluate(values: Mapping[str, Any]) -> bool | None:
        value = inner(values)
        if value is None:
            return None
        if _comparable(value) is not kind:
            raise _fail(
                f"{_name(node.operand)} is {kind_of(value)}, and the list after `in` holds "
                f"{kind_of(wanted[0]).removeprefix('a ')}s"
            )
        return any(bool(operator.eq(*_alike(value, other))) for other in wanted)

    return evaluate


def _number(value: Any, node: Node, sign: str) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        raise _fail(f"`{sign}` needs numbers, and {_name(node)} is {kind_of(value)}")
    return value


def _arithmetic(sign: str, left_node: Node, right_node: Node) -> _Evaluate:
    left, right = _compiled(left_node), _compiled(right_node)

    def evaluate(values: Mapping[str, Any]) -> Any:
        a, b = left(values), right(values)
        if a is None or b is None:
            return None
        return _calculate(sign, _number(a, left_node, sign), _number(b, right_node, sign))

    return evaluate


def _calculate(sign: str, a: Any, b: Any) -> Any:
    a, b = _alike(a, b)
    if not (isinstance(a, Decimal) or isinstance(b, Decimal)):
        result = _CALCULATE[sign](a, b)
    elif sign == "%":
        result = _decimal_modulo(Decimal(a), Decimal(b))
    else:
        result = _CALCULATE_DECIMALS[sign](Decimal(a), Decimal(b))
    return _without_nan(result)


def _decimal_modulo(a: Decimal, b: Decimal) -> Decimal:
    """With the sign of `b`, as for other numbers."""
    if not b:
        raise ZeroDivisionError
    rest = _DECIMALS.remainder(a, b)
    return _DECIMALS.add(rest, b) if rest and (rest < 0) != (b < 0) else rest


def _function(name: str, nodes: Sequence[Node]) -> _Evaluate:
    arguments = [_compiled(node) for node in nodes]
    if name == "coalesce":
        return lambda values: next((v for a in arguments if (v := a(values)) is not None), None)
    compute = _FUNCTIONS[name]

    def evaluate(values: Mapping[str, Any]) -> Any:
        given = [argument(values) for argument in arguments]
        if any(value is None for value in given):
            return None
        result = compute(*given)
        if result is None:
            kinds = " and ".join(kind_of(value) for value in given)
            raise _fail(f"{name}() takes {_TAKES[name]}, and {_name(nodes[0])} is {kinds}")
        return result

    return evaluate


def _of_text(compute: Callable[..., Any]) -> Callable[..., Any]:
    """None where an argument is not a text."""

    def evaluate(*given: Any) -> Any:
        return compute(*given) if all(isinstance(value, str) for value in given) else None

    return evaluate


def _contains(whole: Any, item: Any) -> bool | None:
    if isinstance(whole, list):
        kind = _comparable(item)
        return any(_comparable(v) is kind and bool(operator.eq(*_alike(v, item))) for v in whole)
    return item in whole if isinstance(whole, str) and isinstance(item, str) else None


def _length(value: Any) -> int | None:
    return len(value) if isinstance(value, str | bytes | list) else None


def _absolute(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float | Decimal):
        return None
    return value.copy_abs() if isinstance(value, Decimal) else abs(value)


def _to_number(value: Any) -> Any:
    """A number as it is, a text as the number that it spells with all its digits."""
    if isinstance(value, str):
        text = value.strip()
        return Decimal(text) if _SPELLED.fullmatch(text) else None
    return None if isinstance(value, bool) or not isinstance(value, int | float | Decimal) else value


_FUNCTIONS: Mapping[str, Callable[..., Any]] = {
    "abs": _absolute,
    "contains": _contains,
    "endswith": _of_text(str.endswith),
    "length": _length,
    "lower": _of_text(str.lower),
    "number": _to_number,
    "startswith": _of_text(str.startswith),
    "trim": _of_text(str.strip),
    "upper": _of_text(str.upper),
}
_TAKES = {
    "abs": "a number",
    "contains": "a text and a text, or a list and a value",
    "endswith": "two texts",
    "length": "a text or a list",
    "lower": "a text",
    "number": "a number or a text that spells one",
    "startswith": "two texts",
    "trim": "a text",
    "upper": "a text",
}
