"""Measure what a step needs besides weights and KV cache, before the cache is sized.

A few small steps are watched tensor by tensor. Activations grow linearly with the rows of a packed step,
attention included, as scores live in registers and small buffers; so the largest step follows from small
ones, without the seconds that running it would take on a CPU. What is read of a step beside sampling grows
with the rows that are scored at once, and with the hidden states they are made of.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from batchgen.core.scheduler import ScheduledRequest, SchedulerOutput
from batchgen.engine.reading import read_step
from batchgen.engine.runner import ModelRunner
from batchgen.sampling.sampler import finite_rows
from batchgen.scores import Scoring
from batchgen.types import Request, SamplingParams, Task

FEW, MANY = 8, 40
SCRATCH_BLOCKS = MANY + 1
"""Blocks of the cache that the measured steps need at most, the null block included."""


class PeakBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of the tensors made under it; `peak` is the most that lived at once.

    Buffers that an operation uses inside itself are not seen.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak = 0
        self._live = 0
        self._watched: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        given = {_storage(leaf)._cdata for leaf in tree_leaves((args, kwargs)) if _is_strided(leaf)}
        result = func(*args, **kwargs)
        for leaf in tree_leaves(result):
            if _is_strided(leaf) and _storage(leaf)._cdata not in given:
                self._watch(_storage(leaf))
        return result

    def _watch(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._watched:
            return

        def gone(_: Any) -> None:
            del self._watched[key]
            self._live -= size

        self._watched[key] = weakref.ref(storage, gone)
        self._live += size
        self.peak = max(self.peak, self._live)


def _is_strided(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.layout is torch.strided


def _storage(tensor: torch.Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes of the largest step.

    Args:
        activations: of its tokens, what is kept for them between steps included.
        logits: of the rows that sample; they live beside activations where a step ends.
        scoring: the logits of known tokens that are scored, what log-softmax and ranks make of them, and the
            copy of all hidden states that are read; all beside the logits of the rows that sample.
        graphs: what captured steps keep.
    """

    activations: int
    logits: int
    scoring: int = 0
    graphs: int = 0

    @property
    def step(self) -> int:
        """Until the tokens are sampled."""
        return self.activations + self.logits


def largest_step(runner: ModelRunner, *, tokens: int, sampled: int, scores: bool) -> StepMemory:
    """What a step of so many tokens needs, so many of them sampled.

    Args:
        runner: with a cache of `SCRATCH_BLOCKS` or more blocks, which are written.
        tokens: most in a step.
        sampled: most rows of logits that lie in memory at once.
        scores: whether requests may ask for scores of known tokens.
    """

    def step(few: int, of_them: int) -> None:
        finite_rows(runner.execute(_packed(runner, few, of_them), whole=True))

    measured = measure_step(step, tokens=tokens, logits_rows=sampled)
    if runner.program is not None:
        measured = replace(measured, activations=measured.activations + runner.program.buffer_bytes)
    return replace(measured, scoring=_scoring(runner, tokens, sampled)) if scores else measured


def _scoring(runner: ModelRunner, tokens: int, logits_rows: int) -> int:
    """The memory of scoring every token of a step, of which the last one that was run has `MANY`."""
    hidden = runner.hidden[:MANY].clone()

    def peak(rows: int) -> int:
        request = Request(0, [0] * rows, SamplingParams(), task=Task.PERPLEXITY)
        request.scoring = Scoring(0, (0,) * rows, top_k=1)
        planned = SchedulerOutput([ScheduledRequest(request, 0, rows, False, [])], rows, [], [])
        watch = PeakBytes()
        with torch.inference_mode(), watch:
            read_step(planned, hidden[:rows], runner.head, rows)
        return watch.peak

    a_row = (peak(MANY) - peak(FEW)) / (MANY - FEW)
    # With whether its logits are finite.
    a_state: int = hidden[0].nbytes + 1
    return int(a_row * logits_rows + a_state * max(0, tokens - logits_rows))


def _packed(runner: ModelRunner, tokens: int, sampled: int) -> SchedulerOutput:
    """`sampled` sequences of one token each, and one that is not sampled of all others."""
    groups = len(runner.layout.groups)
    lengths = [1] * sampled + [tokens - sampled] * (tokens > sampled)
    scheduled, block = [], 1
    for i, length in enumerate(lengths):
        end = block + -(-length // runner.block_size)
        request = Request(i, [0] * length, SamplingParams())
        blocks = list(range(block, end))
        scheduled.append(ScheduledRequest(request, 0, length, i < sampled, [blocks] * groups))
        block = end
    return SchedulerOutput(scheduled=scheduled, total_tokens=tokens, copies=[], preempted=[])


def measure_step(step: Callable[[int, int], object], *, tokens: int, logits_rows: int) -> StepMemory:
    """The memory of a step of `tokens` tokens, `logits_rows` of which sample, from small ones.

    Args:
        step: runs so many tokens, of which so many (none, too) are sampled, and drops the result.
        tokens: most in a step.
        logits_rows: most that are sampled in a step.
    """
    few, many = FEW, MANY

    def peak(rows: int, sampled: int) -> int:
        watch = PeakBytes()
        with watch:
            step(rows, sampled)
        return watch.peak

    least = peak(few, 0)
    a_token = (peak(many, 0) - least) / (many - few)
    a_row = (peak(many, many) - peak(many, few)) / (many - few)
    return StepMemory(
        activations=int(least + a_token * max(0, tokens - few)), logits=int(a_row * logits_rows)
    )
