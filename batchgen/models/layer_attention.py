"""What a layer's attention needs: made by the load-time probe, read by the engine."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from batchgen_kernels.spec import AttentionSpec


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """What one layer's attention needs.

    Args:
        spec: its shape and arithmetic.
        sinks: its learned extra logits, `(num_heads,)`.
        source: the earlier layer whose keys and values it is handed, if it has none of its own.
    """

    spec: AttentionSpec
    sinks: torch.Tensor | None = None
    source: int | None = None
