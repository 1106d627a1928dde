"""Make the weights of a dummy model from a seed, in memory of the device that computes with them.

Called by `loader.load_model`. A parameter's numbers follow from the seed, its name and shape, and the kind
of device, whose generator draws them: a model with fewer layers is the beginning of the whole one.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from batchgen.cache import key_of

_HEAD_GAIN = 2.0
"""Standard deviation of logits: with 1 or less, near ties would hide wrong numbers."""


@torch.no_grad()
def make_model(
    auto_class: Any,
    config: PretrainedConfig,
    seed: int,
    dtype: torch.dtype,
    device: torch.device,
    attention: str,
) -> PreTrainedModel:
    """A model in evaluation mode.

    Args:
        auto_class: of transformers, such as `AutoModelForCausalLM`.
        config: of the model.
        seed: of the weights.
        dtype: of the weights.
        device: where they are made.
        attention: name of the attention function.
    """
    with torch.device(device), no_init_weights():
        model: Any = auto_class.from_config(
            config, dtype=dtype, attn_implementation=attention, trust_remote_code=False
        )
    model.tie_weights()
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and name.endswith("norm.weight"):
            continue
        if name.endswith("bias"):
            parameter.zero_()
        elif head is not None and parameter is head.weight:
            _draw(name, parameter, seed, _HEAD_GAIN * parameter.shape[-1] ** -0.5)
        elif parameter.dim() == 1 or parameter is embeddings.weight:
            _draw(name, parameter, seed, 1.0)
        else:
            _draw(name, parameter, seed, parameter.shape[-1] ** -0.5)
    model.eval()
    made: PreTrainedModel = model
    return made


def _draw(name: str, parameter: torch.Tensor, seed: int, deviation: float) -> None:
    number = int(key_of([str(seed), name])[:15], 16)
    generator = torch.Generator(parameter.device).manual_seed(number)
    parameter.normal_(0.0, deviation, generator=generator)
