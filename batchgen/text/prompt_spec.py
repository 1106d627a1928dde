"""A job's `prompt` section as the engine worker gets it: a plain dict, checked once.

The supervisor asks it which columns the worker needs; the renderer (`prompt.py`) does what it says.
Imports neither transformers nor jinja2, so that a job file is checked at once.
"""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from batchgen.types import Task, UsageError

_ONLY_CHAT = ("messages", "system", "assistant_prefix", "chat_template", "chat_template_kwargs", "tools")
CONTINUATION = "continuation"
"""The column of the text that is scored, where no template gives it."""
# Arguments of the renderer itself; a job that sets one would change more than the template's variables.
_RESERVED_KWARGS = frozenset(
    {
        "add_generation_prompt",
        "chat_template",
        "continue_final_message",
        "conversation",
        "documents",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "sanitize_control_tokens",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)


@dataclass(frozen=True, slots=True)
class PromptSpec:
    """How a row becomes a prompt: the `prompt` section, and the columns that `sampling` reads from a row.

    Args:
        mode: a conversation, plain text, or ids that are ready.
        messages: column that holds the conversation.
        system: Jinja template of a system turn put first.
        user: Jinja template of the user turn, or of the whole text in completion mode.
        assistant_prefix: Jinja template of the beginning of the answer.
        chat_template: text used instead of the tokenizer's own.
        chat_template_kwargs: more variables for the chat template.
        system_fallback: what to do where the chat template has no system turn.
        tools: what the model may call: the list itself, or the column that holds it.
        bos: only `auto`: at most one is put first.
        special_tokens_in_content: what to do where a row's text spells a control token.
        overflow: what to do with a prompt that leaves no room to answer.
        sources: columns that may hold the prompt where no setting names one; the first that a row has.
        per_row: column of overrides (`sampling.per_row`).
        turns: column of user turns that are answered one after another (`sampling.turns`).
        task: what is done with the prompt; of `loglikelihood` it is the context of the continuation.
        continuation: Jinja template of the text that is scored; None for the column of this name.
    """

    mode: str = "chat"
    messages: str | None = None
    system: str | None = None
    user: str | None = None
    assistant_prefix: str | None = None
    chat_template: str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    system_fallback: str = "error"
    tools: str | tuple[Mapping[str, Any], ...] | None = None
    bos: str = "auto"
    special_tokens_in_content: str = "escape"
    overflow: str = "error"
    sources: tuple[str, ...] = ()
    per_row: str | None = None
    turns: str | None = None
    task: str = "generate"
    continuation: str | None = None

    @property
    def scores_pairs(self) -> bool:
        """Whether a row has a continuation beside its prompt."""
        return self.task == Task.LOGLIKELIHOOD

    @classmethod
    def from_dict(cls, section: Mapping[str, Any]) -> PromptSpec:
        """From a `prompt` section whose values are of the right types, as those of a job file are.

        Keys that are null or absent take their default.

        Raises:
            UsageError: two keys that exclude each other, or a variable that templates cannot be given.
        """
        values = {key: value for key, value in section.items() if value is not None}
        values["sources"] = tuple(values.get("sources", ()))
        if isinstance(values.get("tools"), list):
            values["tools"] = tuple(values["tools"])
        spec = cls(**values)
        _check_variables(spec)
        _check_combination(spec)
        return spec if spec.sources else dataclasses.replace(spec, sources=_default_sources(spec))

    def to_dict(self) -> dict[str, Any]:
        """A plain dict for `from_dict`, made of what msgpack and JSON know."""
        values = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {
            **values,
            "chat_template_kwargs": dict(self.chat_template_kwargs),
            "tools": list(self.tools) if isinstance(self.tools, tuple) else self.tools,
            "sources": list(self.sources),
        }

    def templates(self) -> dict[str, str]:
        """The job's own Jinja templates by setting."""
        given = {
            "system": self.system,
            "user": self.user,
            "assistant_prefix": self.assistant_prefix,
            "continuation": self.continuation,
        }
        return {f"prompt.{key}": source for key, source in given.items() if source is not None}

    def required_columns(self) -> frozenset[str]:
        """Columns that the settings and templates read; of unbound `sources` one is enough.

        Raises:
            UsageError: a template is not valid Jinja.
        """
        return frozenset(self.sources).union(*(names for _, names in self._columns_by_setting()))

    def _columns_by_setting(self) -> list[tuple[str, frozenset[str]]]:
        from batchgen.text.templates import JobTemplate

        by_setting = [(name, JobTemplate(name, source).columns) for name, source in self.templates().items()]
        columns = {
            "prompt.messages": self.messages,
            "prompt.tools": self.tools,
            "sampling.per_row": self.per_row,
            "sampling.turns": self.turns,
            "prompt.continuation": CONTINUATION if self.scores_pairs and self.continuation is None else None,
        }
        named = [(key, frozenset([column])) for key, column in columns.items() if isinstance(column, str)]
        return named + by_setting

    def bind(self, columns: Iterable[str]) -> PromptSpec:
        """Check the columns against the input's, and settle which of `sources` holds the prompt.

        Raises:
            UsageError: a column that a setting names, or any that could hold the prompt, is not there.
        """
        names = list(columns)
        for setting, wanted in self._columns_by_setting():
            for column in sorted(wanted - set(names)):
                hint = _nearest(column, names) or f"; it has {', '.join(map(repr, names)) or 'none'}"
                raise UsageError(f"{setting}: the input has no column {column!r}{hint}")
        if not self.sources:
            return self
        found = next((source for source in self.sources if source in names), None)
        if found is None:
            candidates = " or ".join(map(repr, self.sources))
            settings = {"chat": "prompt.messages or prompt.user", "completion": "prompt.user"}.get(self.mode)
            remedy = f"set {settings}" if settings else "rename it"
            raise UsageError(
                f"prompt: the input has no column {candidates} "
                f"(it has {', '.join(map(repr, names)) or 'none'}); {remedy}"
            )
        return dataclasses.replace(self, sources=(found,))


def spec_from_sections(
    prompt: Mapping[str, Any], sampling: Mapping[str, Any], task: str = "generate"
) -> PromptSpec:
    """The two sections of a job file, and its task, that say what is read from a row.

    Raises:
        UsageError: as `PromptSpec.from_dict`.
    """
    return PromptSpec.from_dict(
        {**prompt, "per_row": sampling.get("per_row"), "turns": sampling.get("turns"), "task": task}
    )


def _check_variables(spec: PromptSpec) -> None:
    for key in spec.chat_template_kwargs:
        if key in _RESERVED_KWARGS:
            raise UsageError(
                f"prompt.chat_template_kwargs: {key!r} is set by batchgen itself and cannot be set here; "
                "remove it"
            )


def _check_combination(spec: PromptSpec) -> None:
    if spec.messages is not None and spec.user is not None:
        raise UsageError("prompt.messages and prompt.user: both give the conversation; keep one")
    if spec.continuation is not None and not spec.scores_pairs:
        raise UsageError(f"prompt.continuation: has no meaning with task: {spec.task}; remove it")
    if spec.continuation is not None and spec.mode == "tokens":
        raise UsageError("prompt.continuation: has no meaning with prompt.mode: tokens; remove it")
    if spec.turns is not None and spec.task != Task.GENERATE:
        raise UsageError(f"sampling.turns: has no meaning with task: {spec.task}; remove it")
    if spec.turns is not None and spec.mode != "chat":
        raise UsageError(f"sampling.turns: has no meaning with prompt.mode: {spec.mode}; remove it")
    if spec.turns is not None and spec.user is not None:
        raise UsageError("prompt.user and sampling.turns: both give the user's turns; keep one")
    meaningless = () if spec.mode == "chat" else _ONLY_CHAT
    for key in (*meaningless, *(("user",) if spec.mode == "tokens" else ())):
        if getattr(spec, key):
            raise UsageError(f"prompt.{key}: has no meaning with prompt.mode: {spec.mode}; remove it")


def _default_sources(spec: PromptSpec) -> tuple[str, ...]:
    if spec.messages is not None or spec.user is not None or spec.turns is not None:
        return ()
    text = {Task.GENERATE: ("prompt",), Task.LOGLIKELIHOOD: ("context", "prompt")}
    texts = text.get(Task(spec.task), ("prompt", "text"))
    before = {"chat": ("messages",), "completion": (), "tokens": ("prompt_token_ids",)}[spec.mode]
    return (*before, *texts)


def _nearest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""
