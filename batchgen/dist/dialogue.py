"""A row that is a dialogue (`sampling.turns`): its user turns, answered one after another.

The intake renders each turn and the worker's loop runs it as a request of its own; the prefix cache keeps
what the turns have in common. To the supervisor it is one row: one result, and one stream of partial tokens,
the turns' sampled tokens end to end. Where a turn ends in that stream follows from the stop conditions, so a
row that is sent again with a part of it goes on in the turn, and at the token, where it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from batchgen.scores import TokenScores
from batchgen.text.prompt import PreparedRow
from batchgen.types import Output, Request, RowError, Sample, SamplingParams

_SUMS = (
    *("prompt_tokens", "completion_tokens", "truncated_tokens", "reasoning_tokens"),
    *("cached_tokens", "preemptions"),
)
_TIMES = ("queue_seconds", "prefill_seconds", "decode_seconds")


@dataclass(slots=True, eq=False)
class Dialogue:
    """One dialogue on its way. The loop owns it, except while the intake renders its next turn.

    Args:
        row: its ordinal.
        columns: of the row.
        sampling: of each turn.
        turns: how many user turns it has.
        pending: tokens that an earlier attempt sampled and no turn has taken yet.
        priority: higher runs first.

    Attributes:
        answered: the turns that have ended well.
    """

    row: int
    columns: Mapping[str, Any]
    sampling: SamplingParams
    turns: int
    pending: list[int]
    priority: int = 0
    answered: list[Sample] = field(default_factory=list)
    _past: list[int] = field(default_factory=list)
    _request: Request | None = None
    _ended: list[Output] = field(default_factory=list)
    _reported: int = 0

    def __post_init__(self) -> None:
        self._reported = len(self.pending)

    @property
    def answers(self) -> list[str]:
        """Texts of the turns that have ended well; what was reasoned is no part of the conversation."""
        return [sample.text for sample in self.answered]

    def begin(self, prompt: PreparedRow) -> Request:
        """The next turn's request, with what is known of its answer."""
        self._request = Request(
            request_id=self.row,
            prompt_token_ids=prompt.token_ids,
            sampling=self.sampling,
            output_token_ids=list(self.pending),
            priority=self.priority,
            control_tokens=prompt.control_tokens,
            truncated_tokens=prompt.truncated_tokens,
        )
        return self._request

    def end(self, output: Output) -> Output | None:
        """Take the end of the turn that ran; the row's output, or None while a turn is left.

        Args:
            output: of the turn: of its request, or an error of its rendering.
        """
        self._ended.append(output)
        if self._request is not None:
            sampled = self._request.output_token_ids
            # The engine leaves what lies behind the end of the answer to the next turn.
            self.pending = self.pending[len(sampled) :]
            self._past += sampled
            self._request = None
        if output.error is not None:
            return self._whole(_in_turn(output.error, len(self._ended)))
        self.answered += output.samples
        return self._whole(None) if len(self.answered) == self.turns else None

    def news(self) -> tuple[int, int, int, list[int]] | None:
        """Sampled tokens that were not reported before, as `EngineCore.partials` gives them."""
        running = self.pending if self._request is None else self._request.output_token_ids
        first, stream = self._reported, self._past + running
        if len(stream) <= first:
            return None
        self._reported = len(stream)
        return self.row, 0, first, stream[first:]

    def _whole(self, error: RowError | None) -> Output:
        """The turns' outputs as one: sums of their counts, and the last one's reasons."""
        sums = {name: sum(getattr(output, name) for output in self._ended) for name in (*_SUMS, *_TIMES)}
        tokens = [token for output in self._ended for token in output.token_ids]
        scores = [sample.scores for sample in self.answered if sample.scores is not None]
        last = self._ended[-1]
        return replace(
            last,
            error=error,
            turns=tuple(self.answered),
            samples=tuple(
                replace(sample, token_ids=tokens, scores=TokenScores.joined(scores) if scores else None)
                for sample in last.samples
            ),
            # Every rendering sees the texts of all turns before it.
            control_tokens=max(output.control_tokens for output in self._ended),
            **sums,
        )


def _in_turn(error: RowError, turn: int) -> RowError:
    return RowError(error.error_class, f"turn {turn}: {error.message}", error.status)
