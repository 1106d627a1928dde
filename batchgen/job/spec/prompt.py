"""`prompt` of a job file."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from batchgen.job.spec.section import Rule, Section
from batchgen.job.spec.values import Auto, Text, as_tuple


def _portable(value: dict[str, Any]) -> dict[str, Any]:
    """What can be hashed as JSON and sent to a worker: no NaN, no lone surrogate, no endless integer."""
    json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    if not _fits(value):
        raise ValueError("an integer of more than 64 bits")
    return value


def _portable_all(value: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
    return tuple(map(_portable, value))


def _fits(value: Any) -> bool:
    if isinstance(value, dict | list):
        return all(map(_fits, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, int) or -(2**63) <= value < 2**63


class PromptSection(Section):
    """From a row's columns to the text that the model continues."""

    mode: Annotated[Literal["chat", "completion", "tokens"], Rule("chat, completion or tokens")] = "chat"
    messages: Annotated[Text | None, Rule("null or the name of a column")] = None
    system: Annotated[str | None, Rule("null or a text")] = None
    user: Annotated[Text | None, Rule("null or a template")] = None
    continuation: Annotated[Text | None, Rule("null or a template")] = None
    assistant_prefix: Annotated[Text | None, Rule("null or a text")] = None
    chat_template: Annotated[
        Text | None, Rule("null, a file, a template, or the name of one of the tokenizer's")
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any], AfterValidator(_portable), Rule("a map of names to values that JSON knows")
    ] = Field(default_factory=dict)
    system_fallback: Annotated[Literal["error", "prepend_to_user"], Rule("error or prepend_to_user")] = (
        "error"
    )
    tools: Annotated[
        Text
        | Annotated[tuple[dict[str, Any], ...], BeforeValidator(as_tuple), AfterValidator(_portable_all)]
        | None,
        Rule("null, the name of a column, or a list of tools, each a map that JSON knows"),
    ] = None
    bos: Annotated[Auto, Rule("auto")] = "auto"
    special_tokens_in_content: Annotated[
        Literal["escape", "allow", "error"], Rule("escape, allow or error")
    ] = "escape"
    overflow: Annotated[
        Literal["error", "skip", "truncate_left", "truncate_right", "truncate_middle"],
        Rule("error, skip, truncate_left, truncate_right or truncate_middle"),
    ] = "error"
