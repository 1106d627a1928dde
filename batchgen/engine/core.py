"""The loop: `EngineCore.step()` = schedule → execute → finalize.

Requests go in, outputs come out, one step at a time. Used by the engine worker process and by
`LLM`; both feed it lazily, so memory is bounded by the requests in flight.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

from batchgen.core.scheduler import ScheduledRequest, Scheduler, SchedulerOutput
from batchgen.engine.inputs import round_up
from batchgen.engine.isolation import Isolation, StepFailed, error_of_row, is_of_a_row, out_of_memory
from batchgen.engine.phases import Phases
from batchgen.engine.reading import Labels, Reader, Reading, read_step
from batchgen.engine.runner import ModelRunner
from batchgen.engine.step_budget import StepBudget
from batchgen.sampling.history import TokenHistory
from batchgen.sampling.operations import Operation, operations_of
from batchgen.sampling.resolve import beyond_vocabulary
from batchgen.sampling.sampler import SamplingRow, finite_rows, sample
from batchgen.text.reasoning import ReasoningSplitter
from batchgen.text.stop import Finish, StopChecker, StopRules
from batchgen.text.tokenizer import Tokenizer
from batchgen.types import (
    ErrorClass,
    Output,
    Request,
    RequestState,
    RowError,
    RowFailure,
    Sample,
    SamplingParams,
    Task,
)

MAX_DECODINGS = 1024
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Decoding:
    """What follows from sampling parameters: costly to make, and the same for nearly all rows of a job."""

    rules: StopRules
    operations: tuple[Operation, ...]
    splitter: ReasoningSplitter | None


@dataclass(slots=True)
class _Live:
    """A request in flight: its stop conditions, what is done to its logits, what was reported of its output.

    `past` are the requests that it follows.
    """

    request: Request
    checker: StopChecker
    operations: tuple[Operation, ...]
    history: TokenHistory
    reported: int
    phases: Phases
    reader: Reader
    past: list[Request] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Computed:
    """What a step has yielded: for each of `requests` a token, or why it has none, and readings for tasks.

    Of `nonfinite` logits or hidden states are not finite, at the given position.
    """

    requests: list[Request]
    tokens: list[int | RowError]
    readings: list[Reading]
    nonfinite: list[tuple[Request, int]]


@dataclass(slots=True)
class EngineCounters:
    """Totals since the engine started, in tokens unless named otherwise."""

    steps: int = 0
    computed: int = 0
    sampled: int = 0


class EngineCore:
    """Continuous batching over one model.

    Args:
        runner: the model and its cache.
        scheduler: decides each step.
        tokenizer: for stop strings and the final text.
        eos_token_ids: ids that end a sequence.
        max_model_len: longest prompt plus output, in tokens.
        vocab_size: token ids that the model knows are below it.
        labels: of a model that classifies.
    """

    def __init__(
        self,
        runner: ModelRunner,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        eos_token_ids: tuple[int, ...],
        max_model_len: int,
        vocab_size: int,
        labels: Labels | None = None,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self.max_model_len = max_model_len
        self.vocab_size = vocab_size
        self.labels = labels
        self.counters = EngineCounters()
        self.on_step: Callable[[list[int]], None] | None = None
        """Called with the requests of a step before it is computed."""
        self._live: dict[int, _Live] = {}
        self._isolation = Isolation(scheduler)
        self._budget = StepBudget()
        self._decodings: dict[SamplingParams, _Decoding] = {}

    @property
    def num_unfinished(self) -> int:
        """Requests waiting or running."""
        return len(self._live)

    def add(self, request: Request) -> Output | None:
        """Take a request; `request.sampling.max_tokens` is clipped to what fits the context.

        A request may come with output tokens that an earlier attempt sampled; it goes on after them. What it
        samples is appended to `request.output_token_ids`; what lies behind the end of the answer is removed.

        Returns:
            None, or the output at once: an error row that can never fit, or a request whose earlier
            tokens already end it.
        """
        strange = max(_ids(request))
        if strange >= self.vocab_size:
            return self._refused(
                request,
                RowError(
                    ErrorClass.INVALID_PARAM,
                    f"the prompt holds token id {strange}, and the model knows ids up to "
                    f"{self.vocab_size - 1}; does the tokenizer belong to the model?",
                ),
            )
        if (fault := beyond_vocabulary(request.sampling, self.vocab_size)) is not None:
            return self._refused(request, RowError(ErrorClass.INVALID_PARAM, fault))
        # No room at all is the scheduler's to refuse.
        room = max(1, self.max_model_len - len(request.prompt_token_ids))
        most = min(request.sampling.max_tokens, room)
        decoding = self._decoding(request.sampling)
        checker = StopChecker(decoding.rules, most)
        request.sampling = _clip(request.sampling, room)
        finished = checker.prime(request.output_token_ids)
        if finished is not None and request.scoring is not None:
            # Its prompt is to be scored all the same, after which the last token is sampled again.
            del request.output_token_ids[checker.num_tokens - 1 :]
            checker = StopChecker(checker.rules, most)
            finished = checker.prime(request.output_token_ids)
        if finished is not None:
            # In a dialogue, what comes behind the end of this answer belongs to the next.
            del request.output_token_ids[checker.num_tokens :]
            return self._output(request, finished)
        try:
            self.scheduler.add(request)
        except RowFailure as failure:
            return self._refused(request, failure.error)
        self._live[request.request_id] = _Live(
            request,
            checker,
            decoding.operations,
            TokenHistory(request.prompt_token_ids, request.output_token_ids),
            reported=len(request.output_token_ids),
            phases=Phases(time.monotonic()),
            reader=Reader(request),
        )
        return None

    def step(self) -> list[Output]:
        """Run one step; returns what finished in it.

        Raises:
            EngineError: the step could not be run, or no request can make progress.
        """
        if not self._live:
            return []
        now = time.monotonic()
        if self._isolation.active:
            self._isolation.prepare()
        try:
            planned, computed = self._execute()
        except StepFailed as failure:
            if not is_of_a_row(failure.error):
                raise failure.error from None
            logger.exception("a step of %d requests failed", len(failure.requests))
            self._isolation.failed(failure, self.scheduler.requests)
            return self._settle()
        self._note_started(planned, now)
        self.counters.steps += 1
        self.counters.computed += planned.total_tokens
        outputs = self._finalize(planned, computed)
        if self._isolation.active:
            self._isolation.succeeded(self.scheduler.requests)
            outputs += self._settle()
        return outputs

    def _settle(self) -> list[Output]:
        """End the requests that were found to make a step fail, if that is known now."""
        errors = self._isolation.settle(has_worked=self.counters.steps > 0)
        if errors:
            self._budget.forget()
        return [self.fail(request_id, error) for request_id, error in errors.items()]

    def _note_started(self, planned: SchedulerOutput, now: float) -> None:
        for scheduled in planned.scheduled:
            live = self._live.get(scheduled.request.request_id)
            if live is not None:
                live.phases.step_began(now)

    def _execute(self) -> tuple[SchedulerOutput, _Computed]:
        """Schedule, compute, sample and read one step; in smaller pieces where memory does not suffice."""
        while True:
            planned = self.scheduler.schedule(self._budget.tokens)
            if self.on_step is not None:
                self.on_step([s.request.request_id for s in planned.scheduled])
            try:
                logits = self.runner.execute(planned)
                computed = self._sample(planned, logits, self._read(planned))
                self._budget.sufficed()
                return planned, computed
            except BaseException as error:
                self.scheduler.rollback(planned)
                if not isinstance(error, Exception):
                    raise
                if not out_of_memory(error) or planned.total_tokens == 1:
                    ids = [s.request.request_id for s in planned.scheduled]
                    raise StepFailed(ids, error) from error
                self._budget.ran_out(planned.total_tokens)
                logger.warning("a step of %d tokens ran out of memory, halved", planned.total_tokens)

    def partials(self) -> list[tuple[int, int, list[int]]]:
        """Output tokens of live requests that were not reported before: (row, first index, ids)."""
        news = []
        for row, live in self._live.items():
            ids = live.request.output_token_ids
            if len(ids) > live.reported:
                news.append((row, live.reported, ids[live.reported :]))
                live.reported = len(ids)
        return news

    def drop_unstarted(self) -> None:
        """Forget the requests that have not begun, so that only running ones go on."""
        for row, live in list(self._live.items()):
            if live.request.num_computed_tokens == 0 and live.request.num_preemptions == 0:
                self._forget(row)

    def abort_all(self) -> None:
        """Forget every request, running or waiting."""
        for row in list(self._live):
            self._forget(row)

    def fail(self, request_id: int, error: RowError) -> Output:
        """End a request with an error; returns its output. Raises KeyError: it is not in flight."""
        request = self._live[request_id].request
        self._forget(request_id)
        return self._refused(request, error)

    def _forget(self, row: int) -> None:
        self.scheduler.finish(row)
        del self._live[row]

    def close(self) -> None:
        """Give the memory of cache and weights back; the engine is unusable afterwards."""
        self._live.clear()
        self.runner.close()

    def _read(self, planned: SchedulerOutput) -> list[Reading]:
        if not any(s.request.scoring or s.request.pooling for s in planned.scheduled):
            return []
        # No more logits at once than sampling has.
        most_rows = round_up(self.scheduler.config.max_num_seqs, self.runner.row_multiple)
        return read_step(planned, self.runner.hidden, self.runner.head, most_rows)

    def _sample(self, planned: SchedulerOutput, logits: torch.Tensor, readings: list[Reading]) -> _Computed:
        samplers = [s for s in planned.scheduled if s.samples]
        finite = finite_rows(logits).tolist()
        healthy = [s for s, ok in zip(samplers, finite, strict=True) if ok]
        if not all(finite):
            logits = logits[torch.tensor(finite)]
        tokens = sample(logits, [self._sampling_row(s) for s in healthy]) if healthy else []
        bad = [(s.request, s.request.num_tokens) for s, ok in zip(samplers, finite, strict=True) if not ok]
        bad += [(r.request, r.nonfinite) for r in readings if r.nonfinite is not None]
        return _Computed([s.request for s in healthy], tokens, readings, bad)

    def _finalize(self, planned: SchedulerOutput, computed: _Computed) -> list[Output]:
        nonfinite = {request.request_id: (request, position) for request, position in computed.nonfinite}
        outputs = [self._nonfinite(request, position) for request, position in nonfinite.values()]
        drawn = list(zip(computed.requests, computed.tokens, strict=True))
        tokens = {r.request_id: token for r, token in drawn if isinstance(token, int)}
        self.scheduler.update(planned, tokens)
        now = time.monotonic()
        # Whoever shared blocks with a poisoned request was preempted, and what it was to get is dropped.
        for reading in computed.readings:
            if reading.request.state is RequestState.RUNNING:
                outputs += self._caught(reading.request, self._take(reading))
        for request, token in drawn:
            if request.state is not RequestState.RUNNING:
                continue
            if isinstance(token, RowError):
                outputs.append(self.fail(request.request_id, token))
                continue
            self.counters.sampled += 1
            self._live[request.request_id].phases.has_token(now)
            outputs += self._caught(request, self._check_stop(request))
        return outputs

    def _caught(self, request: Request, outputs: Iterator[Output]) -> list[Output]:
        """The outputs of one request; whatever is raised on the way becomes its error."""
        try:
            return list(outputs)
        except Exception as error:
            logger.exception("what a step yielded for request %d failed", request.request_id)
            return [self.fail(request.request_id, error_of_row(error))]

    def _take(self, reading: Reading) -> Iterator[Output]:
        """Keep what was read; ends a request that does not generate once its prompt is through."""
        request = reading.request
        live = self._live[request.request_id]
        live.reader.take(reading)
        if request.generates or request.num_computed_tokens < request.num_tokens:
            return
        self.scheduler.finish(request.request_id)
        if request.following:
            live.past.append(request)
            live.request = dataclasses.replace(request.following[0], following=request.following[1:])
            self.scheduler.add(live.request, ahead=True)
            return
        output = self._result(live)
        del self._live[request.request_id]
        live.phases.describe(output, time.monotonic())
        yield output

    def _result(self, live: _Live) -> Output:
        """The output of a request that does not generate."""
        request, reader = live.request, live.reader
        output = self._counts(request)
        output.scores = reader.scores
        for earlier in live.past:
            output.prompt_tokens += len(earlier.prompt_token_ids)
            output.cached_tokens += earlier.num_cached_tokens
            output.preemptions += earlier.num_preemptions
        if request.task is Task.EMBED:
            output.embedding = reader.embedding()
        elif request.task is Task.CLASSIFY and self.labels is not None:
            logits = self.runner.head(torch.from_numpy(reader.vector).unsqueeze(0))[0]
            output.classification = self.labels.classify(logits)
        return output

    def _decoding(self, sampling: SamplingParams) -> _Decoding:
        if sampling not in self._decodings:
            if len(self._decodings) >= MAX_DECODINGS:
                self._decodings.clear()
            rules = StopRules(sampling, self.eos_token_ids, self.tokenizer)
            operations = operations_of(sampling, rules.stop_ids, self.tokenizer, self.vocab_size)
            marks = sampling.reasoning
            splitter = None if marks is None else ReasoningSplitter(marks, self.tokenizer)
            self._decodings[sampling] = _Decoding(rules, operations, splitter)
        return self._decodings[sampling]

    def _sampling_row(self, scheduled: ScheduledRequest) -> SamplingRow:
        request = scheduled.request
        live = self._live[request.request_id]
        return SamplingRow(
            request.sampling, request.request_id, request.num_tokens, live.operations, live.history
        )

    def _check_stop(self, request: Request) -> Iterator[Output]:
        finished = self._live[request.request_id].checker.append(request.output_token_ids[-1])
        if finished is not None:
            self.scheduler.finish(request.request_id)
            live = self._live.pop(request.request_id)
            output = self._output(request, finished)
            output.scores = live.reader.scores
            live.phases.describe(output, time.monotonic())
            yield output

    def _nonfinite(self, request: Request, position: int) -> Output:
        """A row whose logits or hidden states are not finite is an error row; nothing of it may be shared."""
        # What it took from the cache at first was computed, and found finite, by others.
        self.scheduler.poison(request.request_id, request.num_cached_tokens)
        del self._live[request.request_id]
        what = "logits" if request.pooling is None else "hidden states"
        return self._refused(
            request,
            RowError(
                ErrorClass.NONFINITE,
                f"the model's {what} at position {position} are not finite; "
                "try model.dtype: float32 with engine.kv_cache_dtype: auto, or check the weights",
            ),
        )

    def _refused(self, request: Request, error: RowError) -> Output:
        return Output(request.request_id, prompt_tokens=len(request.prompt_token_ids), error=error)

    def _output(self, request: Request, finished: Finish) -> Output:
        output = self._counts(request)
        sample = Sample(finished.token_ids, finished.text, finished.reason, finished.stop_reason)
        splitter = self._decoding(request.sampling).splitter
        if splitter is not None:
            sample.reasoning, sample.text = splitter.split(
                request.prompt_token_ids, finished.token_ids, finished.text
            )
        output.samples = (sample,)
        return output

    def _counts(self, request: Request) -> Output:
        return Output(
            request_id=request.request_id,
            prompt_tokens=len(request.prompt_token_ids),
            completion_tokens=len(request.output_token_ids),
            truncated_tokens=request.truncated_tokens,
            cached_tokens=request.num_cached_tokens,
            preemptions=request.num_preemptions,
            control_tokens=request.control_tokens,
        )


def _ids(request: Request) -> Iterator[int]:
    """Every token id that a request names."""
    for one in (request, *request.following):
        yield from one.prompt_token_ids
        yield from one.output_token_ids
        yield from () if one.scoring is None else one.scoring.targets


def _clip(sampling: SamplingParams, room: int) -> SamplingParams:
    if sampling.max_tokens <= room:
        return sampling
    return dataclasses.replace(sampling, max_tokens=room, min_tokens=min(sampling.min_tokens, room))
