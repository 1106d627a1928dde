"""Sampling noise that depends on nothing but the position it is drawn for.

A counter-based generator: no state, no order of calls. So a row draws the same token whatever
shares its batch, and again after a preemption, a crash, or on resuming.
Source of the mixing function: Steele, Lea, Flood, "Fast splittable pseudorandom number generators"
(OOPSLA 2014), with Stafford's variant 13 constants.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * _MIX_1
    x = (x ^ (x >> np.uint64(27))) * _MIX_2
    return x ^ (x >> np.uint64(31))


def uniform(
    seed: npt.ArrayLike, row: npt.ArrayLike, sample: npt.ArrayLike, position: npt.ArrayLike
) -> npt.NDArray[np.float64]:
    """Uniform noise for (seed, row, sample, position).

    Args:
        seed: job seeds, `(R,)` non-negative integers below 2**63.
        row: row ordinals, `(R,)`.
        sample: index among the row's n samples, `(R,)`.
        position: index of the token drawn, counted over the prompt and output, `(R,)`.

    Returns:
        `(R,)` float64 in [0, 1), multiples of 2**-53.
    """
    state = np.zeros(np.shape(np.atleast_1d(np.asarray(row))), dtype=np.uint64)
    with np.errstate(over="ignore"):
        for part in (seed, row, sample, position):
            state = _mix(state + _GOLDEN + np.atleast_1d(np.asarray(part)).astype(np.uint64))
        state = _mix(state + _GOLDEN)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53
