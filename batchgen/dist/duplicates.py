"""`input.dedupe: prompt`: prompts that are the same, decoded greedily, are computed once.

Stands between the worker loop and the engine. A greedy answer is a function of the prompt's ids and the
sampling settings, so that a copy of it is what the engine would have given.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from batchgen.types import Output, Request, RowError, SamplingParams

if TYPE_CHECKING:
    from batchgen.dist.serve import Core

MOST_TOKENS = 4_000_000
"""Of finished answers that are remembered, those used least recently forgotten first."""

_Key = tuple[bytes, SamplingParams]


@dataclass(frozen=True, slots=True)
class _Answer:
    """What an engine made of a request.

    Args:
        output: its output.
        sampled: every token that was sampled for it.
    """

    output: Output
    sampled: list[int]

    @property
    def size(self) -> int:
        """Tokens, and something for the objects themselves."""
        return sum(len(s.token_ids) for s in self.output.samples) + len(self.sampled) + 32

    def copy(self, request: Request) -> Output:
        """The answer as that of another row; what was spent on it was spent once."""
        # As if the engine had sampled them for it: a dialogue reports the tokens of its turns end to end.
        request.output_token_ids = list(self.sampled)
        return replace(
            self.output,
            request_id=request.request_id,
            cached_tokens=self.output.prompt_tokens,
            preemptions=0,
            queue_seconds=0.0,
            prefill_seconds=0.0,
            decode_seconds=0.0,
            control_tokens=request.control_tokens,
            truncated_tokens=request.truncated_tokens,
        )


class DedupingCore:
    """An engine that computes equal requests once; a `Core` over another.

    Args:
        core: the engine.
        exempt: rows that are always computed.
    """

    def __init__(self, core: Core, exempt: Callable[[int], bool]) -> None:
        self._core = core
        self.max_model_len = core.max_model_len
        self._exempt = exempt
        self._leaders: dict[int, tuple[_Key, Request]] = {}
        self._followers: dict[_Key, list[Request]] = {}
        self._known: OrderedDict[_Key, _Answer] = OrderedDict()
        self._known_tokens = 0
        self._late: list[Output] = []

    @property
    def on_step(self) -> Callable[[list[int]], None] | None:
        return self._core.on_step

    @on_step.setter
    def on_step(self, call: Callable[[list[int]], None] | None) -> None:
        self._core.on_step = call

    @property
    def counters(self) -> Any:
        return self._core.counters

    @property
    def scheduler(self) -> Any:
        return self._core.scheduler

    @property
    def num_unfinished(self) -> int:
        return self._core.num_unfinished + sum(map(len, self._followers.values())) + len(self._late)

    def add(self, request: Request) -> Output | None:
        """Take a request, or answer it at once from what is known."""
        # What an earlier attempt has sampled is kept; a row that goes on is computed.
        if not request.sampling.greedy or request.output_token_ids or self._exempt(request.request_id):
            return self._core.add(request)
        key = (_digest(request.prompt_token_ids), replace(request.sampling, seed=0))
        if key in self._known:
            self._known.move_to_end(key)
            return self._known[key].copy(request)
        if key in self._followers:
            self._followers[key].append(request)
            return None
        output = self._core.add(request)
        if output is None:
            self._leaders[request.request_id] = key, request
            self._followers[key] = []
        return output

    def step(self) -> list[Output]:
        """As the engine's, with the answers of those that waited for an equal row."""
        outputs = [*self._late, *self._core.step()]
        self._late = []
        for output in outputs[:]:
            outputs += self._ended(output)
        return outputs

    def partials(self) -> list[tuple[int, int, int, list[int]]]:
        return self._core.partials()

    def fail(self, row: int, error: RowError) -> Output:
        """As the engine's; who waited for the row is computed after all."""
        output = self._core.fail(row, error)
        self._late += self._ended(output)
        return output

    def drop_unstarted(self) -> None:
        self._core.drop_unstarted()
        for waiting in self._followers.values():
            waiting.clear()

    def close(self) -> None:
        self._core.close()

    def _ended(self, output: Output) -> list[Output]:
        """Answers of the rows that waited for this one."""
        leader = self._leaders.pop(output.request_id, None)
        if leader is None:
            return []
        key, request = leader
        waiting = self._followers.pop(key)
        if output.error is not None:
            # An error may be this row's own: one too many tokens in time, a value that is not finite.
            return [refused for request in waiting if (refused := self.add(request)) is not None]
        answer = _Answer(output, list(request.output_token_ids))
        self._remember(key, answer)
        return [answer.copy(request) for request in waiting]

    def _remember(self, key: _Key, answer: _Answer) -> None:
        self._known[key] = answer
        self._known_tokens += answer.size
        while self._known_tokens > MOST_TOKENS:
            _, oldest = self._known.popitem(last=False)
            self._known_tokens -= oldest.size


def _digest(ids: list[int]) -> bytes:
    return blake2b(b"".join(i.to_bytes(4, "little") for i in ids), digest_size=16).digest()
