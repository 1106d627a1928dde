"""`batchgen.LLM`: the engine in this process, from prompts to outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Self

from batchgen.engine.build import Engine, build_engine, load_tokenizer
from batchgen.engine.config import EngineConfig
from batchgen.engine.core import EngineCore
from batchgen.sampling.resolve import generation_defaults, resolve_sampling
from batchgen.text.prompt import PreparedRow, PromptRenderer, PromptSpec
from batchgen.types import Output, Request, RowError, SamplingParams, UsageError

Prompt = str | Sequence[int]
"""A text, or token ids that go to the model as they are."""

Conversation = Sequence[Mapping[str, Any]]
"""Messages of the form `{"role": …, "content": …}`, oldest first."""

_GROUP = 32
_LOOKAHEAD = 4
_COLUMN = "prompt"


class LLM:
    """A model loaded once, for many calls. A bad prompt is an output with an error, never an exception.

    Args:
        model: hub id, folder or GGUF file.
        tokenizer: of another folder or hub id.
        generation_defaults: `model` fills what `sampling` leaves out from the model's
            generation_config.json; `none` decodes greedily unless told otherwise.
        chat_template: a template's text, in place of the tokenizer's own.
        engine: the other fields of `batchgen.engine.config.EngineConfig`, such as `max_model_len`,
            `dtype`, `max_num_seqs`, `kv_cache_memory` (bytes).

    Attributes:
        notes: what was decided at load, a sentence each.

    Raises:
        UsageError: the model cannot run here as asked.
    """

    def __init__(
        self,
        model: str,
        *,
        tokenizer: str | None = None,
        generation_defaults: str = "model",
        chat_template: str | None = None,
        **engine: Any,
    ) -> None:
        if generation_defaults not in {"model", "none"}:
            raise UsageError(
                f"generation_defaults: {generation_defaults!r} is not allowed; use model or none"
            )
        known = {field.name for field in dataclasses.fields(EngineConfig)}
        for name in engine.keys() - known:
            raise UsageError(f"LLM: {name!r} is not an argument; use any of {', '.join(sorted(known))}")
        config = EngineConfig(model=model, tokenizer=tokenizer, **engine)
        self._chat_template = chat_template
        self._tokenizer = load_tokenizer(config)
        self._open: Engine | None = build_engine(config, self._tokenizer)
        self._defaults = _defaults(generation_defaults, self._engine.loaded.generation_config.to_dict())
        self._streaming = False
        self.notes = tuple(self._engine.notes)

    @property
    def max_model_len(self) -> int:
        """Longest prompt plus output, in tokens."""
        return self._core.max_model_len

    @property
    def _engine(self) -> Engine:
        if self._open is None:
            raise RuntimeError("this LLM is closed; make another one")
        return self._open

    @property
    def _core(self) -> EngineCore:
        return self._engine.core

    def generate(self, prompts: Iterable[Prompt], sampling: SamplingParams | None = None) -> list[Output]:
        """Complete every prompt.

        Args:
            prompts: texts or token ids. A text is taken as it is: control tokens in it are control tokens.
            sampling: of all; None: the model's generation defaults.

        Returns:
            As many outputs as prompts, in their order.
        """
        return list(self.stream(prompts, sampling))

    def chat(
        self, conversations: Iterable[Conversation], sampling: SamplingParams | None = None
    ) -> list[Output]:
        """Answer every conversation through the chat template.

        Args:
            conversations: a list of messages each. Control tokens in their texts are read as plain text.
            sampling: as in `generate`.

        Returns:
            As many outputs as conversations, in their order.
        """
        return list(self.stream(conversations, sampling, chat=True))

    def stream(
        self,
        prompts: Iterable[Prompt] | Iterable[Conversation],
        sampling: SamplingParams | None = None,
        *,
        chat: bool = False,
    ) -> Iterator[Output]:
        """Outputs in the order of the prompts, while later ones still run; memory is bounded.

        At most a few times `max_num_seqs` prompts are taken ahead of the output that is yielded, so the
        iterable may be endless. Sampling noise is a function of the seed and the prompt's index in this
        call. Closing the iterator early drops what still runs.

        Raises:
            UsageError: one prompt or conversation instead of many, or sampling that is no `SamplingParams`.
            RuntimeError: another iteration over this model has not been finished or closed, or the LLM is
                closed.
            EngineError: the engine cannot go on.
        """
        _check_many(prompts, chat=chat)
        if not isinstance(sampling, SamplingParams | None):
            raise UsageError(
                f"sampling: {type(sampling).__name__} is not allowed; use one bg.SamplingParams for all"
            )
        params = sampling or resolve_sampling({}, self._defaults)
        renderers = _Renderers(self._tokenizer, self._chat_template, chat=chat)
        return self._stream(self._core, iter(prompts), params, renderers)

    def close(self) -> None:
        """Give the memory of weights and cache back; the object is unusable afterwards. Twice is once."""
        if self._open is not None:
            self._open.core.close()
            self._open = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stream(
        self, core: EngineCore, prompts: Iterator[Any], sampling: SamplingParams, renderers: _Renderers
    ) -> Iterator[Output]:
        if self._streaming:
            raise RuntimeError("another iteration over this LLM is under way; finish or close it first")
        self._streaming = True
        done: dict[int, Output] = {}
        taken = given = 0
        exhausted = False
        try:
            while not exhausted or given < taken:
                while not exhausted and self._wants(taken - given):
                    group = list(islice(prompts, _GROUP))
                    exhausted = len(group) < _GROUP
                    done.update(self._add(group, taken, sampling, renderers))
                    taken += len(group)
                done.update((output.request_id, output) for output in core.step())
                while given in done:
                    yield done.pop(given)
                    given += 1
        finally:
            core.abort_all()
            self._streaming = False

    def _wants(self, outstanding: int) -> bool:
        """Whether the engine could run dry, and not too much is held back by a straggler."""
        sequences = self._engine.config.max_num_seqs or 1
        return self._core.num_unfinished < 2 * sequences and outstanding < 2 * _LOOKAHEAD * sequences

    def _add(
        self, group: list[Any], first: int, sampling: SamplingParams, renderers: _Renderers
    ) -> dict[int, Output]:
        """Hand prompts to the engine; what it refuses is an output at once."""
        refused: dict[int, Output] = {}
        for row, prepared in renderers.prepare(group, first, self.max_model_len):
            if isinstance(prepared, RowError):
                refused[row] = Output(row, error=prepared)
                continue
            output = self._core.add(Request(row, prepared.token_ids, replace(sampling)))
            if output is not None:
                refused[row] = output
        return refused


def _check_many(prompts: Any, *, chat: bool) -> None:
    """Refuse what looks like one prompt: a text would be answered letter by letter."""
    what = "conversation" if chat else "prompt"
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
        raise UsageError(
            f"{what}s: {type(prompts).__name__} cannot be a list of {what}s; put {what}s into a list"
        )
    first = prompts[0] if isinstance(prompts, list | tuple) and prompts else None
    if isinstance(first, Mapping if chat else int):
        raise UsageError(f"{what}s: this is one {what}; put it into a list of {what}s")


class _Renderers:
    """From prompts of either kind to token ids."""

    def __init__(self, tokenizer: Any, chat_template: str | None, *, chat: bool) -> None:
        self._tokens = PromptRenderer(
            PromptSpec.from_dict({"mode": "tokens", "sources": [_COLUMN]}), tokenizer
        )
        text: dict[str, Any] = {"mode": "completion", "special_tokens_in_content": "allow"}
        if chat:
            text = {"mode": "chat", "messages": _COLUMN, "chat_template": chat_template}
        else:
            text["sources"] = [_COLUMN]
        self._text = PromptRenderer(PromptSpec.from_dict(text), tokenizer)
        self._chat = chat
        self._text.probe()

    def prepare(
        self, prompts: list[Any], first: int, max_model_len: int
    ) -> Iterator[tuple[int, PreparedRow | RowError]]:
        rows = [(first + i, {_COLUMN: prompt}) for i, prompt in enumerate(prompts)]
        of_text = [row for row in rows if self._is_text(row[1][_COLUMN])]
        of_tokens = [row for row in rows if not self._is_text(row[1][_COLUMN])]
        for renderer, some in ((self._text, of_text), (self._tokens, of_tokens)):
            for (row, _), prepared in zip(some, renderer.prepare_batch(some, max_model_len), strict=True):
                yield row, prepared

    def _is_text(self, prompt: Any) -> bool:
        return self._chat or isinstance(prompt, str) or prompt is None


def _defaults(choice: str, generation_config: Mapping[str, Any]) -> dict[str, Any]:
    return generation_defaults(generation_config) if choice == "model" else {}
