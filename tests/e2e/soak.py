"""A long run of one engine under everything at once; `make soak MINUTES=30`.

Random lengths, shared prefixes, samples, stops, penalties, priorities, scored prompts, cancellations, and
steps that run out of memory, on a small hybrid model whose pool is always short. The scheduler checks its
invariants after every step; some rows are computed again by an engine that does one row at a time and must be
equal. At the end the pool is full again, and resident memory is what it was once warm: after the first minute
and the first steps, however slow the machine is.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil
import torch
from engine_harness import make_engine, small_pool
from families import FAMILIES

from batchgen.core.scheduler import SchedulerOutput
from batchgen.engine.build import Engine
from batchgen.scores import Scoring
from batchgen.types import ErrorClass, Output, Request, RowError, SamplingParams

HYBRID = next(family for family in FAMILIES if family.name == "gemma2")
LIVE = 24
CHECKED = 0.02
CANCELLED = 0.02
NO_MEMORY = 0.003
LONGEST = 100
MAX_MODEL_LEN = 160
POOL = 224
WARM_STEPS = 200


class Soak:
    """The engine under load, and the one that is believed."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.random = random.Random(seed)
        limits = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 8, "max_num_batched_tokens": 64}
        self.engine = small_pool(folder, tokens=POOL, **limits)
        self.alone = make_engine(folder, **{**limits, "max_num_seqs": 1, "prefix_caching": False})
        self.prefixes = [self._tokens(n) for n in (16, 33, 48)]
        self.kept: dict[int, Request] = {}
        self.counts: Counter[str] = Counter()
        self.rows = 0
        self._run_out_of_memory_at_times()

    def step(self) -> None:
        """Bring in new rows, cancel some, compute one step."""
        core = self.engine.core
        while core.num_unfinished < LIVE:
            self._add()
        if self.random.random() < CANCELLED:
            row = self.random.choice(list(self.kept))
            core.fail(row, RowError(ErrorClass.TIMEOUT, "cancelled"))
            del self.kept[row]
            self.counts["cancelled"] += 1
        for output in core.step():
            self._end(output)
        self.counts["steps"] += 1

    def drain(self) -> None:
        """Let everything end; the pool must be as it was before the first row."""
        while self.engine.core.num_unfinished:
            for output in self.engine.core.step():
                self._end(output)
        assert not self.kept, f"rows without an end: {sorted(self.kept)}"
        scheduler = self.engine.core.scheduler
        scheduler.check()
        pool = scheduler.manager.pool
        assert pool.num_used == 0, f"{pool.num_used} blocks are still held"
        self.counts["preemptions"] = scheduler.stats.preemptions

    def _add(self) -> None:
        prompt = self._prompt()
        request = Request(self.rows, prompt, self._sampling(), priority=self.random.randint(-2, 2))
        if self.random.random() < 0.1 and len(prompt) > 2:
            first = self.random.randrange(1, len(prompt))
            request.scoring = Scoring(first - 1, tuple(prompt[first:]))
        self.rows += 1
        self.kept[request.request_id] = copy_of(request)
        refused = self.engine.core.add(request)
        if refused is not None:
            self._end(refused)

    def _end(self, output: Output) -> None:
        request = self.kept.pop(output.request_id)
        self.counts["rows" if output.ok else f"error {output.error.error_class}"] += 1  # type: ignore[union-attr]
        if output.ok and self.random.random() < CHECKED:
            [again] = run_one(self.alone, request)
            assert again.samples == output.samples, f"row {output.request_id}: {again} and {output}"
            assert again.scores == output.scores, f"row {output.request_id}: {again} and {output}"
            self.counts["computed again and equal"] += 1

    def _prompt(self) -> list[int]:
        head = self.random.choice([[], *self.prefixes])
        return head + self._tokens(
            self.random.choice([1, 2, 15, 16, 17, self.random.randint(1, LONGEST - 96)])
        )

    def _sampling(self) -> SamplingParams:
        pick = self.random
        greedy = pick.random() < 0.5
        return SamplingParams(
            temperature=0.0 if greedy else pick.choice([0.5, 1.0, 1.5]),
            n=1 if greedy else pick.choice([1, 1, 2, 3]),
            top_p=pick.choice([1.0, 0.9]),
            top_k=pick.choice([0, 0, 20]),
            max_tokens=pick.choice([1, 2, 16, pick.randint(1, 50)]),
            stop=pick.choice([(), (), ("e",), ("ab", "x")]),
            stop_token_ids=pick.choice([(), (7, 8)]),
            repetition_penalty=pick.choice([1.0, 1.0, 1.2]),
            presence_penalty=pick.choice([0.0, 0.0, 0.5]),
            ignore_eos=pick.random() < 0.3,
            seed=pick.randrange(1000),
        )

    def _tokens(self, count: int) -> list[int]:
        return [self.random.randrange(250) for _ in range(count)]

    def _run_out_of_memory_at_times(self) -> None:
        execute = self.engine.core.runner.execute

        def short(output: SchedulerOutput) -> torch.Tensor:
            if output.total_tokens > 1 and self.random.random() < NO_MEMORY:
                self.counts["steps without memory"] += 1
                raise MemoryError
            return execute(output)

        self.engine.core.runner.execute = short  # type: ignore[method-assign]


def copy_of(request: Request) -> Request:
    """As it was before an engine had it."""
    return Request(
        request.request_id, list(request.prompt_token_ids), request.sampling, scoring=request.scoring
    )


def run_one(engine: Engine, request: Request) -> list[Output]:
    """The row alone in an engine."""
    refused = engine.core.add(request)
    outputs = [] if refused is None else [refused]
    while engine.core.num_unfinished:
        outputs += engine.core.step()
    return outputs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    args = parser.parse_args()
    print(f"seed {args.seed}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        soak = Soak(HYBRID.save(Path(folder)), args.seed)
        process, begun = psutil.Process(), time.monotonic()
        warm, told = 0, begun
        warm_at = begun + min(60.0, 15 * args.minutes)
        while (now := time.monotonic()) < begun + 60 * args.minutes or soak.counts["steps"] < 4 * WARM_STEPS:
            soak.step()
            if not warm and now > warm_at and soak.counts["steps"] >= WARM_STEPS:
                warm = process.memory_info().rss
            if now > told + 30:
                told = now
                print(json.dumps({**soak.counts, "rss": process.memory_info().rss}), flush=True)
        soak.drain()
        rss = process.memory_info().rss
        print(json.dumps({**soak.counts, "rss_when_warm": warm, "rss_at_the_end": rss}))
        assert rss < 1.05 * warm, f"resident memory grew from {warm:,} to {rss:,} bytes"


if __name__ == "__main__":
    main()
