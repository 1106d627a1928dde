"""Rotary embeddings whose frequencies transformers changes with the length of the batch.

With `dynamic` rope (NTK scaling) and `longrope` transformers looks at the largest position of a forward pass
and picks frequencies for it, for all sequences in it. In a batch that shares a cache one long row would turn
the keys of all others, and keys already in the cache would not fit new queries. So the frequencies are chosen
once, for sequences of `max_model_len` tokens, and stay.
Sources: LongRoPE, https://arxiv.org/abs/2402.13753; `dynamic_rope_update` in transformers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers import PretrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from batchgen.grammar import counted

_CHANGING = ("dynamic", "longrope")


def rope_parameters(config: PretrainedConfig) -> Iterator[tuple[str | None, dict[str, Any]]]:
    """(layer type, parameters) of each rotary embedding; the type is None where all layers share one."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    by_type = {name: value for name, value in rope.items() if isinstance(value, dict)}
    yield from by_type.items() if by_type else [(None, rope)]


def longest_sequence(config: PretrainedConfig, context: int) -> int:
    """The most tokens that `model.max_model_len` may ask for: `dynamic` rope stretches beyond `context`."""
    factors = [
        parameters.get("factor", 1.0)
        for _, parameters in rope_parameters(config)
        if parameters.get("rope_type") == "dynamic"
    ]
    return int(context * max(factors, default=1.0))


def pin_rope(model: torch.nn.Module, max_model_len: int) -> list[str]:
    """Set the frequencies of every rotary embedding that would change.

    Args:
        model: its embeddings keep frequencies in buffers, which are written.
        max_model_len: the longest sequence, in tokens, for which frequencies are chosen.

    Returns:
        A sentence for each kind that was pinned.
    """
    notes: dict[str, None] = {}
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if isinstance(kinds, str):
            if kinds in _CHANGING:
                module.rope_type = "default"  # type: ignore[assignment]
                notes[_pin(module, kinds, None, max_model_len)] = None
        elif isinstance(kinds, dict):
            for layer_type, kind in kinds.items():
                if kind in _CHANGING:
                    notes[_pin(module, kind, layer_type, max_model_len)] = None
            module.rope_type = dict.fromkeys(kinds, "default")  # type: ignore[assignment]
    return list(notes)


def _pin(module: Any, kind: str, layer_type: str | None, length: int) -> str:
    """Choose one embedding's frequencies; returns what to tell the user."""
    prefix = "" if layer_type is None else f"{layer_type}_"
    buffer: torch.Tensor = getattr(module, f"{prefix}inv_freq")
    frequencies, scaling = ROPE_INIT_FUNCTIONS[kind](
        module.config, buffer.device, seq_len=length, layer_type=layer_type
    )
    buffer.copy_(frequencies)
    name = f"{prefix}attention_scaling"
    setattr(module, name if hasattr(module, name) else "attention_scaling", scaling)
    return _note(module.config, kind, layer_type, length)


def _note(config: PretrainedConfig, kind: str, layer_type: str | None, length: int) -> str:
    parameters = dict(rope_parameters(config))[layer_type]
    original = parameters.get("original_max_position_embeddings") or config.max_position_embeddings
    if length <= original:
        return f"rope: {kind}, as for sequences of up to {counted(original, 'token')}, for every row"
    return (
        f"rope: {kind}, pinned as for sequences of {counted(length, 'token')} (model.max_model_len) for "
        f"every row; short rows may do better with model.max_model_len: {original} or less, for the original "
        "frequencies"
    )
