"""What keys and values become when they are stored: the truth that every backend's `write` is tested against.

int8 and fp8 (e4m3: 4 bits of exponent, 3 of mantissa) have a scale for each token and head, for keys and
values apart: the largest magnitude of the head's vector becomes 127 or 448, the largest number of the format.
Without one fp8 would overflow on keys that some models have, and hold small vectors as subnormal numbers.
Scales are float32: as float16, which would save 2 bytes in about 70, they would end at a magnitude of
65,504 * 127 and lose small vectors, and they are not what costs accuracy.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

LARGEST: Mapping[torch.dtype, float] = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}
"""Of an element's magnitude, in each dtype that has scales; -128 is not used."""


def stored(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """`x` rounded to a floating `dtype`; NaN where that is not finite, so that an overflow is seen.

    An infinite key would do worse than a NaN: where its product with a query is negative the key would just
    be left out.
    """
    rounded = x.to(dtype)
    return rounded.masked_fill(~rounded.isfinite(), float("nan"))


def quantize(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Vectors [..., n] in a `dtype` of `LARGEST`, and float32 scales [...]: x is about element * scale.

    A vector that is not finite gets the scale NaN, and elements of 0. Elements are rounded from float32 to
    the nearest, halves to even.
    """
    x, largest = x.float(), LARGEST[dtype]
    scale = x.abs().amax(-1) / largest
    usable = scale.isfinite() & (scale > 0)
    steps = (x / scale.unsqueeze(-1)).clamp(-largest, largest)
    steps = steps if dtype.is_floating_point else steps.round()
    elements = steps.where(usable.unsqueeze(-1), 0.0).to(dtype)
    return elements, scale.masked_fill(~scale.isfinite(), float("nan"))


def dequantize(elements: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float32 [..., n] of elements [..., n] and scales [...]."""
    return elements.float() * scale.unsqueeze(-1)
