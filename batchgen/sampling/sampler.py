"""Turn logits into tokens.

Order of operations: those of `operations.py` → greedy or temperature → min_p → top-k → top-p → draw by the
position's own noise. Every operation works on one row alone, so a row's token does not depend on its batch
mates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from batchgen.sampling.history import TokenHistory
from batchgen.sampling.noise import uniform
from batchgen.sampling.operations import Operation
from batchgen.types import ErrorClass, RowError, RowFailure, SamplingParams


class SamplingRow(NamedTuple):
    """What the sampler needs to know about one row of logits.

    `row` and `sample` tell whose token it is, `position` is its index over prompt and output; `operations`
    are those of `sampling`, and `history` is what they may ask.
    """

    sampling: SamplingParams
    row: int
    sample: int
    position: int
    operations: tuple[Operation, ...] = ()
    history: TokenHistory | None = None


def finite_rows(logits: torch.Tensor) -> torch.Tensor:
    """Which rows of `(R, V)` float32 logits are free of NaN and infinity, `(R,)` bool."""
    if not logits.numel():
        return torch.ones(len(logits), dtype=torch.bool)
    # Least and greatest are found many times faster than every number is looked at, and NaN is both.
    values = logits.numpy()
    return torch.from_numpy(np.isfinite(values.max(axis=-1)) & np.isfinite(values.min(axis=-1)))


@torch.inference_mode()
def sample(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> list[int | RowError]:
    """Draw one token per row.

    Args:
        logits: `(R, V)` float, finite.
        rows: R descriptions, in the order of the logits.

    Returns:
        R token ids, or why a row has none.
    """
    tokens: list[int | RowError] = logits.numpy().argmax(axis=-1).tolist() if logits.numel() else []
    for i, row in enumerate(rows):
        if row.operations or not row.sampling.greedy:
            tokens[i] = _choose(logits[i], row)
    return tokens


def _choose(logits: torch.Tensor, row: SamplingRow) -> int | RowError:
    try:
        logits = processed(logits, row)
    except RowFailure as failure:
        return failure.error
    return int(torch.argmax(logits)) if row.sampling.greedy else _draw(logits, row)


def processed(logits: torch.Tensor, row: SamplingRow) -> torch.Tensor:
    """`(V,)` logits after the row's operations; the argument is left as it is.

    Raises:
        RowFailure: an operation failed, or none of the tokens is left.
    """
    logits = logits.float()
    if not row.operations:
        return logits
    assert row.history is not None, "operations need the tokens so far"
    logits = logits.clone()
    for operation in row.operations:
        logits = operation(logits, row.history)
    if logits.max() == -torch.inf:
        raise none_left(row)
    return logits


def none_left(row: SamplingRow) -> RowFailure:
    """What becomes of a row whose operations have barred every token."""
    # Which of several samples comes to this first, and where, depends on what else runs.
    where = f" at position {row.position}" if row.sampling.n == 1 else ""
    return RowFailure(
        ErrorClass.INVALID_PARAM,
        f"no token may be drawn{where}: what allowed_token_ids allows is barred by "
        "bad_words, min_tokens or logits_processors; allow more",
    )


def _draw(logits: torch.Tensor, row: SamplingRow) -> int:
    probabilities = torch.softmax(logits / row.sampling.temperature, dim=-1)
    probabilities = keep_min_p(probabilities, row.sampling.min_p)
    probabilities = keep_top_k(probabilities, row.sampling.top_k)
    probabilities = keep_top_p(probabilities, row.sampling.top_p)
    noise = uniform(row.sampling.seed, row.row, row.sample, row.position)[0]
    return inverse_cdf(probabilities.numpy(), float(noise))


def keep_min_p(probabilities: torch.Tensor, min_p: float) -> torch.Tensor:
    """Zero what is less likely than `min_p` times the likeliest token (https://arxiv.org/abs/2407.01082)."""
    if min_p <= 0:
        return probabilities
    return torch.where(probabilities < min_p * probabilities.max(), 0.0, probabilities)


def keep_top_k(probabilities: torch.Tensor, top_k: int) -> torch.Tensor:
    """Zero all but the `top_k` likeliest tokens; ties at the border are all kept; 0 keeps everything."""
    if top_k <= 0 or top_k >= probabilities.shape[-1]:
        return probabilities
    border = torch.topk(probabilities, top_k).values[-1]
    return torch.where(probabilities < border, 0.0, probabilities)


def keep_top_p(probabilities: torch.Tensor, top_p: float) -> torch.Tensor:
    """Keep the smallest set of likeliest tokens with at least `top_p` of the mass left.

    Nucleus sampling (https://arxiv.org/abs/1904.09751). The likeliest token always stays; equal
    probabilities are ranked by token id.
    """
    if top_p >= 1:
        return probabilities
    total = float(probabilities.double().sum())
    # All tokens below this bound together hold less than 1 - top_p, so none of them is ever kept, and
    # only the few above it need sorting.
    bound = (1 - top_p) * total / probabilities.shape[-1]
    candidates = torch.nonzero(probabilities >= bound).flatten()
    ranked, order = torch.sort(probabilities[candidates], descending=True, stable=True)
    mass_before = torch.cumsum(ranked.double(), dim=-1) - ranked.double()
    stays = mass_before < top_p * total
    stays[0] = True
    kept = torch.zeros_like(probabilities)
    chosen = candidates[order[stays]]
    kept[chosen] = probabilities[chosen]
    return kept


def inverse_cdf(probabilities: np.ndarray, noise: float) -> int:
    """The token at which the cumulated mass first exceeds `noise` times the total.

    Args:
        probabilities: `(V,)`, non-negative, not all zero, not necessarily normalised.
        noise: in [0, 1).
    """
    cumulated = np.cumsum(probabilities, dtype=np.float64)
    token = int(np.searchsorted(cumulated, noise * cumulated[-1], side="right"))
    return token if token < len(cumulated) else int(np.flatnonzero(probabilities)[-1])
