"""`batchgen.LLM`: the engine in this process, from prompts to outputs."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import replace
from itertools import islice
from typing import Any, Self

from batchgen.api.arguments import path_text
from batchgen.api.task_results import Classified, Embedding, Loglikelihood, Perplexity
from batchgen.engine.build import Engine, build_engine, load_tokenizer, source_folder
from batchgen.engine.config import EngineConfig
from batchgen.engine.core import EngineCore
from batchgen.grammar import counted
from batchgen.models.pooling import find_pooling
from batchgen.sampling.resolve import generation_defaults, resolve_sampling
from batchgen.scores import Pooling
from batchgen.text.prompt import PreparedRow, PromptRenderer, PromptSpec
from batchgen.text.prompt_spec import CONTINUATION
from batchgen.text.task_request import TaskRequests, count_bytes, count_words
from batchgen.types import Output, RowError, SamplingParams, Task, UsageError

Prompt = str | Sequence[int]
"""A text, or token ids that go to the model as they are."""

Conversation = Sequence[Mapping[str, Any]]
"""Messages of the form `{"role": …, "content": …}`, oldest first."""

Pair = tuple[Prompt, Prompt]
"""A context and its continuation: both texts, or both token ids."""

Sampling = SamplingParams | Sequence[SamplingParams] | None
"""Of all prompts, or one for each in their order; None: the model's generation defaults."""

_GROUP = 32
_LOOKAHEAD = 4
_COLUMN = "prompt"
# Of a task that samples nothing.
_READ = SamplingParams(max_tokens=1)


class LLM:
    """A model loaded once, for many calls. A bad prompt is an output with an error, never an exception.

    Args:
        model: hub id, folder, GGUF file, or `dummy:` and a shape.
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
        model: str | os.PathLike[str],
        *,
        tokenizer: str | os.PathLike[str] | None = None,
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
        places = {"model": path_text("model", model)}
        if tokenizer is not None:
            places["tokenizer"] = path_text("tokenizer", tokenizer)
        config = EngineConfig(**{"task": "auto", **places, **engine})
        self._chat_template = chat_template
        self._tokenizer = load_tokenizer(config)
        self._open: Engine | None = build_engine(config, self._tokenizer)
        self._defaults = _defaults(generation_defaults, self._engine.loaded.generation)
        self._folder = source_folder(config)
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

    def generate(self, prompts: Iterable[Prompt], sampling: Sampling = None) -> list[Output]:
        """Complete every prompt.

        Args:
            prompts: texts or token ids. A text is taken as it is: control tokens in it are control tokens.
            sampling: of all, or a list with one for each prompt; None: the model's generation defaults.

        Returns:
            As many outputs as prompts, in their order.

        Raises:
            UsageError, RuntimeError, EngineError: as `stream`.
        """
        return list(self.stream(prompts, sampling))

    def chat(self, conversations: Iterable[Conversation], sampling: Sampling = None) -> list[Output]:
        """Answer every conversation through the chat template.

        Args:
            conversations: a list of messages each. Control tokens in their texts are read as plain text.
            sampling: as in `generate`.

        Returns:
            As many outputs as conversations, in their order.

        Raises:
            UsageError, RuntimeError, EngineError: as `stream`.
        """
        return list(self.stream(conversations, sampling, chat=True))

    def stream(
        self,
        prompts: Iterable[Prompt] | Iterable[Conversation],
        sampling: Sampling = None,
        *,
        chat: bool = False,
    ) -> Iterator[Output]:
        """Outputs in the order of the prompts, while later ones still run; memory is bounded.

        At most a few times `max_num_seqs` prompts are taken ahead of the output that is yielded, so the
        iterable may be endless. Sampling noise is a function of the seed and the prompt's index in this
        call. Closing the iterator early drops what still runs.

        Args:
            prompts: as in `generate` or, with `chat`, as in `chat`.
            sampling: as in `generate`. A list must be as long as the prompts; where these have no
                length, that is seen when they are taken.
            chat: whether they are conversations.

        Raises:
            UsageError: one prompt or conversation instead of many, or sampling that is neither one
                `SamplingParams` nor one for each.
            RuntimeError: another iteration over this model has not been finished or closed, or the LLM is
                closed.
            EngineError: the engine cannot go on.
        """
        if chat:
            _check_many(prompts, "conversation", Mapping)
        else:
            _check_many(prompts, "prompt", int)
        self._check_head(Task.GENERATE)
        if sampling is None:
            sampling = resolve_sampling({}, self._defaults)
        params = _check_sampling(sampling, prompts)
        renderers = _Renderers(self._tokenizer, self._chat_template, chat=chat)
        return self._stream(self._core, iter(prompts), params, renderers, self._requests(Task.GENERATE))

    def loglikelihood(self, pairs: Iterable[Pair], *, overflow: str = "error") -> list[Loglikelihood]:
        """How likely each continuation is after its context.

        A pair is tokenized as one text and cut where its context ends; spaces at the end of the context count
        to the continuation, and an empty context stands for the beginning of a text (BOS, else EOS), as in
        lm-evaluation-harness.

        Args:
            pairs: (context, continuation), both texts or both token ids.
            overflow: what becomes of a pair that is longer than the model reads: `error`, or
                `truncate_left`, which cuts the beginning of the context off.

        Returns:
            As many results as pairs, in their order; each unpacks as `(sum of logprobs, is_greedy)`.

        Raises:
            UsageError: one pair instead of many, or a model without a next-token head.
        """
        _check_many(pairs, "pair", str)
        if overflow not in ("error", "truncate_left"):
            raise UsageError(f"overflow: {overflow!r} is not allowed; use error or truncate_left")
        outputs = self._task(Task.LOGLIKELIHOOD, pairs, overflow=overflow)
        return [Loglikelihood(output) for output in outputs]

    def perplexity(self, texts: Iterable[Prompt]) -> list[Perplexity]:
        """How likely each text is as a whole, whatever its length.

        A text longer than `max_model_len` is scored in windows, each of its tokens once, as
        lm-evaluation-harness does (`loglikelihood_rolling`); the first token is scored after BOS, else EOS.

        Args:
            texts: texts or token ids.

        Returns:
            As many results as texts, in their order.

        Raises:
            UsageError: one text instead of many, or a model without a next-token head.
        """
        _check_many(texts, "text", int)
        counted: list[tuple[int | None, int | None]] = []
        outputs = self._task(Task.PERPLEXITY, _counting(texts, counted))
        return [Perplexity(output, *counts) for output, counts in zip(outputs, counted, strict=True)]

    def embed(
        self, texts: Iterable[Prompt], *, pooling: str = "auto", normalize: bool = True
    ) -> list[Embedding]:
        """Each text as a vector: hidden states after the final norm, pooled.

        Args:
            texts: texts or token ids. A text gets what the tokenizer puts before and behind it.
            pooling: `last` token, `mean` of all tokens, or `auto`: what the files of sentence-transformers
                beside the model say, else the last token.
            normalize: give vectors length 1.

        Returns:
            As many results as texts, in their order.

        Raises:
            UsageError: one text instead of many, or a pooling that batchgen does not have.
        """
        _check_many(texts, "text", int)
        if pooling not in ("auto", *Pooling):
            raise UsageError(f"pooling: {pooling!r} is not allowed; use auto, last or mean")
        how = find_pooling(self._folder) if pooling == "auto" else Pooling(pooling)
        return [Embedding(o) for o in self._task(Task.EMBED, texts, pooling=how, normalize=normalize)]

    def classify(self, texts: Iterable[Prompt]) -> list[Classified]:
        """The class of each text, by the model's own sequence-classification head on its last token.

        Args:
            texts: texts or token ids. A text gets what the tokenizer puts before and behind it.

        Returns:
            As many results as texts, in their order.

        Raises:
            UsageError: one text instead of many, or a model that is no classifier.
        """
        _check_many(texts, "text", int)
        return [Classified(output) for output in self._task(Task.CLASSIFY, texts)]

    def _task(
        self, task: Task, items: Iterable[Any], *, overflow: str = "error", **how: Any
    ) -> Iterator[Output]:
        self._check_head(task)
        renderers = _Renderers(self._tokenizer, None, task=task, overflow=overflow)
        return self._stream(self._core, iter(items), _READ, renderers, self._requests(task, **how))

    def _requests(self, task: Task, **how: Any) -> TaskRequests:
        return TaskRequests(task, self._tokenizer, self.max_model_len, **how)

    def _check_head(self, task: Task) -> None:
        loaded = self._engine.loaded.task
        needs = {Task.EMBED: loaded, Task.CLASSIFY: Task.CLASSIFY}.get(task)
        if needs is None and loaded in (Task.EMBED, Task.CLASSIFY):
            raise UsageError(f"LLM: task {task} needs a next-token head; make the LLM with task='generate'")
        if needs is Task.CLASSIFY and loaded is not Task.CLASSIFY:
            raise UsageError("LLM: task classify needs a classifier; make the LLM with task='classify'")

    def close(self) -> None:
        """Give the memory of weights and cache back; the object is unusable afterwards. Twice is once."""
        if self._open is not None:
            device = self._open.core.runner.device
            self._open.core.close()
            self._open = None
            device.give_back()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _stream(
        self,
        core: EngineCore,
        prompts: Iterator[Any],
        sampling: SamplingParams | Sequence[SamplingParams],
        renderers: _Renderers,
        requests: TaskRequests,
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
                    params = _of_group(sampling, taken, len(group), exhausted)
                    done.update(self._add(group, taken, params, renderers, requests))
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
        self,
        group: list[Any],
        first: int,
        sampling: Sequence[SamplingParams],
        renderers: _Renderers,
        requests: TaskRequests,
    ) -> dict[int, Output]:
        """Hand prompts to the engine; what it refuses is an output at once."""
        refused: dict[int, Output] = {}
        for row, prepared in renderers.prepare(group, first, self.max_model_len):
            request = (
                prepared
                if isinstance(prepared, RowError)
                else requests.request(prepared, replace(sampling[row - first]))
            )
            if isinstance(request, RowError):
                refused[row] = Output(row, error=request)
                continue
            output = self._core.add(request)
            if output is not None:
                refused[row] = output
        return refused


def _check_many(prompts: Any, what: str, part: type) -> None:
    """Refuse what looks like one item, of which `part` is a part: a text would be taken letter by letter."""
    if isinstance(prompts, str | bytes | Mapping) or not isinstance(prompts, Iterable):
        raise UsageError(
            f"{what}s: {type(prompts).__name__} cannot be a list of {what}s; put {what}s into a list"
        )
    first = prompts[0] if isinstance(prompts, list | tuple) and prompts else None
    if isinstance(first, part):
        raise UsageError(f"{what}s: this is one {what}; put it into a list of {what}s")


def _check_sampling(sampling: Any, prompts: Any) -> SamplingParams | Sequence[SamplingParams]:
    """One for all, or one for each of as many prompts as can be counted now."""
    if isinstance(sampling, SamplingParams):
        return sampling
    if not isinstance(sampling, Sequence) or isinstance(sampling, str | bytes):
        raise UsageError(
            f"sampling: {type(sampling).__name__} is not allowed; use one bg.SamplingParams for all, or a "
            "list with one for each prompt"
        )
    for i, params in enumerate(sampling):
        if not isinstance(params, SamplingParams):
            raise UsageError(
                f"sampling[{i}]: {type(params).__name__} is not allowed; use a bg.SamplingParams"
            )
    if isinstance(prompts, Sized) and len(prompts) != len(sampling):
        raise _unequal(sampling, counted(len(prompts), "prompt"))
    return tuple(sampling)


def _of_group(
    sampling: SamplingParams | Sequence[SamplingParams], first: int, count: int, last: bool
) -> Sequence[SamplingParams]:
    """Those of the prompts from number `first` on."""
    if isinstance(sampling, SamplingParams):
        return [sampling] * count
    end = first + count
    if end > len(sampling) or (last and end < len(sampling)):
        raise _unequal(sampling, counted(end, "prompt") if last else "more prompts")
    return sampling[first:end]


def _unequal(sampling: Sequence[SamplingParams], prompts: str) -> UsageError:
    return UsageError(
        f"sampling: a list of {len(sampling)} for {prompts}; use one bg.SamplingParams for all, or "
        "one for each prompt"
    )


class _Renderers:
    """From prompts of either kind to token ids."""

    def __init__(
        self,
        tokenizer: Any,
        chat_template: str | None,
        *,
        chat: bool = False,
        task: Task = Task.GENERATE,
        overflow: str = "error",
    ) -> None:
        common = {"task": task, "overflow": overflow}
        tokens = {"mode": "tokens", "sources": [_COLUMN], **common}
        self._tokens = PromptRenderer(PromptSpec.from_dict(tokens), tokenizer)
        text: dict[str, Any] = {"mode": "completion", "special_tokens_in_content": "allow", **common}
        if chat:
            text = {"mode": "chat", "messages": _COLUMN, "chat_template": chat_template, **common}
        else:
            text["sources"] = [_COLUMN]
        self._text = PromptRenderer(PromptSpec.from_dict(text), tokenizer)
        self._chat = chat
        self._text.probe()

    def prepare(
        self, prompts: list[Any], first: int, max_model_len: int
    ) -> Iterator[tuple[int, PreparedRow | RowError]]:
        pairs = self._text.spec.scores_pairs
        rows = [(first + i, _pair(p) if pairs else {_COLUMN: p}) for i, p in enumerate(prompts)]
        of_text = [row for row in rows if self._is_text(row[1].get(_COLUMN))]
        of_tokens = [row for row in rows if not self._is_text(row[1].get(_COLUMN))]
        for renderer, some in ((self._text, of_text), (self._tokens, of_tokens)):
            for (row, _), prepared in zip(some, renderer.prepare_batch(some, max_model_len), strict=True):
                yield row, prepared

    def _is_text(self, prompt: Any) -> bool:
        return self._chat or isinstance(prompt, str) or prompt is None


def _pair(pair: Any) -> dict[str, Any]:
    """The columns of a pair; of what is no pair some are missing, which is an error of its own."""
    parts = pair if isinstance(pair, list | tuple) and len(pair) == 2 else ()
    return dict(zip((_COLUMN, CONTINUATION), parts, strict=False))


def _counting(texts: Iterable[Any], counted: list[tuple[int | None, int | None]]) -> Iterator[Any]:
    """The texts, while their bytes and words are counted."""
    for text in texts:
        is_text = isinstance(text, str)
        counted.append((count_bytes(text), count_words(text)) if is_text else (None, None))
        yield text


def _defaults(choice: str, generation_config: Mapping[str, Any]) -> dict[str, Any]:
    return generation_defaults(generation_config) if choice == "model" else {}
