"""Draws tokens from logits on the device: `draw` is called by the engine's sampler.

What is drawn is what `batchgen.sampling.sampler` draws on the host: the same noise for the same seed, row,
sample and position, to the bit; the same order of cuts (temperature, min-p, top-k, top-p) with the same rules
for ties; the token at which the mass, added up in float64 in the order of the vocabulary, first exceeds the
noise times the total. So a job's tokens do not change with where they are drawn, as they would if Gumbel
noise, another number for each token, were added to the logits.

Two things may differ: a weight is `exp(x - largest)` of the device, within a few units in the last place of
the host's, and is not divided by the sum. A draw that falls within this of a border, about one in a million,
may be the next token.
"""

from __future__ import annotations

from typing import Any

import torch

from batchgen_kernels.triton_kernels.sampling_kernel import draw_kernel
from batchgen_kernels.triton_kernels.tiles import power_of_two

BLOCK = 2048
"""Logits that are read at a time."""
STAGES = 6
"""Blocks on their way: five of float32 are 40 KiB, about what a processor's share of the memory's bandwidth
brings in the time that one takes."""
PIVOTS = 2
"""Thresholds that are tried in one reading of a row: more of them take fewer readings, and more registers."""


def draw(
    logits: torch.Tensor,
    source: torch.Tensor,
    numbers: torch.Tensor,
    floats: torch.Tensor,
    *,
    barred: bool = False,
) -> torch.Tensor:
    """Draw R tokens. Nothing waits for the device.

    Args:
        logits: [L, V] of any float dtype, elements of a row side by side.
        source: int64 [R], the row of logits of each token.
        numbers: int64 [R, 5]: seed, row, sample, position, top-k (0: all).
        floats: float64 [R, 3]: temperature (0: the likeliest, its first where several are), min-p (0: all),
            top-p (1: all).
        barred: whether logits may be -inf, whose tokens are never drawn.

    Returns:
        int64 [R]; -1 where logits are not finite as they should be, -2 where all are barred.

    Raises:
        ValueError: a shape does not fit.
    """
    rows = len(source)
    if tuple(numbers.shape) != (rows, 5) or tuple(floats.shape) != (rows, 3):
        raise ValueError(
            f"settings of {rows} rows have shapes {tuple(numbers.shape)} and {tuple(floats.shape)}, not "
            f"({rows}, 5) and ({rows}, 3)"
        )
    if logits.dim() != 2 or logits.stride(1) != 1 or not logits.shape[1]:
        raise ValueError(f"logits of shape {tuple(logits.shape)} are no rows of neighbouring elements")
    tokens = source.new_empty(rows)
    if rows:
        draw_kernel[(rows,)](
            tokens,
            logits,
            source,
            numbers.contiguous(),
            floats.contiguous(),
            logits.shape[1],
            logits.stride(0),
            **draw_constants(int(logits.shape[1]), barred=barred),
        )
    return tokens


def draw_constants(vocab: int, *, barred: bool = False) -> dict[str, Any]:
    """What `draw_kernel` is compiled for, and triton's own options."""
    block = min(BLOCK, power_of_two(vocab))
    return {
        "PIVOTS": PIVOTS,
        "BLOCKS": power_of_two(-(-vocab // block)),
        "BLOCK": block,
        "STAGES": STAGES,
        "BARRED": barred,
        "num_warps": min(max(block // 128, 4), 16),
        "num_stages": 1,
        "enable_fp_fusion": False,
    }
