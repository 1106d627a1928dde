"""What a cache of latents would save in a model with multi-head latent attention.

Such a model computes keys and values of all heads from one latent per token and a rotated part that the
heads share (DeepSeek-V2, https://arxiv.org/abs/2405.04434). transformers hands attention the expanded keys
and values, and those are what the cache holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers import PretrainedConfig

from batchgen.grammar import counted
from batchgen.models.layer_attention import LayerAttention


def latent_notes(config: PretrainedConfig, layers: Sequence[LayerAttention], itemsize: int) -> list[str]:
    """A sentence with both sizes of a token, or nothing where there are no latents.

    Args:
        config: of the model.
        layers: from the probe.
        itemsize: bytes of an element of the cache.
    """
    text: Any = config.get_text_config()
    rank, rotated = getattr(text, "kv_lora_rank", None), getattr(text, "qk_rope_head_dim", None)
    if not rank or rotated is None:
        return []
    specs = [layer.spec for layer in layers]
    expanded = itemsize * sum(s.num_kv_heads * (s.head_size + s.v_head_size) for s in specs)
    latent = itemsize * len(layers) * (rank + rotated)
    return [
        f"latent attention: its keys and values are cached expanded, {counted(expanded, 'byte')} a token; "
        f"their latents would take {latent:,}, which would save {counted(expanded - latent, 'byte')} a token"
    ]
