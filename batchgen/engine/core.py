"""The loop: `EngineCore.step()` = schedule → execute → finalize.

Requests go in, outputs come out, one step at a time. Used by the engine worker process and by
`LLM`; both feed it lazily, so memory is bounded by the requests in flight.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

from batchgen.core.scheduler import Scheduler, SchedulerOutput
from batchgen.engine.computed import Computed, Drawn
from batchgen.engine.inputs import PendingTokens, round_up
from batchgen.engine.isolation import Isolation, StepFailed, error_of_row, is_of_a_row
from batchgen.engine.live_row import Decoding, LiveRow, live_row
from batchgen.engine.lookahead import Flight, LookAhead, Stages
from batchgen.engine.reading import Labels, Reading, read_step, score_rows
from batchgen.engine.runner import ModelRunner
from batchgen.engine.step_budget import StepBudget
from batchgen.models.memory_errors import out_of_memory
from batchgen.sampling import on_device
from batchgen.sampling.on_device import draw
from batchgen.sampling.operations import operations_of
from batchgen.sampling.resolve import beyond_vocabulary
from batchgen.sampling.sampler import SamplingRow, finite_rows, sample
from batchgen.scores import TokenScores
from batchgen.text.reasoning import ReasoningSplitter
from batchgen.text.stop import StopRules
from batchgen.text.tokenizer import Tokenizer
from batchgen.types import (
    ErrorClass,
    Output,
    Request,
    RequestState,
    RowError,
    RowFailure,
    SamplingParams,
    Task,
)

MAX_DECODINGS = 1024
logger = logging.getLogger(__name__)


_T = TypeVar("_T")


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
        """Called with the rows of a step before it is computed."""
        self._live: dict[int, LiveRow] = {}
        # Numbers of requests that are no row's first sample; ordinals of rows are never negative.
        self._fork_ids = itertools.count(-1, -1)
        self._isolation = Isolation(scheduler)
        self._budget = StepBudget()
        self._decodings: dict[SamplingParams, Decoding] = {}
        self.ahead = self._look_ahead() if runner.device.is_gpu else None
        """Launches steps before the tokens of those before them are known; None on a processor."""

    def _look_ahead(self) -> LookAhead:
        stages = Stages(
            lambda: self._execute(lambda planned, logits: self._begin(planned, logits).settled())[1],
            self._announce,
            self._forward_early,
            self._begin,
        )
        return LookAhead(self.scheduler, self._isolation, self._budget, stages)

    @property
    def num_unfinished(self) -> int:
        """Rows waiting or running."""
        return len(self._live)

    def add(self, request: Request) -> Output | None:
        """Take a row; `request.sampling.max_tokens` is clipped to what fits the context.

        It may come with output tokens that an earlier attempt sampled, and goes on after them. What it
        samples is appended to `request.output_token_ids`; what lies behind the end of the answer is removed.
        It has its output once all of its `sampling.n` samples have ended, or one of them has failed.

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
        decoding = self._decoding(request.sampling)
        most = min(request.sampling.max_tokens, room)
        request.sampling = _clip(request.sampling, room)
        row = live_row(request, decoding, most, self._fork_ids, time.monotonic())
        if not row.unfinished:
            return row.output()
        self._live[request.request_id] = row
        try:
            for entering in row.entering():
                self.scheduler.add(entering)
        except RowFailure as failure:
            return self.fail(request.request_id, failure.error)
        return None

    def step(self) -> list[Output]:
        """Run one step; returns what finished in it.

        Raises:
            EngineError: the step could not be run, or no request can make progress.
        """
        if not self._live:
            self._take_back()
            return []
        now = time.monotonic()
        if self._isolation.active:
            self._isolation.prepare()
        try:
            planned, computed = self._execute(self._sample) if self.ahead is None else self.ahead.execute()
        except StepFailed as failure:
            if not is_of_a_row(failure.error):
                raise failure.error from None
            # What a kernel has broken is not always told by the error of the step that met it.
            self.runner.device.check()
            logger.exception("a step of %d requests failed", len(failure.requests))
            # They hold the step's tensors as long as the error is kept.
            traceback.clear_frames(failure.error.__traceback__)
            self._isolation.failed(failure, self.scheduler.requests)
            return self._settle()
        self._note_started(planned, now)
        self.counters.steps += 1
        self.counters.computed += planned.total_tokens
        outputs = self._finalize(planned, computed)
        if self.ahead is not None:
            self.ahead.draw()
        if self._isolation.active:
            self._isolation.succeeded(self.scheduler.requests)
            outputs += self._settle()
        return outputs

    def _settle(self) -> list[Output]:
        """End the requests that were found to make a step fail, if that is known now."""
        errors = self._isolation.settle(has_worked=self.counters.steps > 0)
        if errors:
            self._budget.forget()
        return [self.fail(row, error) for row, error in errors.items() if row in self._live]

    def _note_started(self, planned: SchedulerOutput, now: float) -> None:
        for scheduled in planned.scheduled:
            row = self._live.get(scheduled.request.row)
            if row is not None:
                row.phases.step_began(now)

    def _execute(self, finish: Callable[[SchedulerOutput, torch.Tensor], _T]) -> tuple[SchedulerOutput, _T]:
        """Schedule and compute one step, and do with its logits what there is to do; in smaller pieces where
        memory does not suffice."""
        retried = False
        while True:
            if retried:
                # Behind the handler of what was raised, whose frames hold the step's tensors.
                self.runner.device.give_back()
            planned = self.scheduler.schedule(self._budget.tokens)
            self._announce([planned])
            try:
                finished = finish(planned, self.runner.execute(planned))
                self._budget.sufficed()
                return planned, finished
            except BaseException as error:
                self.scheduler.rollback(planned)
                if not isinstance(error, Exception):
                    raise
                if not out_of_memory(error) or planned.total_tokens == 1:
                    ids = [s.request.request_id for s in planned.scheduled]
                    raise StepFailed(ids, error) from error
                self._budget.ran_out(planned.total_tokens)
                retried = True
                logger.warning("a step of %d tokens ran out of memory, halved", planned.total_tokens)

    def _announce(self, steps: Sequence[SchedulerOutput]) -> None:
        """Say whose tokens are computed from now on, of rows that have not ended."""
        if self.on_step is not None:
            rows = dict.fromkeys(s.request.row for planned in steps for s in planned.scheduled)
            self.on_step([row for row in rows if row in self._live])

    def _forward_early(self, planned: SchedulerOutput, pending: PendingTokens) -> torch.Tensor:
        """Compute the logits of a step that was decided early."""
        logits = self.runner.execute(planned, pending)
        self._budget.sufficed()
        self._note_started(planned, time.monotonic())
        return logits

    def _take_back(self) -> None:
        """Forget what is under way for rows that are all gone."""
        if self.ahead is not None:
            self.ahead.take_back()

    def partials(self) -> list[tuple[int, int, int, list[int]]]:
        """Output tokens of live rows that were not reported before: (row, sample, first index, ids)."""
        return [news for row in self._live.values() for news in row.news()]

    def drop_unstarted(self) -> None:
        """Forget the rows that have not begun, so that only those go on that have."""
        for ordinal, row in list(self._live.items()):
            if row.phases.started is None:
                self._forget(ordinal)

    def abort_all(self) -> None:
        """Forget every row, running or waiting."""
        for ordinal in list(self._live):
            self._forget(ordinal)
        self._take_back()

    def fail(self, row: int, error: RowError) -> Output:
        """End a row with an error; returns its output. Raises KeyError: it is not in flight."""
        first = self._live[row].first
        self._forget(row)
        return self._refused(first, error)

    def _forget(self, row: int) -> None:
        for live in self._live.pop(row).samples:
            self.scheduler.finish(live.request.request_id)

    def close(self) -> None:
        """Give the memory of cache and weights back; the engine is unusable afterwards."""
        self._live.clear()
        self._take_back()
        self.runner.close()

    def _read(self, planned: SchedulerOutput) -> list[Reading]:
        if not any(s.request.scoring or s.request.pooling for s in planned.scheduled):
            return []
        # No more logits at once than sampling has.
        most_rows = round_up(self.scheduler.config.max_num_seqs, self.runner.row_multiple)
        return read_step(planned, self.runner.hidden, self.runner.head, most_rows)

    def _sample(self, planned: SchedulerOutput, logits: torch.Tensor) -> Computed:
        readings = self._read(planned)
        samplers = [s for s in planned.scheduled if s.samples]
        finite = finite_rows(logits).tolist()
        healthy = [s for s, ok in zip(samplers, finite, strict=True) if ok]
        if not all(finite):
            logits = logits[torch.tensor(finite)]
        bad = [(s.request, s.request.num_tokens) for s, ok in zip(samplers, finite, strict=True) if not ok]
        bad += [(r.request, r.nonfinite) for r in readings if r.nonfinite is not None]
        return Computed(self._draw(logits, [s.request for s in healthy]), readings, bad)

    def _begin(self, planned: SchedulerOutput, logits: torch.Tensor) -> Flight:
        """The same for logits on a GPU, without waiting for what is drawn."""
        readings = self._read(planned)
        samplers = enumerate(s.request for s in planned.scheduled if s.samples)
        # Of a step that was decided early some may have ended since.
        places = {i: request for i, request in samplers if request.state is RequestState.RUNNING}
        source = [i for i, request in places.items() for _ in range(1 + request.num_forks)]
        requests = list(places.values())
        rows = [self._sampling_row(r, r.sample + i) for r in requests for i in range(1 + r.num_forks)]
        if rows:
            drawn = draw(logits, rows, self.runner.transfer, source)
        else:
            drawn = on_device.Drawn(logits.new_empty(0, dtype=torch.int64), rows, {})
        arrived = self.runner.transfer.back(drawn.tokens)
        # Logits are kept no longer than they are needed.
        scored = logits if any(row.sampling.logprobs is not None for row in rows) else None
        alone = _alone(readings, requests, drawn, scored)
        result = functools.partial(self._arrived, readings, requests, drawn, arrived, source, scored)
        pending = PendingTokens(drawn.tokens, {r.request_id: i for i, r in enumerate(requests)})
        return Flight(planned, pending, result, alone)

    def _arrived(
        self,
        readings: list[Reading],
        requests: list[Request],
        drawn: on_device.Drawn,
        arrived: Callable[[], torch.Tensor],
        source: list[int],
        logits: torch.Tensor | None,
    ) -> Computed:
        """Wait for tokens, and for scores where `logits` are given."""
        tokens = drawn.of(arrived().tolist())
        scores: list[TokenScores | None] = [None] * len(tokens)
        if logits is not None:
            scores = self._scores_on_device(logits, source, drawn.rows, tokens)
        found = zip(tokens, scores, strict=True)
        if len(tokens) == len(requests):
            each = [(request, [one]) for request, one in zip(requests, found, strict=True)]
        else:
            each = [(request, list(itertools.islice(found, 1 + request.num_forks))) for request in requests]
        computed = [(r, [(t, scored) for t, scored in own if t is not None]) for r, own in each]
        bad = [(r.request, r.nonfinite) for r in readings if r.nonfinite is not None]
        bad += [(request, request.num_tokens) for request, own in computed if not own]
        # A row may have been ended, and another have its number, since the step was launched.
        bad = [found for found in bad if found[0].state is not RequestState.FINISHED]
        return Computed([(request, own) for request, own in computed if own], readings, bad)

    def _scores_on_device(
        self,
        logits: torch.Tensor,
        source: list[int],
        rows: Sequence[SamplingRow],
        tokens: list[int | RowError | None],
    ) -> list[TokenScores | None]:
        """Of each token, where they were asked for."""
        scores: list[TokenScores | None] = [None] * len(rows)
        wanted = [
            (i, token, row.sampling.logprobs)
            for i, (row, token) in enumerate(zip(rows, tokens, strict=True))
            if row.sampling.logprobs is not None and isinstance(token, int)
        ]
        # As many rows at a time as there are, so that forks take no more memory than copies of these.
        for start in range(0, len(wanted), len(logits)):
            part = wanted[start : start + len(logits)]
            (index,) = self.runner.transfer([np.array([source[i] for i, _, _ in part])])
            top_k = max(top_k for _, _, top_k in part)
            found = score_rows(logits[index], [token for _, token, _ in part], top_k)
            for place, (i, _, own_top_k) in enumerate(part):
                scores[i] = found.part(slice(place, place + 1), own_top_k)
        return scores

    def _draw(self, logits: torch.Tensor, requests: list[Request]) -> list[tuple[Request, Drawn]]:
        """Tokens for each request and its forks, from `(R, V)` logits of the R requests."""
        source = [i for i, request in enumerate(requests) for _ in range(1 + request.num_forks)]
        rows = [self._sampling_row(r, r.sample + i) for r in requests for i in range(1 + r.num_forks)]
        tokens: list[int | RowError] = []
        if len(rows) == len(requests):
            tokens = sample(logits, rows) if rows else []
        else:
            # As many rows at a time as there are, so that forks take no more memory than a copy of them.
            for start in range(0, len(rows), len(requests)):
                part = slice(start, start + len(requests))
                tokens += sample(logits[torch.tensor(source[part])], rows[part])
        scores = (_scores(logits[i], row, token) for i, row, token in zip(source, rows, tokens, strict=True))
        drawn = zip(tokens, scores, strict=True)
        return [(request, list(itertools.islice(drawn, 1 + request.num_forks))) for request in requests]

    def _finalize(self, planned: SchedulerOutput, computed: Computed) -> list[Output]:
        outputs = self._poisoned(computed.nonfinite)
        own = {request.request_id: drawn[0][0] for request, drawn in computed.drawn}
        self.scheduler.update(planned, {i: token for i, token in own.items() if isinstance(token, int)})
        now = time.monotonic()
        # Whoever shared blocks with a poisoned request was preempted, and what it was to get is dropped.
        for reading in computed.readings:
            if reading.request.state is RequestState.RUNNING:
                outputs += self._caught(reading.request, self._take(reading))
        for request, drawn in computed.drawn:
            if request.state is RequestState.RUNNING:
                outputs += self._caught(request, self._go_on(request, drawn, now))
        return outputs

    def _caught(self, request: Request, outputs: Iterator[Output]) -> list[Output]:
        """The outputs of one request; whatever is raised on the way becomes an error of its row."""
        try:
            return list(outputs)
        except Exception as error:
            logger.exception("what a step yielded for row %d failed", request.row)
            return [self.fail(request.row, error_of_row(error))]

    def _take(self, reading: Reading) -> Iterator[Output]:
        """Keep what was read; ends a request that does not generate once its prompt is through."""
        request = reading.request
        live = self._live[request.row]
        live.take(reading)
        if request.generates or request.num_computed_tokens < request.num_tokens:
            return
        self.scheduler.finish(request.request_id)
        if request.following:
            self.scheduler.add(live.follow(), ahead=True)
        else:
            yield self._result(live)

    def _result(self, live: LiveRow) -> Output:
        """The output of a row that does not generate."""
        request, reader = live.first, live.reader
        output = self._ended(live)
        if request.task is Task.EMBED:
            output.embedding = reader.embedding()
        elif request.task is Task.CLASSIFY and self.labels is not None:
            vector = torch.from_numpy(reader.vector).to(self.runner.device.place)
            logits = self.runner.head(vector.unsqueeze(0))[0].cpu()
            output.classification = self.labels.classify(logits)
        return output

    def _decoding(self, sampling: SamplingParams) -> Decoding:
        if sampling not in self._decodings:
            if len(self._decodings) >= MAX_DECODINGS:
                self._decodings.clear()
            rules = StopRules(sampling, self.eos_token_ids, self.tokenizer)
            operations = operations_of(sampling, rules.stop_ids, self.tokenizer, self.vocab_size)
            marks = sampling.reasoning
            splitter = None if marks is None else ReasoningSplitter(marks, self.tokenizer)
            self._decodings[sampling] = Decoding(rules, operations, splitter)
        return self._decodings[sampling]

    def _sampling_row(self, request: Request, sample: int) -> SamplingRow:
        ordinal = request.row
        row = self._live[ordinal]
        history = row.samples[sample].history
        return SamplingRow(
            request.sampling, ordinal, sample, request.num_tokens, row.decoding.operations, history
        )

    def _go_on(self, request: Request, drawn: Drawn, now: float) -> Iterator[Output]:
        """Check the stop conditions of a request and of its forks, which begin here where they go on.

        Yields:
            The row's output, if that was the last of its samples, or if it has failed.
        """
        row = self._live[request.row]
        tokens = [token for token, _ in drawn if isinstance(token, int)]
        if len(tokens) < len(drawn):
            yield self.fail(request.row, next(token for token, _ in drawn if isinstance(token, RowError)))
            return
        self.counters.sampled += len(tokens)
        row.phases.has_token(now)
        mine = row.samples[request.sample : request.sample + len(tokens)]
        for live, token, (_, scores) in zip(mine, tokens, drawn, strict=True):
            live.append(token, scores)
        if request.num_forks:
            self._fork(row, tokens)
        ended = [live for live in mine if live.finish is not None]
        for live in ended:
            self.scheduler.finish(live.request.request_id)
        if ended and not row.unfinished:
            yield self._ended(row)

    def _fork(self, row: LiveRow, tokens: list[int]) -> None:
        for live, token in zip(row.samples[1:], tokens[1:], strict=True):
            live.request.output_token_ids.append(token)
        forks = [live.request for live in row.samples[1:] if live.finish is None]
        self.scheduler.fork(row.first.request_id, forks)

    def _ended(self, row: LiveRow) -> Output:
        """The output of a row that is done, and is forgotten now."""
        del self._live[row.first.request_id]
        output = row.output()
        row.phases.describe(output, time.monotonic())
        return output

    def _poisoned(self, found: list[tuple[Request, int]]) -> list[Output]:
        """Rows of which something is not finite are error rows; nothing of these requests may be shared."""
        errors: dict[int, RowError] = {}
        for request, position in found:
            # What it took from the cache at first was computed, and found finite, by others.
            self.scheduler.poison(request.request_id, request.num_cached_tokens)
            errors[request.row] = _nonfinite(request, position)
        return [self.fail(row, error) for row, error in errors.items()]

    def _refused(self, request: Request, error: RowError) -> Output:
        return Output(request.request_id, prompt_tokens=len(request.prompt_token_ids), error=error)


def _alone(
    readings: list[Reading], requests: list[Request], drawn: on_device.Drawn, scored: torch.Tensor | None
) -> str | None:
    """Why a step must be finalized before another is launched; None where it need not."""
    if readings:
        return "read"
    if any(request.num_forks for request in requests):
        return "forks"
    if scored is not None:
        return "scores"
    return "processors" if drawn.chosen else None


def _scores(logits: torch.Tensor, row: SamplingRow, token: int | RowError) -> TokenScores | None:
    """Of a drawn token, where they were asked for; a row at a time, so that no copy of the logits is made."""
    top_k = row.sampling.logprobs
    return None if top_k is None or isinstance(token, RowError) else score_rows(logits[None], [token], top_k)


def _nonfinite(request: Request, position: int) -> RowError:
    what = "logits" if request.pooling is None else "hidden states"
    # Which of several samples is found first, and where, depends on what else runs.
    where = f" at position {position}" if request.sampling.n == 1 else ""
    return RowError(
        ErrorClass.NONFINITE,
        f"the model's {what}{where} are not finite; "
        "try model.dtype: float32 with engine.kv_cache_dtype: auto, or check the weights",
    )


def _ids(request: Request) -> Iterator[int]:
    """Every token id that a request names."""
    for one in (request, *request.following):
        yield from one.prompt_token_ids
        yield from one.output_token_ids
        yield from itertools.chain(*one.fork_token_ids)
        yield from () if one.scoring is None else one.scoring.targets


def _clip(sampling: SamplingParams, room: int) -> SamplingParams:
    if sampling.max_tokens <= room:
        return sampling
    return dataclasses.replace(sampling, max_tokens=room, min_tokens=min(sampling.min_tokens, room))
