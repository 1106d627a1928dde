"""Make mixtures of experts independent of what shares the call.

How many rows an expert gets depends on the batch, and a GEMM library may give a row other bits among few rows
than among many (see `batchgen.engine.invariance`). Here every expert multiplies a multiple of a given number
of rows, and a token's experts are added in the order of their numbers. Experts are recognised by what
transformers' `use_experts_implementation` gives their modules; others stay as they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

IMPLEMENTATION = "batchgen"
_CHECKED_ROWS = 24
_TOLERANCE = {torch.float32: 1e-4}
_COARSE = 5e-2


def expert_modules(model: torch.nn.Module) -> list[Any]:
    """The modules that hold the weights of all experts of a layer."""
    return [m for m in model.modules() if hasattr(m, "_is_expert_parallel") and hasattr(m, "down_proj")]


def expert_weights(experts: Any) -> Iterator[torch.Tensor]:
    """The first expert's weights, `(out_features, in_features)`."""
    for name in (_up_name(experts), "down_proj"):
        weight = getattr(experts, name)[0]
        yield weight.T if experts.is_transposed else weight


def rowwise_experts(
    experts: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """One layer's experts; each multiplies a multiple of `experts.row_multiple` rows.

    Args:
        experts: the module with their weights.
        hidden_states: `(T, H)`.
        top_k_index: `(T, K)` int64, no expert twice in a row.
        top_k_weights: `(T, K)`.

    Returns:
        `(T, H)`.
    """
    out = torch.zeros_like(hidden_states)
    for expert in sorted(set(top_k_index.flatten().tolist())):
        tokens, places = torch.where(top_k_index == expert)
        rows = -(-len(tokens) // experts.row_multiple) * experts.row_multiple
        x = hidden_states.new_zeros(rows, hidden_states.shape[1])
        x[: len(tokens)] = hidden_states[tokens]
        y = _expert(experts, expert, x)[: len(tokens)]
        out.index_add_(0, tokens, (y * top_k_weights[tokens, places, None]).to(out.dtype))
    return out


def _up_name(experts: Any) -> str:
    return "gate_up_proj" if experts.has_gate else "up_proj"


def _expert(experts: Any, expert: int, x: torch.Tensor) -> torch.Tensor:
    up = _product(experts, _up_name(experts), expert, x)
    inner = experts._apply_gate(up) if experts.has_gate else experts.act_fn(up)
    y = _product(experts, "down_proj", expert, inner)
    return experts.post_expert_norm(y) if experts.has_post_expert_norm else y


def _product(experts: Any, name: str, expert: int, x: torch.Tensor) -> torch.Tensor:
    weight = getattr(experts, name)[expert]
    bias = getattr(experts, f"{name}_bias")[expert] if experts.has_bias else None
    return F.linear(x, weight.T if experts.is_transposed else weight, bias)


def make_experts_rowwise(model: PreTrainedModel, row_multiple: int) -> None:
    """Let every mixture of experts compute by `rowwise_experts`, if that computes the same; else none."""
    modules = expert_modules(model)
    if not modules:
        return
    for experts in modules:
        experts.row_multiple = row_multiple
    if all(_computes_the_same(experts) for experts in {type(m): m for m in modules}.values()):
        ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, rowwise_experts)
        model.set_experts_implementation(IMPLEMENTATION)


@torch.inference_mode()
def _computes_the_same(experts: Any) -> bool:
    weight = next(expert_weights(experts))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_CHECKED_ROWS, weight.shape[1], generator=generator).to(weight.dtype)
    scores = torch.rand(_CHECKED_ROWS, experts.num_experts, generator=generator)
    weights, index = scores.topk(min(2, experts.num_experts), dim=-1)
    weights = weights.to(weight.dtype)
    try:
        theirs, ours = experts(x, index, weights), rowwise_experts(experts, x, index, weights)
    except (AttributeError, RuntimeError, TypeError):
        return False
    allowed = _TOLERANCE.get(weight.dtype, _COARSE) * theirs.float().std()
    return bool((ours - theirs).abs().max() <= allowed)
