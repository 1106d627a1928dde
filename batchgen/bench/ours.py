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

from batchgen.bench.gaps import waiting_shares
from batchgen.bench.machine import ProductRate, product_rates
from batchgen.bench.passes import Pass, run_pass
from batchgen.bench.peers import harness
from batchgen.bench.shapes import ModelShapes, Need, Product, Work, generating, model_shapes, needed
from batchgen.bench.utilisation import Limits, utilisation
from batchgen.models import dummy
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
class _Rows:
    """What was to be computed."""

    requests: list[Request] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)
    preparing: float = 0.0
    """Seconds of reading, rendering and tokenizing the job's rows, before the clock runs."""


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
        # The weights of a dummy are noise, so that it may be given any model's tokens.
        self._any_tokens = self._own or self._spec.model.path.startswith(dummy.PREFIX)
        self._first_row = 0
        self._rows, self._passed = _Rows(), Pass()

    @property
    def _core(self) -> EngineCore:
        core: Any = self._ready.core
        return core  # type: ignore[no-any-return]

    def generate(self, rows: list[harness.Row]) -> list[list[int]]:
        """One pass; without rows, over the job's own."""
        self._rows = given = _Rows()
        began = time.perf_counter()
        given.requests = list(self._of_rows(rows) if rows else self._of_job())
        given.preparing = time.perf_counter() - began
        self._first_row += len(given.requests) + sum(given.refused.values())
        self._passed = passed = self._pass(given.requests)
        return [list(passed.outputs[r.request_id].token_ids) for r in given.requests]

    def _of_rows(self, rows: Iterable[harness.Row]) -> Iterator[Request]:
        for number, row in enumerate(rows, self._first_row):
            sampling = SamplingParams(max_tokens=row["max_new_tokens"], ignore_eos=True)
            yield Request(number, self._known(row["prompt_ids"]), sampling)

    def _known(self, ids: Iterable[int]) -> list[int]:
        """Tokens of the workloads' model, as this one knows them."""
        # Only a job's own rows, which come after the warm-up, are in tokens of its model.
        size = self._core.vocab_size
        return [i % size for i in ids] if self._any_tokens else list(ids)

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
        self._rows.refused[error.error_class.value] += 1

    def _pass(self, requests: list[Request]) -> Pass:
        passed = run_pass(self._core, requests)
        if not self._own:
            _raise_failed(passed)
        return passed

    def negative_logprob(self, windows: list[list[int]]) -> tuple[float, int] | None:
        """Sum over real text and its tokens; None of a model that has no next-token head."""
        if self._ready.requests.task in (Task.EMBED, Task.CLASSIFY):
            return None
        texts = [self._known(ids) for ids in windows]
        requests = [
            Request(
                self._first_row + i,
                ids,
                SamplingParams(max_tokens=1),
                task=Task.LOGLIKELIHOOD,
                scoring=Scoring(0, tuple(ids[1:])),
            )
            for i, ids in enumerate(texts)
        ]
        self._first_row += len(windows)
        passed = self._pass(requests)
        scores = [output.scores for output in passed.outputs.values() if output.scores is not None]
        return -sum(sum(s.logprobs) for s in scores), sum(len(s.logprobs) for s in scores)

    def details(self) -> dict[str, Any]:
        """What the pass before was made of, and what the machine can do."""
        passed, given = self._passed, self._rows
        failed = given.refused + Counter(
            output.error.error_class.value for output in passed.outputs.values() if output.error is not None
        )
        done = [(r, passed.outputs[r.request_id]) for r in given.requests]
        return {
            "facts": {
                **self._ready.facts,
                **{name: self._ready.pinned.get(name) for name in _PINNED},
                "quantization": self._spec.model.quantization,
            },
            "notes": list(self._ready.notes),
            "rows": len(given.requests) + sum(given.refused.values()),
            "failed": dict(failed),
            "prompt_tokens": sum(output.prompt_tokens for _, output in done),
            "output_tokens": sum(output.completion_tokens for _, output in done),
            "preparing_seconds": given.preparing if self._own else None,
            "steps": passed.count,
            "followed": passed.followed,
            "computed_tokens": passed.computed,
            "cached_tokens": passed.cached,
            "hit_share": passed.hit_share,
            "preemptions": passed.preemptions,
            "empty_slots": passed.empty / passed.held if passed.held else 0.0,
            "parts": passed.parts,
            "seconds": passed.seconds,
            **self._machine(passed, done),
        }

    def _machine(self, passed: Pass, done: list[tuple[Request, Output]]) -> dict[str, Any]:
        # Loads transformers, which the engine itself may not need.
        from batchgen.api.job_model import find_model
        from batchgen.models.loader import load_config

        core = self._core
        config = load_config(find_model(self._spec).tokenizer_folder())
        shapes = model_shapes(config, [layer.spec for layer in core.runner.layers])
        place, dtype = core.runner.device.place, self._dtype
        counted = shapes if done and passed.steps else None
        rates = [] if counted is None else product_rates(_products(counted, passed), place, DTYPES[dtype])
        limits = Limits.measured(place, DTYPES[dtype], rates)
        text = config.get_text_config()
        return {
            "shape": {n: getattr(text, n, None) for n in ("vocab_size", "hidden_size", "num_hidden_layers")},
            "bandwidth": limits.bandwidth,
            "alone": self._alone(done, limits.bandwidth) if len(done) == 1 else None,
            "work": None if counted is None else self._work(counted, passed, done, rates),
            "utilisation": {"dtype": dtype, **utilisation(core, shapes, passed, limits)},
            "host": self._host(passed),
        }

    @property
    def _dtype(self) -> str:
        """Of the products that the device is measured by."""
        if self._core.runner.device.place.type == "cpu":
            return "float32"
        dtype: str = self._ready.pinned["dtype"]
        return dtype

    def _work(
        self,
        shapes: ModelShapes,
        passed: Pass,
        done: list[tuple[Request, Output]],
        rates: Sequence[ProductRate],
    ) -> dict[str, Any]:
        work = [_work_of(request, output) for request, output in done]
        shared, apart = (needed(shapes, work, shared=value) for value in (True, False))
        tokens = {p: shared.tokens * p.count for p in shapes.products} | {shapes.head: shared.read}
        seconds = sum(tokens[r.product] * r.product.flop / (r.best * 1e9) for r in rates)
        return {
            "needed": _flop(shared),
            "without_sharing": _flop(apart),
            "flop_per_second": shared.total / passed.seconds,
            "product_rate": shared.products / seconds,
            "dtype": self._dtype,
            "rates": [{**dataclasses.asdict(rate), "best": rate.best} for rate in rates],
        }

    def _host(self, passed: Pass) -> dict[str, float | None]:
        requests, first = self._rows.requests, self._first_row
        self._first_row += len(requests)
        return waiting_shares(self._core, passed, requests, first)

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


def _products(shapes: ModelShapes, passed: Pass) -> Iterator[tuple[Product, int]]:
    """Those of a model, each with beside how many others a token is computed, in the mean over tokens."""
    rows = _mean_over_itself([step.tokens for step in passed.steps])
    for product in shapes.products:
        yield product, rows
    read = [step.logits for step in passed.steps]
    if any(read):
        yield shapes.head, _mean_over_itself(read)


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


def _raise_failed(passed: Pass) -> None:
    for output in passed.outputs.values():
        if output.error is not None:
            raise UsageError(
                f"the model cannot compute this workload ({output.error.message}); its rows are in tokens of "
                "SmolLM2: choose a model of that kind, or give a JOB without --workload to measure its rows"
            )


if __name__ == "__main__":
    harness.main(Ours)
