"""What is wrong with a JSON text, in words that do not change with Python's version: rows keep them.

The readers of records use it, and whoever reads JSON out of a column.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

_PROBLEMS = {
    "Expecting value": "a value is missing",
    "Expecting property name": "a key in double quotes is missing",
    "Expecting ':'": "a colon is missing",
    "Expecting ','": "a comma or the closing bracket is missing",
    "Unterminated string": "a string is never closed, which begins",
    "Extra data": "text follows the end",
    "Invalid control character": "a control character stands in a string",
    "Invalid \\escape": "a backslash begins no escape",
    "Invalid \\uXXXX": "\\u is not followed by four hexadecimal digits",
    "Illegal trailing comma": "a comma is followed by nothing",
    "Unexpected UTF-8 BOM": "a byte order mark stands in front",
}


def json_problem(error: ValueError) -> str:
    """The problem and its place, as in `a value is missing at character 12`, counted from 1."""
    if not isinstance(error, json.JSONDecodeError):
        return str(error)
    ours = next((ours for theirs, ours in _PROBLEMS.items() if error.msg.startswith(theirs)), error.msg)
    return f"{ours} at character {error.pos + 1}"


def read_json(text: str, *, constants: bool = False) -> Any:
    """The value of a JSON text out of a column.

    Args:
        text: the JSON.
        constants: whether `NaN` and the infinities, which are not JSON, are read.

    Raises:
        ValueError: its message is the problem, in words that do not change.
    """
    try:
        return json.loads(text, parse_constant=None if constants else _refuse_constant)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error
    except ValueError as error:
        raise ValueError(json_problem(error)) from error


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
