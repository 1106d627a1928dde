"""What speed must not cost: how far greedy output agrees with a reference, and how likely real text is."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Agreement:
    """Of `rows` outputs that have a reference: how many equal it, and the mean share before a difference."""

    rows: int
    exact: int
    share: float


def agreement(
    outputs: Sequence[Sequence[int]], references: Sequence[Sequence[int] | None], eos: int | None = None
) -> Agreement | None:
    """Compare outputs with references, where there are any.

    Args:
        outputs: token ids of each row.
        references: as many; None is left out.
        eos: the end of sequence; what a reference holds from there on is not compared, because engines that
            are told to go on differ in whether they may choose it again.

    Returns:
        None where no row has a reference.
    """
    pairs = [
        (output, _before(reference, eos))
        for output, reference in zip(outputs, references, strict=True)
        if reference is not None
    ]
    if not pairs:
        return None
    shares = [common_length(output, reference) / max(1, len(reference)) for output, reference in pairs]
    exact = sum(list(output[: len(reference)]) == list(reference) for output, reference in pairs)
    return Agreement(len(pairs), exact, math.fsum(shares) / len(shares))


def common_length(a: Sequence[int], b: Sequence[int]) -> int:
    """Tokens before the first difference."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def perplexity(negative_logprob: float, tokens: int) -> float:
    """Of text, from the sum over its tokens."""
    return math.exp(negative_logprob / tokens) if tokens else math.nan


def _before(reference: Sequence[int], eos: int | None) -> Sequence[int]:
    # A first token that ends the sequence is compared, else nothing would be.
    return reference[: reference.index(eos, 1)] if eos in reference[1:] else reference
