"""Experts of our own: what transformers computes, and the same bits whatever shares the call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from families import FAMILIES, Family
from transformers import AutoModelForCausalLM

from batchgen.models.experts import IMPLEMENTATION, expert_modules, make_experts_rowwise, rowwise_experts

MIXTURES = [family for family in FAMILIES if "moe" in family.traits]
ROW_MULTIPLE = 8


def model_of(family: Family) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, family.config)(**family.settings)
    return AutoModelForCausalLM.from_config(config).eval()


def routed(experts: Any, rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, and two experts for each."""
    torch.manual_seed(1)
    width = experts.down_proj.shape[1 if not experts.is_transposed else 2]
    weights, index = torch.rand(rows, experts.num_experts).topk(2, dim=-1)
    return torch.randn(rows, width), index, weights


@pytest.mark.parametrize("family", MIXTURES, ids=lambda family: family.name)
@torch.inference_mode()
def test_a_row_has_the_same_bits_in_any_company(family: Family) -> None:
    model = model_of(family)
    experts = expert_modules(model)[0]
    given = routed(experts, 40)
    want = experts(*given)
    make_experts_rowwise(model, ROW_MULTIPLE)
    assert experts.config._experts_implementation == IMPLEMENTATION
    together = experts(*given)
    torch.testing.assert_close(together, want, rtol=1e-4, atol=1e-5 * float(want.std()))
    for rows in (slice(0, 1), slice(3, 8), slice(17, 40)):
        assert torch.equal(experts(*(x[rows] for x in given)), together[rows])


def test_experts_that_compute_otherwise_stay_as_they_are() -> None:
    model = model_of(MIXTURES[0])
    before = model.config._experts_implementation
    for experts in expert_modules(model):
        experts.forward = lambda *given, of=experts: 2 * rowwise_experts(of, *given)
    make_experts_rowwise(model, ROW_MULTIPLE)
    assert model.config._experts_implementation == before


def test_models_without_experts_are_left_alone() -> None:
    model = model_of(FAMILIES[0])
    assert expert_modules(model) == []
    make_experts_rowwise(model, ROW_MULTIPLE)
