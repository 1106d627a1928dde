"""What a layer does beside attention and products, in plain torch: the truth for fused kernels.

Each rounds to the dtype of its input where transformers' modules do, and computes in float32 between.
"""

from __future__ import annotations

import torch
from torch.nn import functional

ACTIVATIONS = ("silu", "gelu_tanh")


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    unit_offset: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Normalise the rows of `x` [T, H], after `residual` [T, H] is added to them.

    Args:
        x: of any float dtype.
        weight: [H].
        eps: added to the mean square.
        residual: of the dtype of `x`; None adds nothing.
        unit_offset: multiply by 1 + weight in float32, as Gemma does, not by weight in the dtype of `x`.

    Returns:
        The normalised rows and what was normalised, which is the next residual; both as `x`.
    """
    total = x if residual is None else x + residual
    wide = total.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if unit_offset:
        return (normed * (1 + weight.float())).to(x.dtype), total
    return (normed.to(x.dtype).float() * weight.float()).to(x.dtype), total


def gated(gate: torch.Tensor, up: torch.Tensor, activation: str) -> torch.Tensor:
    """act(gate) * up, all [T, I]; `activation` is one of `ACTIVATIONS`."""
    wide = gate.float()
    active = functional.silu(wide) if activation == "silu" else functional.gelu(wide, approximate="tanh")
    return (active.to(gate.dtype).float() * up.float()).to(gate.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Turn the first R elements of `x` [T, heads, D] by cos and sin [T, R], their halves paired."""
    width = cos.shape[1]
    turned, rest = x[..., :width].float(), x[..., width:]
    first, second = turned.chunk(2, -1)
    paired = torch.cat([-second, first], -1)
    turned = turned * cos.float().unsqueeze(1) + paired * sin.float().unsqueeze(1)
    return torch.cat([turned.to(x.dtype), rest], -1)
