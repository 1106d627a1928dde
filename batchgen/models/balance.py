"""Balance what int8 rounds: where inputs of a product are large, make them smaller and their weights larger.

Features that share a scale are rounded equally: where the inputs of one are far larger than those of
others, its weights are too coarse for them. A product stays what it is if a feature is multiplied by
something and its weights are divided by it: https://arxiv.org/abs/2211.10438. How large inputs are shows a
pass over a few tokens, the same ones always. Factors are powers of two, which round nothing, so what was
measured with sums in another order on another machine gives the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from batchgen.models.attention import ATTENTION_NAME
from batchgen.models.memory_errors import out_of_memory

_SEQUENCES, _TOKENS = 8, 32
"""First tokens are unlike others in many models, so there are several."""
_MOST = 20
"""Magnitude of an exponent."""
InputSizes = Mapping[torch.nn.Module, torch.Tensor]
"""Of linear layers: how large each feature of their inputs is beside the others, `(in_features,)` float64."""


@torch.inference_mode()
def input_sizes(model: PreTrainedModel, body: Any) -> InputSizes:
    """How large the inputs of a model's linear layers are.

    Args:
        model: in float32, as transformers has loaded it.
        body: the part of it that ends with the last norm.

    Returns:
        Nothing of layers that saw no token, or of any where a pass fails: the checks at load say why it does.

    Raises:
        MemoryError, RuntimeError: no memory. A start that had more would get other weights.
    """
    squares: dict[torch.nn.Module, torch.Tensor] = {}

    def see(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        rows = inputs[0].flatten(0, -2).double()
        known = rows[rows.isfinite().all(dim=1)]
        squares[module] = squares.get(module, 0.0) + known.square().sum(dim=0)

    head = model.get_output_embeddings()  # type: ignore[no-untyped-call]
    linears = [m for m in model.modules() if type(m) in (torch.nn.Linear, Conv1D)]
    hooks = [linear.register_forward_pre_hook(see) for linear in linears]
    model.set_attn_implementation("eager")
    try:
        embeddings: Any = model.get_input_embeddings()
        ids = _token_ids(len(embeddings.weight))
        positions = torch.arange(_TOKENS).expand(_SEQUENCES, -1)
        hidden = body(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
        if type(head) is torch.nn.Linear and head.in_features == hidden.shape[-1]:
            see(head, (hidden,))
    except Exception as error:
        if out_of_memory(error):
            raise
        return {}
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
        for hook in hooks:
            hook.remove()
    return {module: total.sqrt() for module, total in squares.items()}


def balancing(inputs: torch.Tensor | None, weights: torch.Tensor) -> torch.Tensor | None:
    """What to multiply the features of inputs by, and to divide their weights by.

    Args:
        inputs: how large each feature is, `(in_features,)`; None if that is not known.
        weights: how large the weights of each feature are, `(in_features,)`.

    Returns:
        Powers of two, `(in_features,)` float32; 1 where either is zero or not finite. None without `inputs`.
    """
    if inputs is None:
        return None
    exponents = torch.log2(weights.double() / inputs) / 2
    is_known = exponents.isfinite()
    exponents = (exponents - exponents[is_known].mean()).round().clamp(-_MOST, _MOST)
    return torch.where(is_known, torch.exp2(exponents), 1.0).float()


def _token_ids(vocab_size: int) -> torch.Tensor:
    numbers = torch.arange(_SEQUENCES * _TOKENS)
    return ((11 + 37 * numbers + 5 * numbers**2) % vocab_size).view(_SEQUENCES, _TOKENS)
