"""A row's conversation, however it was stored, as the list of turns that a chat template reads.

Used by the prompt renderer. A turn is a dict with a `role`; everything else in it is the template's
affair.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from batchgen.json_problem import read_json
from batchgen.types import ErrorClass, RowFailure

Message = dict[str, Any]


def read_messages(column: str, value: Any) -> list[Message]:
    """Turns from a list of dicts, an Arrow list of structs, or a JSON string of such a list.

    Null keys are dropped at every depth: Arrow fills each struct up to the common schema, and a
    template would take a key that is there for one that is meant.

    Raises:
        RowFailure: `null_prompt`, `empty_prompt`, `invalid_json`, or `invalid_param`.
    """
    if isinstance(value, str):
        value = parse_json(column, "messages", value) if value else []
    if value is None:
        raise RowFailure(ErrorClass.NULL_PROMPT, f"column {column!r} is null")
    if not isinstance(value, list | tuple):
        _invalid(column, f"holds {type(value).__name__}, not a list of messages")
    if not value:
        raise RowFailure(ErrorClass.EMPTY_PROMPT, f"column {column!r} holds no message")
    return [_message(column, number, item) for number, item in enumerate(value, start=1)]


def _message(column: str, number: int, item: Any) -> Message:
    if not isinstance(item, Mapping):
        _invalid(column, f"message {number} is {type(item).__name__}, not an object with role and content")
    message: Message = without_nulls(item)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        _invalid(column, f"message {number} has no role; use system, user or assistant")
    if role in ("system", "user") and "content" not in message:
        raise RowFailure(
            ErrorClass.NULL_PROMPT, f"column {column!r}: message {number} ({role}) has no content"
        )
    if isinstance(message.get("content"), list):
        message["content"] = _joined(column, number, message["content"])
    return message


def _joined(column: str, number: int, parts: list[Any]) -> str:
    """The text of a content that came in parts; templates of text models print a list as Python would."""
    for part in parts:
        if (
            not isinstance(part, Mapping)
            or part.get("type") != "text"
            or not isinstance(part.get("text"), str)
        ):
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            _invalid(column, f"message {number} has a part of type {kind!r}; only text parts can be read")
    return "".join(part["text"] for part in parts)


def without_nulls(value: Any) -> Any:
    """A copy without the keys that are null, at any depth."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    if isinstance(value, list | tuple):
        return [without_nulls(item) for item in value]
    return value


def parse_json(column: str, what: str, text: str) -> Any:
    """A value that a column holds as JSON text.

    Raises:
        RowFailure: `invalid_json`.
    """
    try:
        return read_json(text)
    except ValueError as error:
        raise RowFailure(
            ErrorClass.INVALID_JSON, f"column {column!r} should hold {what} as JSON, but: {error}"
        ) from error


def _invalid(column: str, what: str) -> NoReturn:
    raise RowFailure(ErrorClass.INVALID_PARAM, f"column {column!r} {what}")


def with_system(messages: list[Message], system: str | None) -> list[Message]:
    """The conversation with the job's system turn first.

    Raises:
        RowFailure: `template` if the row brings a system turn of its own.
    """
    if system is None:
        return messages
    if messages[0]["role"] == "system":
        raise RowFailure(
            ErrorClass.TEMPLATE,
            "the row's messages begin with a system turn and prompt.system gives another; keep one of them",
        )
    return [{"role": "system", "content": system}, *messages]


def with_assistant_prefix(messages: list[Message], prefix: str) -> list[Message]:
    """The conversation with the begun answer as its last turn; unchanged for an empty prefix.

    Raises:
        RowFailure: `template` if the last turn is the assistant's already.
    """
    if not prefix:
        return messages
    if messages[-1]["role"] == "assistant":
        raise RowFailure(
            ErrorClass.TEMPLATE,
            "the row's messages end with an assistant turn and prompt.assistant_prefix begins another; "
            "keep one of them",
        )
    return [*messages, {"role": "assistant", "content": prefix}]


def prepend_system_to_user(messages: list[Message]) -> list[Message]:
    """The conversation with a leading system turn merged into the user turn after it.

    Raises:
        RowFailure: `template` if no user turn follows.
    """
    if messages[0]["role"] != "system":
        return messages
    system, rest = messages[0]["content"], messages[1:]
    if not rest or rest[0]["role"] != "user":
        raise RowFailure(
            ErrorClass.TEMPLATE,
            "prompt.system_fallback: prepend_to_user needs a user turn right after the system turn, "
            "and there is none",
        )
    content = rest[0]["content"]
    merged = (
        f"{system}\n\n{content}"
        if isinstance(system, str) and isinstance(content, str)
        else [*_parts(system), {"type": "text", "text": "\n\n"}, *_parts(content)]
    )
    return [{**rest[0], "content": merged}, *rest[1:]]


def _parts(content: Any) -> list[Any]:
    return [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
