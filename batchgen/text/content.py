"""What a row brings to its prompt: its text, conversation, tools or token ids, read from its columns.

Used by the prompt renderer, which makes a prompt of it, and by `overflow.py`, which makes it shorter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from batchgen.text import messages as chat
from batchgen.text.prompt_spec import CONTINUATION, PromptSpec
from batchgen.text.tools import Tool, read_tools
from batchgen.types import ErrorClass, RowFailure


@dataclass(frozen=True, slots=True)
class Content:
    """Everything in a prompt that is the row's, not the job's or the model's.

    Args:
        main: the prompt's text or the conversation; None where the job's templates make the prompt.
        values: the columns that the job's templates read.
        tools: what the model may call, where a column holds it.
        continuation: the text that is scored, where a column holds it.
    """

    main: str | list[chat.Message] | None
    values: Mapping[str, Any]
    tools: list[Tool] | None = None
    continuation: str | None = None

    def parts(self) -> tuple[Any, ...]:
        """All of it, for a look at its strings."""
        return (self.main, self.values, self.tools, self.continuation)


class RowReader:
    """Reads the columns that a job names.

    Args:
        spec: the job's `prompt` section.
        template_columns: that its templates read.
        vocab_size: token ids are below it.
    """

    def __init__(self, spec: PromptSpec, template_columns: Iterable[str], vocab_size: int) -> None:
        self._spec = spec
        self._template_columns = tuple(template_columns)
        self._vocab_size = vocab_size
        self._sources = spec.sources if spec.messages is None else (spec.messages,)

    def content(self, columns: Mapping[str, Any], dialogue: Sequence[chat.Message] = ()) -> Content:
        """What a prompt is made of.

        Args:
            columns: of the row.
            dialogue: turns that follow what the columns hold.

        Raises:
            RowFailure: a column is missing, null or empty, or holds something else.
        """
        values = {name: columns[name] for name in self._template_columns if name in columns}
        tools = None
        if isinstance(self._spec.tools, str):
            tools = read_tools(f"column {self._spec.tools!r}", columns.get(self._spec.tools))
        continuation = self._continuation(columns) if self._spec.continuation is None else None
        if self._spec.user is not None:
            return Content(None, values, tools, continuation)
        if self._spec.turns is None:
            return Content(self._main(columns), values, tools, continuation)
        begun = [] if self._spec.messages is None else self._conversation(columns)
        return Content([*begun, *dialogue], values, tools)

    def token_ids(self, columns: Mapping[str, Any]) -> list[int]:
        """The ids that a row holds.

        Raises:
            RowFailure: `invalid_param` for anything but ids of the vocabulary.
        """
        return self._ids(*self._source(columns))

    def continuation_ids(self, columns: Mapping[str, Any]) -> list[int]:
        """The ids that are scored, of a row that holds ids.

        Raises:
            RowFailure: as `token_ids`.
        """
        return self._ids(*_named(CONTINUATION, columns))

    def _ids(self, name: str, value: Any) -> list[int]:
        if not isinstance(value, list | tuple):
            _invalid(name, f"holds {type(value).__name__}, not a list of token ids")
        if value and (set(map(type, value)) != {int} or min(value) < 0 or max(value) >= self._vocab_size):
            position, item = next((p, i) for p, i in enumerate(value) if not self._is_id(i))
            where = f": {item!r} at position {position} is not a token id from 0 to {self._vocab_size - 1}"
            raise RowFailure(ErrorClass.INVALID_PARAM, f"column {name!r}{where}")
        return list(value)

    def user_turns(self, columns: Mapping[str, Any]) -> list[str]:
        """The user turns of a row that is a dialogue (`sampling.turns`).

        Raises:
            RowFailure: there is none, or one is no text.
        """
        name = self._spec.turns or ""
        if name not in columns:
            raise RowFailure(ErrorClass.MISSING_COLUMN, f"the row has no column {name!r}")
        value = columns[name]
        if isinstance(value, str) and value.lstrip().startswith("["):
            value = chat.parse_json(name, "turns", value)
        if value is None:
            raise RowFailure(ErrorClass.NULL_PROMPT, f"column {name!r} is null")
        if not isinstance(value, list | tuple):
            _invalid(name, f"holds {type(value).__name__}, not a list of user turns")
        if not value:
            raise RowFailure(ErrorClass.EMPTY_PROMPT, f"column {name!r} holds no turn")
        for number, turn in enumerate(value, start=1):
            if turn is None:
                raise RowFailure(ErrorClass.NULL_PROMPT, f"column {name!r}: turn {number} is null")
            if not isinstance(turn, str):
                _invalid(name, f"holds {type(turn).__name__} as turn {number}, not text")
            if not turn:
                raise RowFailure(ErrorClass.EMPTY_PROMPT, f"column {name!r}: turn {number} is empty")
        return list(value)

    def _is_id(self, item: Any) -> bool:
        return type(item) is int and 0 <= item < self._vocab_size

    def _source(self, columns: Mapping[str, Any]) -> tuple[str, Any]:
        """The column that holds the prompt, and its value, which is not null."""
        for name in self._sources:
            if name in columns:
                return _named(name, columns)
        raise RowFailure(
            ErrorClass.MISSING_COLUMN, f"the row has no column {' or '.join(map(repr, self._sources))}"
        )

    def _continuation(self, columns: Mapping[str, Any]) -> str | None:
        if not self._spec.scores_pairs:
            return None
        name, value = _named(CONTINUATION, columns)
        if not isinstance(value, str):
            _invalid(
                name,
                f"holds {type(value).__name__}, not text; "
                f"set prompt.continuation: '{{{{ {name} }}}}' to make text of it",
            )
        return value

    def _main(self, columns: Mapping[str, Any]) -> str | list[chat.Message]:
        """The row's prompt text or conversation."""
        name, value = self._source(columns)
        if self._spec.mode == "chat" and (self._names_conversation(name) or isinstance(value, list | tuple)):
            return chat.read_messages(name, value)
        if not isinstance(value, str):
            _invalid(
                name,
                f"holds {type(value).__name__}, not text; "
                f"set prompt.user: '{{{{ {name} }}}}' to make text of it",
            )
        if not value and not self._spec.scores_pairs:
            raise RowFailure(ErrorClass.EMPTY_PROMPT, f"column {name!r} is empty")
        return value

    def _conversation(self, columns: Mapping[str, Any]) -> list[chat.Message]:
        return chat.read_messages(*self._source(columns))

    def _names_conversation(self, column: str) -> bool:
        """Whether text in the column is a conversation as JSON, not a user turn."""
        return column in (self._spec.messages, "messages")


def _invalid(column: str, what: str) -> NoReturn:
    raise RowFailure(ErrorClass.INVALID_PARAM, f"column {column!r} {what}")


def _named(name: str, columns: Mapping[str, Any]) -> tuple[str, Any]:
    """A column and its value, which is not null."""
    if name not in columns:
        raise RowFailure(ErrorClass.MISSING_COLUMN, f"the row has no column {name!r}")
    value = columns[name]
    if value is None:
        raise RowFailure(ErrorClass.NULL_PROMPT, f"column {name!r} is null")
    if isinstance(value, float) and not math.isfinite(value):
        raise RowFailure(
            ErrorClass.NUMBER_OUT_OF_RANGE,
            f"column {name!r} holds NaN or an infinity, which no prompt can show; correct the row",
        )
    return name, value
