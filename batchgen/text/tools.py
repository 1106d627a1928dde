"""A row's tools, however they were stored, as the list that a chat template reads. The renderer calls it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from batchgen.json_problem import read_json
from batchgen.text.messages import without_nulls
from batchgen.types import ErrorClass, RowFailure

Tool = dict[str, Any]


def read_tools(where: str, value: Any) -> list[Tool] | None:
    """Tools from a list of dicts, an Arrow list of structs, or a JSON string of such a list.

    Null keys are dropped at every depth, as in messages. No tools at all (null, an empty list, an empty
    text) is None, because templates tell an empty list from none.

    Args:
        where: the column or setting, for messages.
        value: what it holds.

    Raises:
        RowFailure: `invalid_tools`.
    """
    if isinstance(value, str):
        value = _parse(where, value) if value.strip() else None
    if value is None:
        return None
    if not isinstance(value, list | tuple):
        _invalid(where, f"holds {type(value).__name__}, not a list of tools")
    for number, tool in enumerate(value, start=1):
        if not isinstance(tool, Mapping):
            _invalid(where, f"tool {number} is {type(tool).__name__}, not an object with its JSON schema")
    tools: list[Tool] = without_nulls(value)
    return tools or None


def _parse(where: str, text: str) -> Any:
    try:
        return read_json(text)
    except ValueError as error:
        raise RowFailure(
            ErrorClass.INVALID_TOOLS, f"{where} should hold tools as JSON, but: {error}"
        ) from error


def _invalid(where: str, what: str) -> NoReturn:
    raise RowFailure(ErrorClass.INVALID_TOOLS, f"{where} {what}")
