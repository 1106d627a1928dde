"""What tasks read off a step beside sampling: scores of known tokens, and hidden states to pool.

`EngineCore` calls `read_step` after the forward pass and, once the step is confirmed, hands each request's
readings to its `Reader`, which has the result when the prompt is through. A reading depends on nothing but
the request's own positions, so a preempted request goes on where its readings ended.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from batchgen.core.scheduler import SchedulerOutput
from batchgen.scores import Classification, Pooling, TokenLogprob, TokenScores
from batchgen.types import Request

Head = Callable[[torch.Tensor], torch.Tensor]
_Vector = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Reading:
    """What one step yields for one request.

    Args:
        request: whose.
        count: positions that were read.
        scores: of the tokens behind these positions, where they are scored.
        hidden: `(count, H)` hidden states, where they are pooled.
        nonfinite: the first position at which something is not finite.
    """

    request: Request
    count: int
    scores: TokenScores | None = None
    hidden: torch.Tensor | None = None
    nonfinite: int | None = None


def read_step(planned: SchedulerOutput, hidden: torch.Tensor, head: Head, most_rows: int) -> list[Reading]:
    """Everything that the requests of a step want of it.

    Args:
        planned: the step.
        hidden: `(T, H)`, its requests' positions one request after the other.
        head: from `(R, H)` hidden states to `(R, vocab)` float32 logits.
        most_rows: most rows of logits that may lie in memory at once.
    """
    scored: list[tuple[Request, range, torch.Tensor]] = []
    pooled: list[tuple[Request, range, torch.Tensor]] = []
    offset = 0
    for s in planned.scheduled:
        wanted = s.request.reads(s.start, s.start + s.num_tokens)
        if wanted:
            first = offset + wanted.start - s.start
            rows = hidden[first : first + len(wanted)]
            (pooled if s.request.scoring is None else scored).append((s.request, wanted, rows))
        offset += s.num_tokens
    return _pooled(pooled) + _scored(scored, head, most_rows)


def _pooled(wanted: list[tuple[Request, range, torch.Tensor]]) -> list[Reading]:
    readings = []
    states = _on_host([rows for _, _, rows in wanted])
    for (request, positions, _), rows in zip(wanted, states, strict=True):
        bad = _first_bad(torch.isfinite(rows).all(dim=-1), positions)
        readings.append(Reading(request, len(positions), hidden=rows.float(), nonfinite=bad))
    return readings


def _on_host(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """Rows of each; from a device all come together, as each journey is waited for."""
    if not tensors or tensors[0].device.type == "cpu":
        return tensors
    return list(torch.split(torch.cat(tensors).cpu(), [len(rows) for rows in tensors]))


def _scored(wanted: list[tuple[Request, range, torch.Tensor]], head: Head, most_rows: int) -> list[Reading]:
    """Pieces of several requests share a call of the head, and a long one takes several."""
    if not wanted:
        return []
    hidden = torch.cat([rows for _, _, rows in wanted])
    targets = [t for request, positions, _ in wanted for t in _targets(request, positions)]
    top_k = max(request.scoring.top_k for request, _, _ in wanted if request.scoring)
    scores, finite = TokenScores(), []
    for start in range(0, len(targets), most_rows):
        piece = slice(start, start + most_rows)
        logits = head(hidden[piece])
        finite.append(torch.isfinite(logits).all(dim=-1))
        scores.extend(score_rows(logits, targets[piece], top_k))
    whole, readings, offset = torch.cat(finite).cpu(), [], 0
    for request, positions, _ in wanted:
        own = slice(offset, offset + len(positions))
        bad = _first_bad(whole[own], positions)
        assert request.scoring is not None
        part = scores.part(own, request.scoring.top_k)
        readings.append(Reading(request, len(positions), part, nonfinite=bad))
        offset += len(positions)
    return readings


def _targets(request: Request, positions: range) -> Sequence[int]:
    assert request.scoring is not None
    first = request.scoring.first
    return request.scoring.targets[positions.start - first : positions.stop - first]


def _first_bad(finite: torch.Tensor, positions: range) -> int | None:
    bad = torch.nonzero(~finite).flatten()
    return positions.start + int(bad[0]) if len(bad) else None


@torch.inference_mode()
def score_rows(logits: torch.Tensor, targets: Sequence[int], top_k: int = 0) -> TokenScores:
    """Score one token by each row.

    Args:
        logits: `(R, V)` float32.
        targets: R token ids.
        top_k: how many of the likeliest tokens to keep beside it.
    """
    wanted = torch.tensor(targets).to(logits.device).unsqueeze(1)
    logprobs = torch.log_softmax(logits, dim=-1)
    own = logits.gather(1, wanted)
    # By logits, not logprobs: rounding must not make the token that greedy decoding takes a tie.
    before = torch.arange(logits.shape[1], device=logits.device) < wanted
    ranks = 1 + ((logits > own) | ((logits == own) & before)).sum(dim=-1)
    return TokenScores(
        array("q", targets),
        array("d", logprobs.gather(1, wanted).flatten().tolist()),
        array("q", ranks.tolist()),
        list(_likeliest(logits, logprobs, top_k)) if top_k else [],
    )


def _likeliest(
    logits: torch.Tensor, logprobs: torch.Tensor, top_k: int
) -> Iterator[tuple[TokenLogprob, ...]]:
    # A stable sort of all is slow and `topk` settles ties at random, so ties at the border are settled here.
    top_k = min(top_k, logits.shape[1])
    if logits.device.type != "cpu":
        yield from _likeliest_at_once(logits, logprobs, top_k)
        return
    border = torch.topk(logits, top_k, dim=-1).values[:, -1:]
    for row, row_logprobs, lowest in zip(logits, logprobs, border, strict=True):
        ids = torch.nonzero(row >= lowest).flatten()
        ids = ids[torch.sort(row[ids], descending=True, stable=True).indices[:top_k]]
        pairs = zip(ids.tolist(), row_logprobs[ids].tolist(), strict=True)
        yield tuple(TokenLogprob(token, logprob, rank) for rank, (token, logprob) in enumerate(pairs, 1))


def _likeliest_at_once(
    logits: torch.Tensor, logprobs: torch.Tensor, top_k: int
) -> Iterator[tuple[TokenLogprob, ...]]:
    """The same where looking at a row means waiting for a device."""
    ids = _ranked(logits, top_k)
    chosen = logprobs.gather(1, ids).cpu().tolist()
    for row_ids, row_logprobs in zip(ids.cpu().tolist(), chosen, strict=True):
        pairs = zip(row_ids, row_logprobs, strict=True)
        yield tuple(TokenLogprob(token, logprob, rank) for rank, (token, logprob) in enumerate(pairs, 1))


def _ranked(logits: torch.Tensor, top_k: int) -> torch.Tensor:
    """`(R, top_k)` token ids of `(R, V)` float32 logits, the likeliest first, of equal ones the lowest id.

    By whole numbers of 64 bits, no two of which are equal: the upper half are the bits of a logit, turned so
    that they are ordered as the logits are, the lower half counts token ids downwards.
    """
    # Adding 0 makes -0 the 0 that it is equal to.
    bits = (logits + 0.0).view(torch.int32)
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)
    width = logits.shape[1]
    keys = ordered * 2**32 + torch.arange(width - 1, -1, -1, device=logits.device)
    return width - 1 - (torch.topk(keys, top_k, dim=-1).values & 0xFFFFFFFF)


class Reader:
    """Collects the readings of one request, and of those that follow it under its id.

    Args:
        request: the first.
    """

    def __init__(self, request: Request) -> None:
        self.scores = None if request.scoring is None else TokenScores()
        self._normalize = request.normalize
        self._mean = request.pooling is Pooling.MEAN
        self._vector: _Vector | None = None
        self._count = 0

    def take(self, reading: Reading) -> None:
        """The readings of a step that is confirmed."""
        reading.request.num_read += reading.count
        if reading.scores is not None and self.scores is not None:
            self.scores.extend(reading.scores)
        if reading.hidden is not None:
            self._pool(reading.hidden.numpy().astype(np.float64))

    @property
    def vector(self) -> _Vector:
        """`(H,)` the pooled hidden states."""
        assert self._vector is not None
        return self._vector / self._count

    def embedding(self) -> array[float]:
        """`(H,)` float32: the pooled hidden states, of length 1 where that is asked for."""
        vector = self.vector
        if self._normalize:
            vector = vector / max(math.sqrt(float(vector @ vector)), 1e-12)
        return array("f", vector.astype(np.float32).tobytes())

    def _pool(self, rows: _Vector) -> None:
        if not self._mean or self._vector is None:
            self._vector, self._count = np.zeros_like(rows[0]), 0
        # One row after the other, so that the sum has the same bits however the prompt was cut into steps.
        for row in rows:
            self._vector += row
            self._count += 1


@dataclass(frozen=True, slots=True)
class Labels:
    """What the logits of a classification head mean.

    Args:
        names: of the labels, by index.
        problem_type: `regression`, `multi_label_classification`, or anything else for one label of many, as
            in a transformers configuration.
    """

    names: tuple[str, ...]
    problem_type: str | None = None

    def classify(self, logits: torch.Tensor) -> Classification:
        """The scores that `(num_labels,)` float32 logits stand for."""
        if self.problem_type == "regression" or (self.problem_type is None and len(self.names) == 1):
            scores = logits
        elif self.problem_type == "multi_label_classification":
            scores = torch.sigmoid(logits)
        else:
            scores = torch.softmax(logits, dim=-1)
        return Classification(tuple(zip(self.names, scores.tolist(), strict=True)))
