"""Measure what a step needs on a GPU besides weights and KV cache, by running the largest one.

The GPU takes milliseconds for it, so nothing has to be foreseen from smaller steps as on the CPU
(`step_memory.py`); and what libraries take inside their operations is seen too.
"""

from __future__ import annotations

import torch

from batchgen.core.scheduler import ScheduledRequest, SchedulerOutput
from batchgen.engine.device import DeviceMemory
from batchgen.engine.reading import read_step
from batchgen.engine.runner import ModelRunner
from batchgen.engine.step_memory import StepMemory
from batchgen.sampling.on_device import draw
from batchgen.sampling.sampler import SamplingRow
from batchgen.scores import Scoring
from batchgen.types import Request, SamplingParams, Task

_WHOLE = SamplingParams(temperature=1.0, top_k=50, top_p=0.9, min_p=0.01)
"""Everything that sampling can do on the device."""
_BLOCK = 1


@torch.inference_mode()
def run_largest_step(
    runner: ModelRunner,
    memory: DeviceMemory,
    *,
    tokens: int,
    sampled: int,
    longest: int,
    whole_context: bool,
    scores: bool,
) -> StepMemory:
    """What a step of so many tokens needs, so many of them sampled.

    Args:
        runner: with a cache of two or more blocks, which are written.
        memory: of its device.
        tokens: most in a step.
        sampled: most rows of logits that lie in memory at once.
        longest: tokens of the longest sequence.
        whole_context: whether the tokens are the last of such sequences, where it matters what is before.
        scores: whether requests may ask for scores of known tokens.
    """
    planned = _largest(runner, tokens, sampled, longest, whole_context=whole_context)

    def step() -> torch.Tensor:
        logits = runner.execute(planned)
        if len(logits):
            rows = [SamplingRow(_WHOLE, row, 0, 1) for row in range(len(logits))]
            draw(logits, rows, runner.transfer)
        return logits

    def scoring() -> None:
        # As in a step, what is sampled from is still there while other tokens are scored.
        logits = step()
        _read_all(runner, tokens, sampled)
        del logits

    # What is compiled, loaded and allocated once for all is not of a step.
    (scoring if scores else step)()
    alone = memory.peak_of(step)
    both = memory.peak_of(scoring) if scores else alone
    # A program keeps its buffers from when the runner was made.
    kept = 0 if runner.program is None else runner.program.buffer_bytes
    return StepMemory(activations=alone + kept, logits=0, scoring=max(0, both - alone))


def _largest(
    runner: ModelRunner, tokens: int, sampled: int, longest: int, *, whole_context: bool
) -> SchedulerOutput:
    """Sequences of one token, and as few as possible with all others; all keys are in one block."""
    groups = len(runner.layout.groups)
    sampled = min(sampled, tokens)
    lengths = [1] * (sampled - 1)
    for start in range(0, tokens - len(lengths), longest):
        lengths.append(min(longest, tokens - sampled + 1 - start))
    scheduled = []
    for row, length in enumerate(lengths):
        end = longest if whole_context and row >= sampled - 1 else length
        request = Request(row, [0] * end, SamplingParams())
        blocks = [_BLOCK] * -(-end // runner.block_size)
        samples = row < sampled
        scheduled.append(ScheduledRequest(request, end - length, length, samples, [blocks] * groups))
    return SchedulerOutput(scheduled=scheduled, total_tokens=tokens, copies=[], preempted=[])


def _read_all(runner: ModelRunner, tokens: int, most_rows: int) -> None:
    """Score every token of a step that has been run."""
    request = Request(0, [0] * tokens, SamplingParams(), task=Task.PERPLEXITY)
    request.scoring = Scoring(0, (0,) * tokens, top_k=1)
    planned = SchedulerOutput([ScheduledRequest(request, 0, tokens, False, [])], tokens, [], [])
    read_step(planned, runner.hidden, runner.head, most_rows)
