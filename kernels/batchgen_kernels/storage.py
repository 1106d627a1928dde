"""What keys and values become when they are stored: the truth that every backend's `write` is tested against.

int8 is symmetric with a scale for each token and head, for keys and values apart: the largest magnitude of
the head's vector becomes 127. Scales are float32: as float16, which would save 2 bytes in about 70, they
would end at a magnitude of 65,504 * 127 and lose small vectors, and they are not what costs accuracy.
"""

from __future__ import annotations

import torch

LARGEST = 127.0
"""Of an int8 element's magnitude; -128 is not used."""


def stored(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x` rounded to a floating `dtype`; NaN where that is not finite, so that an overflow is seen.

    An infinite key would do worse than a NaN: where its product with a query is negative the key would just
    be left out.
    """
    rounded = x.to(dtype)
    return rounded.masked_fill(~rounded.isfinite(), float("nan"))


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Vectors [..., n] as int8 [..., n] and float32 scales [...], so that x is about int8 * scale.

    A vector that is not finite gets the scale NaN. Elements are rounded to the nearest, halves to even, in
    float32.
    """
    x = x.float()
    scale = x.abs().amax(-1) / LARGEST
    usable = scale.isfinite() & (scale > 0)
    steps = (x / scale.unsqueeze(-1)).round().clamp(-LARGEST, LARGEST)
    elements = steps.where(usable.unsqueeze(-1), 0.0).to(torch.int8)
    return elements, scale.masked_fill(~scale.isfinite(), float("nan"))


def dequantize(elements: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float32 [..., n] of int8 [..., n] and scales [...]."""
    return elements.float() * scale.unsqueeze(-1)
