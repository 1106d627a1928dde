"""A row in flight, as `EngineCore` keeps it: its samples, each a request of the scheduler's.

A new row waits as one request. When its prompt is computed, all samples draw their first token from one row
of logits and the others are forked off the first. A row that an earlier attempt began goes on with a request
for each sample that has not ended; what they have in common comes from the prefix cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from batchgen.engine.phases import Phases
from batchgen.engine.reading import Reader, Reading
from batchgen.sampling.history import TokenHistory
from batchgen.sampling.operations import Operation
from batchgen.scores import Scoring, TokenScores
from batchgen.text.reasoning import ReasoningSplitter
from batchgen.text.stop import Finish, StopChecker, StopRules
from batchgen.types import Output, Request, Sample


@dataclass(frozen=True, slots=True)
class Decoding:
    """What follows from sampling parameters: costly to make, and the same for nearly all rows of a job."""

    rules: StopRules
    operations: tuple[Operation, ...]
    splitter: ReasoningSplitter | None


@dataclass(slots=True, eq=False)
class LiveSample:
    """One sample of a row.

    Args:
        request: the scheduler's.
        checker: has seen the tokens of `request`.
        history: what the operations on its logits may ask.
        reported: tokens of `request` that are known outside.
        finish: how it ended, once it has.
        scores: of the tokens of `request`, where they were asked for.
    """

    request: Request
    checker: StopChecker
    history: TokenHistory
    reported: int
    finish: Finish | None = None
    scores: TokenScores | None = None

    def append(self, token_id: int, scores: TokenScores | None) -> None:
        """Check the stop conditions after a new token, and keep its scores."""
        if self.scores is not None and scores is not None:
            self.scores.extend(scores)
        self.finish = self.checker.append(token_id)


@dataclass(slots=True, eq=False)
class LiveRow:
    """A row with all its samples.

    Args:
        samples: as many as were asked for, in their order.
        decoding: of each.
        phases: where the row's time goes.
        reader: what is read of it for a task.
        past: requests that the one of the first sample follows.
    """

    samples: list[LiveSample]
    decoding: Decoding
    phases: Phases
    reader: Reader
    past: list[Request] = field(default_factory=list)

    @property
    def first(self) -> Request:
        """The request of the first sample."""
        return self.samples[0].request

    @property
    def unfinished(self) -> list[Request]:
        """Requests of the samples that have not ended."""
        return [sample.request for sample in self.samples if sample.finish is None]

    def entering(self) -> list[Request]:
        """The requests to give to the scheduler when the row arrives."""
        if any(sample.request.output_token_ids for sample in self.samples):
            return self.unfinished
        self.first.num_forks = len(self.samples) - 1
        return [self.first]

    def follow(self) -> Request:
        """The request of the row's next piece, in place of the one that has ended."""
        self.past.append(self.first)
        self.samples[0].request = replace(self.first.following[0], following=self.first.following[1:])
        return self.first

    def take(self, reading: Reading) -> None:
        """The readings of a step that is confirmed: of the prompt, then of tokens that came with the row."""
        request, scores = reading.request, reading.scores
        own = self.samples[request.sample]
        if scores is not None and request.scoring is not None:
            position = request.scoring.first + request.num_read
            border = min(reading.count, max(0, len(request.prompt_token_ids) - 1 - position))
            sampling = request.sampling
            if own.scores is not None:
                own.scores.extend(scores.part(slice(border, None), sampling.logprobs or 0))
                scores = scores.part(slice(border), sampling.prompt_logprobs or 0)
        self.reader.take(replace(reading, scores=scores))

    def news(self) -> Iterator[tuple[int, int, int, list[int]]]:
        """Output tokens not reported before: (row, sample, first index, ids)."""
        for i, sample in enumerate(self.samples):
            ids = sample.request.output_token_ids
            if len(ids) > sample.reported:
                yield self.first.request_id, i, sample.reported, ids[sample.reported :]
                sample.reported = len(ids)

    def output(self) -> Output:
        """What becomes of the row, all samples having ended."""
        first = self.first
        requests = [*self.past, *(live.request for live in self.samples)]
        of_prompt = [*self.past, first]
        samples = tuple(self._sample(live, live.finish) for live in self.samples if live.finish)
        return Output(
            request_id=first.request_id,
            samples=samples,
            prompt_tokens=sum(len(request.prompt_token_ids) for request in of_prompt),
            completion_tokens=sum(len(request.output_token_ids) for request in requests),
            truncated_tokens=first.truncated_tokens,
            reasoning_tokens=sum(sample.reasoning_tokens for sample in samples),
            cached_tokens=sum(request.num_cached_tokens for request in of_prompt),
            preemptions=sum(request.num_preemptions for request in requests),
            control_tokens=first.control_tokens,
            scores=self.reader.scores,
        )

    def _sample(self, live: LiveSample, finish: Finish) -> Sample:
        sample = Sample(finish.token_ids, finish.text, finish.reason, finish.stop_reason)
        if live.scores is not None:
            sample.scores = live.scores.part(slice(len(finish.token_ids)), self.first.sampling.logprobs or 0)
        if self.decoding.splitter is not None:
            splitter = self.decoding.splitter
            prompt = self.first.prompt_token_ids
            sample.reasoning, sample.text = splitter.split(prompt, finish.token_ids, finish.text)
            if sample.reasoning is not None:
                sample.reasoning_tokens = splitter.num_tokens(finish.token_ids)
        return sample


def live_row(request: Request, decoding: Decoding, most: int, ids: Iterator[int], now: float) -> LiveRow:
    """A row that arrives; what lies behind the end of an answer is removed from its tokens.

    Args:
        request: of the caller; becomes that of the first sample.
        decoding: of its sampling parameters.
        most: tokens that a sample may have.
        ids: numbers for the requests of the other samples.
        now: of the monotonic clock.
    """
    reader, others = Reader(request), list(_others(request, ids))
    samples = [_live_sample(one, decoding.rules, most) for one in (request, *others)]
    return LiveRow(samples, decoding, Phases(now), reader)


def _live_sample(request: Request, rules: StopRules, most: int) -> LiveSample:
    known, scored = request.output_token_ids, request.generates and request.sampling.logprobs is not None
    checker = StopChecker(rules, most)
    finish = checker.prime(known)
    if finish is not None and (scored or request.scoring is not None):
        # It is to be scored all the same, after which the last token is sampled again.
        del known[checker.num_tokens - 1 :]
        checker = StopChecker(rules, most)
        finish = checker.prime(known)
    # In a dialogue, what comes behind the end of this answer belongs to the next.
    del known[checker.num_tokens :]
    if scored and known:
        request.scoring = _also_of(request, known)
    history = TokenHistory(request.prompt_token_ids, known)
    return LiveSample(request, checker, history, len(known), finish, TokenScores() if scored else None)


def _also_of(request: Request, known: list[int]) -> Scoring:
    """What is scored of a prompt, and the tokens that an earlier attempt sampled after it.

    Computed again, not kept with these tokens: they pass through the model anyway.
    """
    sampling = request.sampling
    if request.scoring is None:
        return Scoring(len(request.prompt_token_ids) - 1, tuple(known), sampling.logprobs or 0)
    top_k = max(sampling.logprobs or 0, request.scoring.top_k)
    return Scoring(request.scoring.first, (*request.scoring.targets, *known), top_k)


def _others(request: Request, ids: Iterator[int]) -> Iterator[Request]:
    for i in range(1, request.sampling.n if request.generates else 1):
        known = request.fork_token_ids[i - 1 : i]
        yield replace(
            request,
            request_id=next(ids),
            output_token_ids=known[0] if known else [],
            fork_token_ids=[],
            scoring=None,
            sample=i,
            first=request,
            block_hashes=[],
        )
