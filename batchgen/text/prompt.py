"""From a row's columns to the token ids of its prompt.

The engine worker prepares rows in batches with `PromptRenderer.prepare_batch`; `validate` calls
`probe` before any weights load; `show` prints what `explain` returns. A fault of a row is a
`RowError` in that row's place and never touches another row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from batchgen.text import messages as chat
from batchgen.text.control_tokens import ControlTokens
from batchgen.text.encoder import Draft, PromptEncoder
from batchgen.text.prompt_spec import PromptSpec
from batchgen.text.templates import JobTemplate
from batchgen.text.tokenizer import Tokenizer
from batchgen.types import ErrorClass, RowError, RowFailure, UsageError

__all__ = ["Explanation", "PreparedRow", "PromptRenderer", "PromptSpec"]

_SHOWN = 500


@dataclass(frozen=True, slots=True)
class PreparedRow:
    """A row that can be run.

    Args:
        row: its ordinal.
        token_ids: the prompt, never empty and shorter than the context.
        control_tokens: how many control tokens the row's own text spells.
        notes: what a report should say about it.
        text: the rendered prompt; None where the row came as token ids.
    """

    row: int
    token_ids: list[int]
    control_tokens: int = 0
    notes: tuple[str, ...] = ()
    text: str | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """What becomes of one row, for a person.

    Args:
        text: the rendered prompt; None if it could not be rendered.
        tokens: (id, the vocabulary's spelling, whether it is a special token).
        control_tokens: how many control tokens the row's own text spells.
        error: why the row cannot be run, if so.
    """

    text: str | None
    tokens: list[tuple[int, str, bool]]
    control_tokens: int
    error: RowError | None


class PromptRenderer:
    """Renders and tokenizes the rows of one job.

    Args:
        spec: the job's `prompt` section; `bind` it first where the columns are known.
        tokenizer: the model's.

    Raises:
        UsageError: a template of the job is not valid Jinja.
    """

    def __init__(self, spec: PromptSpec, tokenizer: Tokenizer) -> None:
        self.spec = spec
        self.tokenizer = tokenizer
        self._control = ControlTokens(tokenizer)
        self._encoder = PromptEncoder(tokenizer, self._control, plain_text=spec.mode == "completion")
        self._templates = {name: JobTemplate(name, source) for name, source in spec.templates().items()}
        self._template_columns = frozenset().union(*(t.columns for t in self._templates.values()))

    def required_columns(self) -> frozenset[str]:
        """Columns of a row that rendering reads; of several sources one is enough."""
        return self.spec.required_columns()

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know about this job's template."""
        template = self.spec.chat_template or self.tokenizer.chat_template or ""
        if (
            self.spec.mode != "chat"
            or "strftime_now" not in template
            or "date_string" in self.spec.chat_template_kwargs
        ):
            return ()
        return (
            "the chat template writes today's date into prompts, so rows of another day differ; "
            "set prompt.chat_template_kwargs: {date_string: …} if the template reads it",
        )

    def probe(self, columns: Iterable[str] | None = None) -> None:
        """Render the job's own roles with made-up text, so that what fails for every row fails now.

        Args:
            columns: the input's, where they are known.

        Raises:
            UsageError: says which setting, what the template said, and the remedy.
        """
        if columns is not None:
            self.spec.bind(columns)
        if self.spec.mode != "chat":
            return
        if self.spec.chat_template is None and not self.tokenizer.hf.chat_template:
            raise UsageError(
                "prompt.mode: this tokenizer has no chat template, as is usual for base models; "
                "set prompt.mode: completion, or give prompt.chat_template"
            )
        user = {"role": "user", "content": "batchgen probes the user turn"}
        self._try("prompt.chat_template", "cannot render a plain user turn", [user])
        if self.spec.system is not None and self.spec.system_fallback == "error" and self._system_refusal:
            raise UsageError(
                f"prompt.system: the chat template refuses a system turn ({self._system_refusal}); "
                "set prompt.system_fallback: prepend_to_user"
            )
        if self.spec.assistant_prefix:
            begun = {"role": "assistant", "content": "batchgen probes the answer"}
            self._try("prompt.assistant_prefix", "cannot leave an assistant turn open", [user, begun])

    def _try(self, setting: str, what: str, turns: list[chat.Message]) -> None:
        try:
            self._render_chat(turns, continue_final_message=turns[-1]["role"] == "assistant")
        except Exception as error:
            raise UsageError(f"{setting}: the chat template {what} ({_said(error)})") from error

    @cached_property
    def _system_refusal(self) -> str | None:
        """Why the chat template has no system turn; None if it has one."""
        text = "batchgen probes the system turn"
        turns = [
            {"role": "system", "content": text},
            {"role": "user", "content": "batchgen probes the user turn"},
        ]
        try:
            rendered = self._render_chat(turns, continue_final_message=False)
        except Exception as error:
            return _said(error)
        return None if text in rendered else "it leaves its text out"

    def prepare_batch(
        self, rows: Sequence[tuple[int, Mapping[str, Any]]], max_model_len: int
    ) -> list[PreparedRow | RowError]:
        """Token ids of many rows at once, in their order.

        Args:
            rows: (ordinal, columns).
            max_model_len: most tokens of prompt and answer together; a prompt leaves room for one.
        """
        drafts: list[Draft | RowError] = [_caught(self._draft, columns) for _, columns in rows]
        self._encoder.encode([draft for draft in drafts if isinstance(draft, Draft)])
        return [
            draft if isinstance(draft, RowError) else _caught(self._finish, row, draft, max_model_len)
            for (row, _), draft in zip(rows, drafts, strict=True)
        ]

    def explain(self, columns: Mapping[str, Any], max_model_len: int | None = None) -> Explanation:
        """What `prepare_batch` makes of one row, with everything in between."""
        draft = _caught(self._draft, columns)
        if isinstance(draft, RowError):
            return Explanation(None, [], 0, draft)
        self._encoder.encode([draft])
        prepared = _caught(self._finish, 0, draft, max_model_len)
        ids = draft.token_ids or []
        tokens = [(i, self.tokenizer.token(i) or "", i in self.tokenizer.special_ids) for i in ids]
        text = self.tokenizer.decode_all(ids) if draft.text is None else draft.shown_text
        error = prepared if isinstance(prepared, RowError) else None
        return Explanation(text, tokens, draft.control_tokens, error)

    def _draft(self, columns: Mapping[str, Any]) -> Draft:
        content = {name: columns[name] for name in self._template_columns if name in columns}
        if self.spec.mode == "tokens":
            return Draft(token_ids=self._read_ids(*self._source(columns)))
        main = self._main_content(columns)
        found = self._control.find([main, *content.values()])
        draft = Draft(control_tokens=len(found))
        policy = self.spec.special_tokens_in_content
        if found and policy == "error":
            raise RowFailure(
                ErrorClass.INVALID_PARAM,
                f"the row's text spells the control token {found[0]!r}; remove it, or set "
                "prompt.special_tokens_in_content: escape or allow",
            )
        if policy == "escape" and self._control.touches([main, *content.values()]):
            draft.marker = self._control.marker_for([main, *content.values()])
            main = self._control.mark(main, draft.marker)
            content = {name: self._control.mark(value, draft.marker) for name, value in content.items()}
        try:
            draft.text = self._text(main, content)
            _check_unicode(draft.text)
        except RowFailure as failure:
            raise _without_marker(failure, draft.marker) from failure
        return draft

    def _source(self, columns: Mapping[str, Any]) -> tuple[str, Any]:
        """The column that holds the prompt, and its value, which is not null."""
        candidates = self.spec.sources if self.spec.messages is None else (self.spec.messages,)
        name = next((candidate for candidate in candidates if candidate in columns), None)
        if name is None:
            raise RowFailure(
                ErrorClass.MISSING_COLUMN, f"the row has no column {' or '.join(map(repr, candidates))}"
            )
        if columns[name] is None:
            raise RowFailure(ErrorClass.NULL_PROMPT, f"column {name!r} is null")
        return name, columns[name]

    def _main_content(self, columns: Mapping[str, Any]) -> str | list[chat.Message] | None:
        """The row's prompt text or conversation; None where the job's templates make the prompt."""
        if self.spec.user is not None:
            return None
        name, value = self._source(columns)
        if self.spec.mode == "chat" and (self._names_conversation(name) or isinstance(value, list | tuple)):
            return chat.read_messages(name, value)
        if not isinstance(value, str):
            raise RowFailure(
                ErrorClass.INVALID_PARAM,
                f"column {name!r} holds {type(value).__name__}, not text; "
                f"set prompt.user: '{{{{ {name} }}}}' to make text of it",
            )
        if not value:
            raise RowFailure(ErrorClass.EMPTY_PROMPT, f"column {name!r} is empty")
        return value

    def _names_conversation(self, column: str) -> bool:
        """Whether text in the column is a conversation as JSON, not a user turn."""
        return column in (self.spec.messages, "messages")

    def _text(self, main: str | list[chat.Message] | None, content: Mapping[str, Any]) -> str:
        if main is None:
            main = self._templates["prompt.user"].render(content)
            if not main:
                raise RowFailure(
                    ErrorClass.EMPTY_PROMPT, "prompt.user: the template gives no text for this row"
                )
        if self.spec.mode == "completion":
            if not isinstance(main, str):
                raise TypeError("a completion prompt is text")
            return main
        turns = [{"role": "user", "content": main}] if isinstance(main, str) else main
        turns = chat.with_system(turns, self._render_own("prompt.system", content))
        if self.spec.system_fallback == "prepend_to_user" and self._system_refusal:
            turns = chat.prepend_system_to_user(turns)
        prefix = self._render_own("prompt.assistant_prefix", content) or ""
        turns = chat.with_assistant_prefix(turns, prefix)
        try:
            return self._render_chat(turns, continue_final_message=bool(prefix))
        except Exception as error:
            raise RowFailure(ErrorClass.TEMPLATE, f"the chat template failed: {_said(error)}") from error

    def _render_own(self, name: str, content: Mapping[str, Any]) -> str | None:
        template = self._templates.get(name)
        return None if template is None else template.render(content)

    def _render_chat(self, turns: list[chat.Message], *, continue_final_message: bool) -> str:
        return self.tokenizer.render_chat(
            turns,
            template=self.spec.chat_template,
            kwargs=self.spec.chat_template_kwargs,
            continue_final_message=continue_final_message,
        )

    def _read_ids(self, name: str, value: Any) -> list[int]:
        if not isinstance(value, list | tuple):
            raise RowFailure(
                ErrorClass.INVALID_PARAM,
                f"column {name!r} holds {type(value).__name__}, not a list of token ids",
            )
        for position, item in enumerate(value):
            if type(item) is not int or not 0 <= item < self.tokenizer.vocab_size:
                raise RowFailure(
                    ErrorClass.INVALID_PARAM,
                    f"column {name!r}: {item!r} at position {position} is not a token id from 0 to "
                    f"{self.tokenizer.vocab_size - 1}",
                )
        return list(value)

    def _finish(self, row: int, draft: Draft, max_model_len: int | None) -> PreparedRow:
        ids = draft.token_ids
        if draft.error is not None:
            raise RowFailure(draft.error.error_class, draft.error.message)
        if not ids:
            raise RowFailure(ErrorClass.EMPTY_PROMPT, "the prompt has no tokens")
        if max_model_len is not None and len(ids) >= max_model_len:
            raise RowFailure(
                ErrorClass.CONTEXT_LENGTH,
                f"the prompt has {len(ids)} tokens and the context holds {max_model_len}, at least one of "
                "them for the answer; shorten the prompt or raise model.max_model_len",
            )
        text = None if draft.text is None else draft.shown_text
        return PreparedRow(row, ids, draft.control_tokens, self._row_notes(draft), text)

    def _row_notes(self, draft: Draft) -> tuple[str, ...]:
        if not draft.control_tokens:
            return ()
        how = "kept as control tokens" if draft.marker is None else "read as plain text"
        return (f"special_tokens_in_content: {draft.control_tokens} control tokens in the row's text {how}",)


def _caught(function: Any, *arguments: Any) -> Any:
    """Call for one row; whatever it raises becomes that row's error."""
    try:
        return function(*arguments)
    except RowFailure as failure:
        return failure.error
    except Exception as error:
        return RowError(ErrorClass.INTERNAL, f"{type(error).__name__}: {error}"[:_SHOWN])


def _check_unicode(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RowFailure(
            ErrorClass.INVALID_UNICODE,
            f"the prompt holds the lone surrogate \\u{ord(text[error.start]):04x} at character {error.start}",
        ) from error


def _without_marker(failure: RowFailure, marker: str | None) -> RowFailure:
    if marker is None:
        return failure
    return RowFailure(failure.error.error_class, failure.error.message.replace(marker, ""))


def _said(error: Exception) -> str:
    """A template's own message; for an error of another kind its name too."""
    from jinja2 import TemplateError

    message = " ".join(str(error).split())[:_SHOWN]
    plain = type(error) is TemplateError or not message
    return (message or type(error).__name__) if plain else f"{type(error).__name__}: {message}"
