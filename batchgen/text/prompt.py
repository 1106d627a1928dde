"""From a row's columns to the token ids of its prompt.

The engine worker prepares rows in batches with `PromptRenderer.prepare_batch`, and the later turns of a
dialogue with `prepare_turn`; `validate` asks for `faults` before any weights load; `show` prints what
`explain` returns. A fault of a row is a `RowError` in that row's place and never touches another row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any, NamedTuple

from batchgen.grammar import counted
from batchgen.text import messages as chat
from batchgen.text.chat_template import ChatTemplate
from batchgen.text.content import Content, RowReader
from batchgen.text.control_tokens import ControlTokens
from batchgen.text.encoder import Draft, PromptEncoder
from batchgen.text.overflow import Shortener, cut, kept_room, least_room
from batchgen.text.pairs import fit_context, move_spaces, prefix_token, scored_text
from batchgen.text.probe import chat_faults, said, system_refusal
from batchgen.text.prompt_spec import PromptSpec
from batchgen.text.templates import JobTemplate
from batchgen.text.tokenizer import Tokenizer
from batchgen.types import ErrorClass, RowError, RowFailure, SamplingParams, Status, Task, UsageError

__all__ = ["Explanation", "PreparedRow", "PromptRenderer", "PromptSpec"]

_SHOWN = 500


class PreparedRow(NamedTuple):
    """A row that can be run.

    Args:
        row: its ordinal.
        token_ids: the prompt, never empty and shorter than the context.
        control_tokens: how many control tokens the row's own text spells.
        truncated_tokens: how many tokens the prompt has less than the whole row would have had.
        notes: what a report should say about it.
        text: the rendered prompt; None where the row came as token ids.
        continuation_ids: what is scored after the prompt, of a job that scores pairs.
    """

    row: int
    token_ids: list[int]
    control_tokens: int = 0
    truncated_tokens: int = 0
    notes: tuple[str, ...] = ()
    text: str | None = None
    continuation_ids: list[int] | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """What becomes of one row, for a person.

    Args:
        text: the rendered prompt; None if it could not be rendered.
        tokens: (id, the vocabulary's spelling, whether it is a special token).
        control_tokens: how many control tokens the row's own text spells.
        truncated_tokens: how many tokens were cut to make it fit.
        scored_tokens: how many of the tokens, the last ones, the task scores.
        continuation: the second text of a pair.
        error: why the row cannot be run, if so.
    """

    text: str | None
    tokens: list[tuple[int, str, bool]]
    control_tokens: int
    truncated_tokens: int
    error: RowError | None
    scored_tokens: int = 0
    continuation: str | None = None


@dataclass(frozen=True, slots=True)
class _Limits:
    """The context of the model, and the sampling of rows, which want some of it; None wants nothing.

    `least_room` is how many tokens are left at least for an answer.
    """

    max_model_len: int | None
    sampling: SamplingParams | None
    least_room: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "least_room", 0 if self.sampling is None else least_room(self.sampling))

    def excess(self, tokens: int) -> int:
        """By how many tokens a prompt of `tokens` is too long; 0 or less if it fits."""
        return 0 if self.max_model_len is None else tokens + self.least_room - self.max_model_len

    def shortened(self) -> int:
        """Most tokens of a prompt that is cut."""
        whole = self.max_model_len or 0
        return whole if self.sampling is None else whole - kept_room(self.sampling, whole)


class PromptRenderer:
    """Renders and tokenizes the rows of one job.

    Args:
        spec: the job's `prompt` section; `bind` it first where the columns are known.
        tokenizer: the model's.
        now: what a chat template takes for the time; None for the time at which this is made.

    Raises:
        UsageError: a template of the job is not valid Jinja.
    """

    def __init__(self, spec: PromptSpec, tokenizer: Tokenizer, now: datetime | None = None) -> None:
        self.spec = spec
        self.tokenizer = tokenizer
        self.now = now or datetime.now()
        self._control = ControlTokens(tokenizer)
        self._task = Task(spec.task)
        self._encoder = PromptEncoder(
            tokenizer,
            self._control,
            plain_text=spec.mode == "completion",
            whole=self._task in (Task.EMBED, Task.CLASSIFY),
        )
        self._templates = {name: JobTemplate(name, source) for name, source in spec.templates().items()}
        columns = frozenset().union(*(t.columns for t in self._templates.values()))
        self._reader = RowReader(spec, sorted(columns), tokenizer.vocab_size)

    def required_columns(self) -> frozenset[str]:
        """Columns of a row that rendering reads; of several sources one is enough."""
        return self.spec.required_columns()

    @property
    def tells_time(self) -> bool:
        """Whether prompts depend on `now`."""
        return (
            self.spec.mode == "chat"
            and "strftime_now" in (self._chat_source or "")
            and "date_string" not in self.spec.chat_template_kwargs
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know about this job's template."""
        if not self.tells_time:
            return ()
        return (
            "the chat template writes the date into prompts; all rows get that of the first attempt "
            f"({self.now:%Y-%m-%d}); set prompt.chat_template_kwargs: {{date_string: …}} for another, "
            "if the template reads it",
        )

    def probe(self, columns: Iterable[str] | None = None) -> None:
        """Render the job's own roles with made-up text, so that what fails for every row fails now.

        Args:
            columns: the input's, where they are known.

        Raises:
            UsageError: says which setting, what the template said, and the remedy; all there is.
        """
        if columns is not None:
            self.spec.bind(columns)
        faults = list(self.faults())
        if faults:
            raise UsageError("\n".join(map(str, faults)))

    def faults(self) -> Iterator[UsageError]:
        """Everything for which no row could be rendered."""
        if self.spec.mode != "chat":
            return
        try:
            if self._chat_source is None:
                yield UsageError(
                    "prompt.mode: this tokenizer has no chat template, as is usual for base models; "
                    "set prompt.mode: completion, or give prompt.chat_template"
                )
                return
            template = self._chat
        except UsageError as error:
            yield error
            return
        yield from chat_faults(self.spec, template)

    @cached_property
    def _chat_source(self) -> str | None:
        return self.tokenizer.chat_source(self.spec.chat_template, with_tools=bool(self.spec.tools))

    @cached_property
    def _chat(self) -> ChatTemplate:
        variables = {**self.tokenizer.template_variables, **self.spec.chat_template_kwargs}
        return ChatTemplate(self._chat_source or "", variables, self.now)

    @cached_property
    def _system_refusal(self) -> str | None:
        return system_refusal(self._chat)

    def prepare_batch(
        self,
        rows: Sequence[tuple[int, Mapping[str, Any]]],
        max_model_len: int,
        sampling: Sequence[SamplingParams] | None = None,
    ) -> list[PreparedRow | RowError]:
        """Token ids of many rows at once, in their order; of a dialogue the first turn's.

        Args:
            rows: (ordinal, columns).
            max_model_len: most tokens of prompt and answer together.
            sampling: of each row; a prompt leaves room for its `min_tokens`, and for one token.
        """
        drafts: list[Draft | RowError] = [_caught(self._draft, columns) for _, columns in rows]
        self._encoder.encode([draft for draft in drafts if isinstance(draft, Draft)])
        sampling = sampling or [_ONE_TOKEN] * len(rows)
        # Mostly all rows of a job share one.
        limits = {id(one): self._limits(max_model_len, one) for one in sampling}
        return [
            draft if isinstance(draft, RowError) else _caught(self._finish, row, draft, limits[id(sampled)])
            for (row, _), draft, sampled in zip(rows, drafts, sampling, strict=True)
        ]

    def user_turns(self, columns: Mapping[str, Any]) -> list[str]:
        """The user turns of a dialogue (`sampling.turns`).

        Raises:
            RowFailure: there is none, or one is no text.
        """
        return self._reader.user_turns(columns)

    def prepare_turn(
        self,
        row: int,
        columns: Mapping[str, Any],
        answers: Sequence[str],
        max_model_len: int,
        sampling: SamplingParams,
    ) -> PreparedRow | RowError:
        """Token ids of the turn of a dialogue that follows the given answers."""

        def prepare() -> PreparedRow:
            draft = self._compose(self._read(columns, answers))
            self._encoder.encode([draft])
            return self._finish(row, draft, self._limits(max_model_len, sampling))

        prepared: PreparedRow | RowError = _caught(prepare)
        return prepared

    def explain(
        self,
        columns: Mapping[str, Any],
        max_model_len: int | None = None,
        sampling: SamplingParams | None = None,
    ) -> Explanation:
        """What `prepare_batch` makes of one row, with everything in between."""
        draft = _caught(self._draft, columns)
        if isinstance(draft, RowError):
            return Explanation(None, [], 0, 0, draft)
        self._encoder.encode([draft])
        prepared = _caught(self._finish, 0, draft, self._limits(max_model_len, sampling or _ONE_TOKEN))
        first, second = draft.token_ids or [], draft.continuation_ids
        ids = [*first, *(second or ())]
        tokens = [(i, self.tokenizer.token(i) or "", i in self.tokenizer.special_ids) for i in ids]
        text = self.tokenizer.decode_all(first) if draft.text is None else draft.shown_text
        continuation = None if second is None else self.tokenizer.decode_all(second)
        scored = prepared if isinstance(prepared, RowError) else _caught(self._num_scored, draft)
        error, scored = (scored, 0) if isinstance(scored, RowError) else (None, scored)
        counts = draft.control_tokens, draft.truncated_tokens
        return Explanation(text, tokens, *counts, error, scored, continuation)

    def _num_scored(self, draft: Draft) -> int:
        if self._task is Task.PERPLEXITY:
            return len(scored_text(draft.token_ids or [], prefix_token(self.tokenizer)))
        return len(draft.continuation_ids or ())

    def _limits(self, max_model_len: int | None, sampling: SamplingParams) -> _Limits:
        if self._task is Task.GENERATE:
            return _Limits(max_model_len, sampling)
        # A text of any length is scored in windows.
        return _Limits(None if self._task is Task.PERPLEXITY else max_model_len, None)

    def _draft(self, columns: Mapping[str, Any]) -> Draft:
        if self.spec.mode == "tokens":
            scored = self._reader.continuation_ids(columns) if self.spec.scores_pairs else None
            return Draft(token_ids=self._reader.token_ids(columns), continuation_ids=scored)
        return self._compose(self._read(columns))

    def _read(self, columns: Mapping[str, Any], answers: Sequence[str] = ()) -> Content:
        if self.spec.turns is None:
            return self._reader.content(columns)
        turns = self._reader.user_turns(columns)[: len(answers) + 1]
        dialogue: list[chat.Message] = []
        for turn, answer in zip(turns, [*answers, None], strict=True):
            dialogue.append({"role": "user", "content": turn})
            if answer is not None:
                dialogue.append({"role": "assistant", "content": answer})
        return self._reader.content(columns, dialogue)

    def _compose(self, content: Content) -> Draft:
        """The prompt's text, with the control tokens that the row itself spells marked or refused."""
        original, policy = content, self.spec.special_tokens_in_content
        found = self._control.find(content.parts())
        if found and policy == "error":
            raise RowFailure(
                ErrorClass.INVALID_PARAM,
                f"the row's text spells the control token {found[0]!r}; remove it, or set "
                "prompt.special_tokens_in_content: escape or allow",
            )
        marker = None
        if policy == "escape" and self._control.touches(content.parts()):
            marker = self._control.marker_for(content.parts())
            content = Content(*(self._control.mark(part, marker) for part in content.parts()))
        try:
            text, continuation = self._text(content), self._continuation(content)
            _check_unicode(text + (continuation or ""))
        except RowFailure as failure:
            raise _without_marker(failure, marker) from failure
        if continuation is not None and self.spec.mode == "completion":
            text, continuation = move_spaces(text, continuation)
        draft = Draft(text, marker=marker, control_tokens=len(found), content=original)
        draft.continuation = continuation
        return draft

    def _continuation(self, content: Content) -> str | None:
        """The text that is scored, where the job scores pairs."""
        if not self.spec.scores_pairs:
            return None
        if content.continuation is not None:
            return content.continuation
        return self._templates["prompt.continuation"].render(content.values)

    def _text(self, content: Content) -> str:
        main = content.main
        if main is None:
            main = self._templates["prompt.user"].render(content.values)
            if not main and not self.spec.scores_pairs:
                raise RowFailure(
                    ErrorClass.EMPTY_PROMPT, "prompt.user: the template gives no text for this row"
                )
        if self.spec.mode == "completion":
            if not isinstance(main, str):
                raise TypeError("a completion prompt is text")
            return main
        turns = [{"role": "user", "content": main}] if isinstance(main, str) else main
        turns = chat.with_system(turns, self._render_own("prompt.system", content.values))
        if self.spec.system_fallback == "prepend_to_user" and self._system_refusal:
            turns = chat.prepend_system_to_user(turns)
        prefix = self._render_own("prompt.assistant_prefix", content.values) or ""
        turns = chat.with_assistant_prefix(turns, prefix)
        tools: Any = content.tools if isinstance(self.spec.tools, str) else self.spec.tools
        try:
            return self._chat.render(
                turns,
                tools=tools or None,
                continue_final_message=bool(prefix),
                answers=self._task in (Task.GENERATE, Task.LOGLIKELIHOOD),
            )
        except Exception as error:
            raise RowFailure(ErrorClass.TEMPLATE, f"the chat template failed: {said(error)}") from error

    def _render_own(self, name: str, values: Mapping[str, Any]) -> str | None:
        template = self._templates.get(name)
        return None if template is None else template.render(values)

    def _finish(self, row: int, draft: Draft, limits: _Limits) -> PreparedRow:
        _raise_error(draft)
        if draft.continuation_ids is not None:
            self._fit_pair(draft, draft.continuation_ids, limits)
        elif limits.excess(len(draft.token_ids or ())) > 0:
            self._fit(draft, limits)
        ids = draft.token_ids
        if not ids:
            raise RowFailure(ErrorClass.EMPTY_PROMPT, "the prompt has no tokens")
        text = None if draft.text is None else draft.shown_text
        return PreparedRow(
            row,
            ids,
            draft.control_tokens,
            draft.truncated_tokens,
            _row_notes(draft),
            text,
            draft.continuation_ids,
        )

    def _fit_pair(self, draft: Draft, continuation: list[int], limits: _Limits) -> None:
        """Give the continuation a context, if it has none, and cut one that is too long, in place."""
        if not continuation:
            raise RowFailure(ErrorClass.EMPTY_PROMPT, "the continuation has no tokens of its own")
        if not draft.token_ids:
            draft.token_ids = [prefix_token(self.tokenizer)]
            # A tokenizer's own BOS would otherwise be there twice, and be scored.
            if continuation[0] == draft.token_ids[0] and len(continuation) > 1:
                del continuation[0]
        context, most = draft.token_ids, limits.max_model_len
        if most is None or len(context) + len(continuation) - 1 <= most:
            return
        if self.spec.overflow in ("error", "skip"):
            raise _over(
                self.spec.overflow,
                f"context and continuation have {counted(len(context) + len(continuation), 'token')} and the "
                f"context holds {most}; shorten them or raise model.max_model_len",
            )
        kept = fit_context(context, continuation, most, self.spec.overflow, self.tokenizer.bos_token_id)
        draft.token_ids, draft.truncated_tokens = kept, len(context) - len(kept)

    def _fit(self, draft: Draft, limits: _Limits) -> None:
        """Cut a draft that is too long, in place.

        Raises:
            RowFailure: `context_length`, where the job says so or where cutting does not help.
        """
        policy = self.spec.overflow
        if policy == "error" or policy == "skip":
            raise _over(policy, _too_long(draft, limits))
        before, most = len(draft.token_ids or ()), limits.shortened()
        shorter = self._cut_ids(draft, most) if draft.content is None else self._cut_text(draft, most)
        if shorter is None or not shorter.token_ids:
            raise RowFailure(
                ErrorClass.CONTEXT_LENGTH,
                f"{_too_long(draft, limits)}, for nothing that the row brought can be cut any further",
            )
        draft.text, draft.token_ids, draft.marker = shorter.text, shorter.token_ids, shorter.marker
        draft.truncated_tokens = before - len(shorter.token_ids)

    def _cut_ids(self, draft: Draft, most: int) -> Draft | None:
        """Ids that a row brought, cut; a leading BOS stays."""
        ids = draft.token_ids or []
        head = ids[:1] if ids[:1] == [self.tokenizer.bos_token_id] else []
        rest = ids[len(head) :]
        gone = len(ids) - most
        return None if gone >= len(rest) else Draft(token_ids=head + cut(rest, gone, self.spec.overflow))

    def _cut_text(self, draft: Draft, most: int) -> Draft | None:
        def attempt(content: Content) -> tuple[Draft, int]:
            tried = self._compose(content)
            self._encoder.encode([tried])
            _raise_error(tried)
            return tried, len(tried.token_ids or ()) - most

        assert draft.content is not None
        shortener = Shortener(self.tokenizer, self.spec.overflow)
        return shortener.shorten(draft.content, len(draft.token_ids or ()) - most, attempt)


# What is asked of the context where nobody says how a row is sampled.
_ONE_TOKEN = SamplingParams(max_tokens=1)


def _over(policy: str, message: str) -> RowFailure:
    status = Status.SKIPPED if policy == "skip" else Status.ERROR
    return RowFailure(ErrorClass.CONTEXT_LENGTH, message, status)


def _too_long(draft: Draft, limits: _Limits) -> str:
    room = limits.least_room
    least = "at least one of them" if room == 1 else f"at least {room} of them (sampling.min_tokens)"
    answer = f", {least} for the answer" if room else ""
    return (
        f"the prompt has {counted(len(draft.token_ids or ()), 'token')} and the context holds "
        f"{limits.max_model_len}{answer}; shorten the prompt or raise model.max_model_len"
    )


def _raise_error(draft: Draft) -> None:
    if draft.error is not None:
        raise RowFailure(draft.error.error_class, draft.error.message)


def _row_notes(draft: Draft) -> tuple[str, ...]:
    if not draft.control_tokens:
        return ()
    how = "kept as control tokens" if draft.marker is None else "read as plain text"
    return (
        f"special_tokens_in_content: {counted(draft.control_tokens, 'control token')} in the row's text "
        f"{how}",
    )


def _caught(function: Callable[..., Any], *arguments: Any) -> Any:
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
