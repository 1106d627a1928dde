"""The attention function that Hugging Face models call.

Registered with transformers' `AttentionInterface` under the name `batchgen`. No mask function is
registered under that name on purpose: transformers then builds no mask at all, and causality,
windows and sequence borders are the backend's work.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface

from batchgen.models.forward_context import current_context

ATTENTION_NAME = "batchgen"


def batchgen_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Hand one layer's attention to the active forward context (shapes: see `ForwardContext`).

    Raises:
        RuntimeError: outside a forward context, or when the model built a mask of its own, which a
            packed batch cannot honour.
    """
    if attention_mask is not None:
        raise RuntimeError(f"layer {getattr(module, 'layer_idx', '?')} passes its own attention mask")
    return current_context().attend(module, query, key, value, **options), None


def register_attention() -> None:
    """Make `attn_implementation="batchgen"` known to transformers; safe to call again."""
    AttentionInterface.register(ATTENTION_NAME, batchgen_attention)
