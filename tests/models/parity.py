"""Compare the engine with transformers, family by family and schedule by schedule.

Used by the tests beside it. Run as a program (`make families`) it prints the table for every family.
"""

from __future__ import annotations

import os
import random
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # Waiting OpenMP threads must not spin where other processes need the core.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from engine_harness import make_engine, reschedule, run
from families import CONTEXT, FAMILIES, Family
from transformers import PreTrainedModel

from batchgen.core.scheduler import SchedulerOutput
from batchgen.engine.build import Engine
from batchgen.types import SamplingParams

MAX_TOKENS = 32
TOLERANCE = 1e-4
POOL = 2048
"""Tokens that the cache of a test engine holds."""

Logits = dict[tuple[int, int], torch.Tensor]
"""By (row, number of tokens before the sampled one)."""


@dataclass(frozen=True, slots=True)
class Schedule:
    """How the engine is driven: tokens in the pool, and settings of the scheduler."""

    name: str
    pool: int
    settings: dict[str, Any] = field(default_factory=dict)


SCHEDULES = (
    Schedule("together", POOL, {"max_num_batched_tokens": 512, "max_num_seqs": 8}),
    Schedule("chunked, cached, preempted", 176, {"max_num_batched_tokens": 24, "max_num_seqs": 4}),
)
MORE_SCHEDULES = (
    Schedule("one by one", POOL, {"max_num_batched_tokens": 512, "max_num_seqs": 1, "prefix_caching": False}),
    Schedule("chunks of 7", POOL, {"max_num_batched_tokens": 7, "max_num_seqs": 3, "prefix_caching": False}),
    Schedule(
        "no cache, preempted",
        176,
        {"max_num_batched_tokens": 100, "max_num_seqs": 8, "prefix_caching": False},
    ),
)


def make_prompts() -> list[list[int]]:
    """Mixed lengths, two with a long common beginning, all below the context with `MAX_TOKENS` more."""
    rng = random.Random(5)
    ids = [rng.randrange(256) for _ in range(400)]
    return [ids[:1], ids[1:18], ids[20:90], [*ids[20:70], *ids[100:103]], ids[110:228]]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the engine made of the prompts under one schedule."""

    tokens: list[list[int]]
    logits: Logits
    preemptions: int = 0
    cached_tokens: int = 0


def run_schedule(engine: Engine, schedule: Schedule, max_tokens: int = MAX_TOKENS) -> Outcome:
    """Greedy output of all prompts, `max_tokens` each, the end token ignored."""
    driven = reschedule(engine, schedule.pool, **schedule.settings)
    logits = _keep_logits(driven)
    outputs = run(driven, make_prompts(), SamplingParams(max_tokens=max_tokens, ignore_eos=True))
    stats = driven.core.scheduler.stats
    return Outcome([o.token_ids for o in outputs], logits, stats.preemptions, stats.cached_tokens)


def _keep_logits(engine: Engine) -> Logits:
    seen: Logits = {}
    runner = engine.core.runner
    execute = type(runner).execute

    def recording(output: SchedulerOutput) -> torch.Tensor:
        logits = execute(runner, output)
        for s, row in zip((s for s in output.scheduled if s.samples), logits, strict=True):
            seen[s.request.request_id, s.start + s.num_tokens] = row.clone()
        return logits

    runner.execute = recording  # type: ignore[method-assign]
    return seen


class Oracle:
    """transformers' own model, eager attention with transformers' own masks, one sequence at a time."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    @torch.inference_mode()
    def logits(self, ids: list[int]) -> torch.Tensor:
        """`(len(ids), vocab)`, computed in one forward pass without a cache."""
        result: torch.Tensor = self.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]
        return result

    def generate(self, prompt: list[int], max_tokens: int) -> list[int]:
        """Greedy output by `generate`, with transformers' cache, the end token ignored."""
        model: Any = self.model
        model.generation_config.eos_token_id = None
        ids: list[int] = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=max_tokens,
            do_sample=False,
        )[0, len(prompt) :].tolist()
        return ids


@dataclass(frozen=True, slots=True)
class Comparison:
    """How far an outcome is from the oracle.

    Args:
        difference: largest absolute difference of any logit of any sampled position.
        equal: whether every sampled token is the oracle's most likely one after the tokens before it, which
            by induction makes the output that of greedy search.
        spread: standard deviation of the oracle's logits.
    """

    difference: float
    equal: bool
    spread: float

    @property
    def ok(self) -> bool:
        """Whether this is parity."""
        return self.equal and self.difference <= TOLERANCE


def compare(oracle: Oracle, outcome: Outcome) -> Comparison:
    """Score the outcome by teacher forcing: one forward pass of the oracle over each whole row."""
    difference, equal, seen = 0.0, True, []
    for row, (prompt, tokens) in enumerate(zip(make_prompts(), outcome.tokens, strict=True)):
        truth = oracle.logits(prompt + tokens)[len(prompt) - 1 : -1]
        ours = torch.stack([outcome.logits[row, len(prompt) + i] for i in range(len(tokens))])
        difference = max(difference, (truth - ours).abs().max().item())
        equal &= truth.argmax(-1).tolist() == tokens
        seen.append(truth)
    return Comparison(difference, equal, torch.cat(seen).std().item())


def open_engine(family: Family, folder: Path, **settings: Any) -> Engine:
    """The family's model in an engine whose pool holds `POOL` tokens."""
    return make_engine(family.save(folder), max_model_len=CONTEXT, max_num_seqs=13, **settings)


def table() -> Iterator[str]:
    """Lines with the figures of every family under every schedule."""
    yield f"{'family':14} {'windows':18} {'std':>5} {'max |dlogit|':>12}  tokens  schedule"
    for family in FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            engine = open_engine(family, Path(folder))
            oracle = Oracle(family.build())
            windows = "/".join(str(w or "full") for w in family.windows)
            for schedule in (*SCHEDULES, *MORE_SCHEDULES):
                seen = compare(oracle, run_schedule(engine, schedule))
                yield (
                    f"{family.name:14} {windows:18} {seen.spread:5.2f} {seen.difference:12.1e}  "
                    f"{'equal ' if seen.equal else 'DIFFER'}  {schedule.name}"
                )
            engine.core.close()


if __name__ == "__main__":
    for line in table():
        print(line, flush=True)
    sys.exit(0)
