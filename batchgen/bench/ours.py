"""One measured run of batchgen's own engine: `python -m batchgen.bench.ours`, see `peers/harness.py`.

The engine is that of a job, with every setting in effect that `run` would use. It computes the rows of a
workload, or the job's own; nothing is written.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

from batchgen.bench.breakdown import clocked
from batchgen.bench.machine import product_rates, read_bandwidth
from batchgen.bench.peers import harness
from batchgen.bench.shapes import ModelShapes, Need, Product, Work, generating, model_shapes, needed
from batchgen.models.dtypes import DTYPES
from batchgen.scores import Scoring
from batchgen.types import Output, Request, RowError, RowFailure, SamplingParams, Task, UsageError

if TYPE_CHECKING:
    from batchgen.dist.serve import ReadyEngine
    from batchgen.engine.core import EngineCore
    from batchgen.job.spec.job import JobSpec

_GROUP = 32
_PINNED = ("dtype", "quantization", "kv_cache_dtype", "max_model_len")


@dataclass(slots=True)
class _Passed:
    """What one pass over rows took, and what it gave."""

    seconds: float = 0.0
    preparing: float = 0.0
    """Seconds of reading, rendering and tokenizing the job's rows, before the clock runs."""
    parts: dict[str, float] = field(default_factory=dict)
    requests: list[Request] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    outputs: dict[int, Output] = field(default_factory=dict)
    steps: list[tuple[int, int]] = field(default_factory=list)
    """Tokens computed and tokens sampled in each."""
    step_seconds: list[float] = field(default_factory=list)
    step_tokens: list[int] = field(default_factory=list)
    """Of the cache, in use after each."""
    cached: int = 0
    preemptions: int = 0
    held: int = 0
    empty: int = 0
    """Slots of the cache that requests held after each step, and those of them without a token."""


class Ours:
    """An engine of this process.

    Args:
        task: its options hold `job`, a file, `sets`, settings as with `--set`, and `own`: whether the rows
            are the job's.
    """

    def __init__(self, task: harness.Task) -> None:
        import batchgen
        from batchgen.job.load import load_job

        self.version = f"batchgen {batchgen.__version__}"
        self._spec = load_job(task.options["job"], task.options["sets"])
        self._own: bool = task.options["own"]
        self._ready = _ready(self._spec)
        self._first_row = 0
        self._passed = _Passed()

    @property
    def _core(self) -> EngineCore:
        core: Any = self._ready.core
        return core  # type: ignore[no-any-return]

    def generate(self, rows: list[harness.Row]) -> list[list[int]]:
        """One pass; without rows, over the job's own."""
        self._passed = passed = _Passed()
        began = time.perf_counter()
        passed.requests = list(self._of_rows(rows) if rows else self._of_job())
        passed.preparing = time.perf_counter() - began
        self._first_row += len(passed.requests) + sum(passed.refused.values())
        self._pass(passed)
        return [list(passed.outputs[r.request_id].token_ids) for r in passed.requests]

    def _of_rows(self, rows: Iterable[harness.Row]) -> Iterator[Request]:
        size = self._core.vocab_size
        for number, row in enumerate(rows, self._first_row):
            sampling = SamplingParams(max_tokens=row["max_new_tokens"], ignore_eos=True)
            # Only a job's own rows, which come after the warm-up, are in tokens of its model.
            ids = [i % size for i in row["prompt_ids"]] if self._own else list(row["prompt_ids"])
            yield Request(number, ids, sampling)

    def _of_job(self) -> Iterator[Request]:
        """The job's rows, in the order in which they would run."""
        requests = list(self._prepared())
        if not requests:
            raise UsageError("input.path: the job has no rows that can run, so there is nothing to measure")
        if self._spec.run.order == "prefix" and self._spec.input.shuffle is None:
            requests.sort(key=lambda request: request.prompt_token_ids)
        elif self._spec.run.order == "length":
            requests.sort(key=lambda request: -len(request.prompt_token_ids))
        return iter(requests)

    def _prepared(self) -> Iterator[Request]:
        """Requests of the job's rows, but for those that would be error rows."""
        from batchgen.data.prompt_values import prompt_values

        ready, spec = self._ready, self._spec
        columns = ready.renderer.spec.required_columns()
        for group in _groups(spec):
            good, sampling = [], []
            for row in group:
                if row.error is not None:
                    self._refuse(row.error)
                    continue
                values = prompt_values(row, columns)
                try:
                    sampling.append(ready.sampling.of_row(values))
                    good.append((row.ordinal + self._first_row, values))
                except RowFailure as failure:
                    self._refuse(failure.error)
            prepared = ready.renderer.prepare_batch(good, self._core.max_model_len, sampling)
            for one, how in zip(prepared, sampling, strict=True):
                request = one if isinstance(one, RowError) else ready.requests.request(one, how)
                if isinstance(request, RowError):
                    self._refuse(request)
                else:
                    yield request

    def _refuse(self, error: RowError) -> None:
        self._passed.refused[error.error_class.value] += 1

    def _pass(self, passed: _Passed) -> None:
        core, stats = self._core, self._core.scheduler.stats
        before = dataclasses.replace(stats)
        waiting = iter(passed.requests)
        with clocked(core) as parts:
            began = last = time.perf_counter()
            while core.num_unfinished or self._admit(waiting, passed):
                self._admit(waiting, passed)
                computed, sampled = core.counters.computed, core.counters.sampled
                passed.outputs.update((output.request_id, output) for output in core.step())
                passed.steps.append((core.counters.computed - computed, core.counters.sampled - sampled))
                now = time.perf_counter()
                passed.step_seconds.append(now - last)
                last = now
                passed.step_tokens.append(stats.pool_used * stats.block_size - stats.slack_tokens)
                passed.held += stats.pool_used * stats.block_size
                passed.empty += stats.slack_tokens
            passed.seconds = time.perf_counter() - began
            passed.parts = parts()
        passed.cached = stats.cached_tokens - before.cached_tokens
        passed.preemptions = stats.preemptions - before.preemptions
        if not self._own:
            _raise_failed(passed)

    def _admit(self, waiting: Iterator[Request], passed: _Passed) -> bool:
        """Hand requests over as a worker does: enough that the engine never runs dry."""
        room = 2 * self._ready.max_num_seqs - self._core.num_unfinished
        admitted = False
        for request in islice(waiting, max(0, room)):
            admitted = True
            output = self._core.add(request)
            if output is not None:
                passed.outputs[request.request_id] = output
        return admitted

    def negative_logprob(self, windows: list[list[int]]) -> tuple[float, int] | None:
        """Sum over real text and its tokens; None of a model that has no next-token head."""
        if self._ready.requests.task in (Task.EMBED, Task.CLASSIFY):
            return None
        passed = _Passed()
        passed.requests = [
            Request(
                self._first_row + i,
                list(ids),
                SamplingParams(max_tokens=1),
                task=Task.LOGLIKELIHOOD,
                scoring=Scoring(0, tuple(ids[1:])),
            )
            for i, ids in enumerate(windows)
        ]
        self._first_row += len(windows)
        self._pass(passed)
        scores = [output.scores for output in passed.outputs.values() if output.scores is not None]
        return -sum(sum(s.logprobs) for s in scores), sum(len(s.logprobs) for s in scores)

    def details(self) -> dict[str, Any]:
        """What the pass before was made of, and what the machine can do."""
        passed = self._passed
        failed = passed.refused + Counter(
            output.error.error_class.value for output in passed.outputs.values() if output.error is not None
        )
        done = [(r, passed.outputs[r.request_id]) for r in passed.requests]
        return {
            "facts": {
                **self._ready.facts,
                **{name: self._ready.pinned.get(name) for name in _PINNED},
                "quantization": self._spec.model.quantization,
            },
            "notes": list(self._ready.notes),
            "rows": len(passed.requests) + sum(passed.refused.values()),
            "failed": dict(failed),
            "prompt_tokens": sum(output.prompt_tokens for _, output in done),
            "output_tokens": sum(output.completion_tokens for _, output in done),
            "preparing_seconds": passed.preparing if self._own else None,
            "steps": len(passed.steps),
            "computed_tokens": sum(computed for computed, _ in passed.steps),
            "cached_tokens": passed.cached,
            "preemptions": passed.preemptions,
            "empty_slots": passed.empty / passed.held if passed.held else 0.0,
            "parts": passed.parts,
            "seconds": passed.seconds,
            **self._machine(passed, done),
        }

    def _machine(self, passed: _Passed, done: list[tuple[Request, Output]]) -> dict[str, Any]:
        # Loads transformers, which the engine itself may not need.
        from batchgen.api.job_model import find_model
        from batchgen.models.loader import load_config

        config = load_config(find_model(self._spec).tokenizer_folder())
        shapes = model_shapes(config, [layer.spec for layer in self._core.runner.layers])
        place = self._core.runner.device.place
        bandwidth = read_bandwidth(place)
        alone = self._alone(done, bandwidth) if len(done) == 1 else None
        text = config.get_text_config()
        shape = {n: getattr(text, n, None) for n in ("vocab_size", "hidden_size", "num_hidden_layers")}
        common = {
            "shape": shape,
            "bandwidth": bandwidth,
            "alone": alone,
            "decoding": self._decoding(passed, bandwidth),
        }
        if shapes is None or not done or not passed.steps:
            return {**common, "work": None}
        return {**common, "work": self._work(shapes, passed, done)}

    def _work(
        self, shapes: ModelShapes, passed: _Passed, done: list[tuple[Request, Output]]
    ) -> dict[str, Any]:
        work = [_work_of(request, output) for request, output in done]
        shared, apart = (needed(shapes, work, shared=value) for value in (True, False))
        # Beside how many others a token is computed, in the mean over tokens.
        rows, read = (_mean_over_itself(counts) for counts in zip(*passed.steps, strict=True))
        asked: list[tuple[Product, int]] = [(product, rows) for product in shapes.products]
        if shared.read:
            asked.append((shapes.head, read))
        place, dtype = self._core.runner.device.place, self._ready.pinned["dtype"]
        rates = product_rates(asked, place, DTYPES[dtype])
        tokens = {p: shared.tokens * p.count for p in shapes.products} | {shapes.head: shared.read}
        seconds = sum(tokens[r.product] * r.product.flop / (r.best * 1e9) for r in rates)
        return {
            "needed": _flop(shared),
            "without_sharing": _flop(apart),
            "flop_per_second": shared.total / passed.seconds,
            "product_rate": shared.products / seconds,
            "dtype": "float32" if place.type == "cpu" else dtype,
            "rates": [{**dataclasses.asdict(rate), "best": rate.best} for rate in rates],
        }

    def _decoding(self, passed: _Passed, bandwidth: float) -> dict[str, Any] | None:
        """Of steps in which every token computed was followed by one drawn: rows, time, and memory read."""
        runner = self._core.runner
        of_token = runner.layout.block_bytes / runner.block_size
        steps = [
            (computed, seconds, runner.parts.read_bytes + of_token * held)
            for (computed, sampled), seconds, held in zip(
                passed.steps, passed.step_seconds, passed.step_tokens, strict=True
            )
            if computed == sampled
        ]
        if not steps:
            return None
        rows, seconds, read = (sum(column) for column in zip(*steps, strict=True))
        return {
            "steps": len(steps),
            "rows": rows / len(steps),
            "seconds": seconds / len(steps),
            "bytes": read / len(steps),
            "bandwidth_share": read / seconds / bandwidth,
        }

    def _alone(self, done: list[tuple[Request, Output]], bandwidth: float) -> dict[str, Any] | None:
        """Of one row by itself: how fast its tokens came, and the memory read for each."""
        output = done[0][1]
        if output.completion_tokens < 2 or output.decode_seconds <= 0:
            return None
        runner = self._core.runner
        weights = runner.parts.read_bytes
        context = statistics.fmean((output.prompt_tokens, output.prompt_tokens + output.completion_tokens))
        cache = runner.layout.block_bytes / runner.block_size * context
        rate = (output.completion_tokens - 1) / output.decode_seconds
        return {
            "tokens_per_second": rate,
            "bytes_per_token": weights + cache,
            "bandwidth_share": rate * (weights + cache) / bandwidth,
        }


def _ready(spec: JobSpec) -> ReadyEngine:
    from batchgen.api.job_input import bind_prompt, open_job_input
    from batchgen.api.job_model import find_model
    from batchgen.dist.worker import build
    from batchgen.job.worker_config import worker_config

    with closing(open_job_input(spec)) as inputs:
        prompt = bind_prompt(spec, inputs)
    source = find_model(spec)
    source.fetch_weights()
    return build(worker_config(spec, prompt, source.commit))


def _groups(spec: JobSpec) -> Iterator[list[Any]]:
    """The job's selected rows, some at a time."""
    from batchgen.api.job_input import open_job_input
    from batchgen.job.selection import Selection

    selection = Selection.of(spec.input.rows, spec.input.limit)
    with closing(open_job_input(spec)) as inputs:
        rows = (row for row in inputs.rows() if row.selected and row.ordinal >= selection.first)
        if selection.stop is not None:
            rows = (row for row in rows if row.ordinal < selection.stop)
        chosen = islice(rows, selection.limit)
        while group := list(islice(chosen, _GROUP)):
            yield group


def _work_of(request: Request, output: Output) -> Work:
    if request.generates:
        return generating(request.prompt_token_ids, output.completion_tokens)
    pieces = (request, *request.following)
    read = sum(0 if piece.scoring is None else len(piece.scoring.targets) for piece in pieces)
    return Work(request.prompt_token_ids, 0, read)


def _mean_over_itself(counts: Sequence[int]) -> int:
    """The size of the group that a member is in, in the mean over all members."""
    return max(1, round(sum(n * n for n in counts) / max(1, sum(counts))))


def _flop(need: Need) -> dict[str, int]:
    return {
        "tokens": need.tokens,
        "read": need.read,
        "products": need.products,
        "attention": need.attention,
        "total": need.total,
    }


def _raise_failed(passed: _Passed) -> None:
    for output in passed.outputs.values():
        if output.error is not None:
            raise UsageError(
                f"the model cannot compute this workload ({output.error.message}); its rows are in tokens of "
                "SmolLM2: choose a model of that kind, or give a JOB without --workload to measure its rows"
            )


if __name__ == "__main__":
    harness.main(Ours)
