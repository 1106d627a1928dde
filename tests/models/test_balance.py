"""What products in int8 are balanced by: known from a model alone, and of a kind that rounds nothing."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from families import FAMILIES

from batchgen.models.attention import ATTENTION_NAME
from batchgen.models.balance import balancing, input_sizes
from batchgen.models.loader import load_model


def test_factors_are_the_nearest_powers_of_two_of_what_is_right_for_both() -> None:
    inputs = torch.tensor([1.0, 16.0, 1.0, 1.0]).double()
    weights = torch.tensor([1.0, 1.0, 1.0, 16.0])
    assert torch.equal(balancing(inputs, weights), torch.tensor([1.0, 0.25, 1.0, 4.0]))
    assert torch.equal(balancing(8 * inputs, 3 * weights), torch.tensor([1.0, 0.25, 1.0, 4.0]))


@pytest.mark.parametrize("bad", [0.0, float("inf"), float("nan")], ids=str)
def test_what_is_not_known_stays_as_it_is(bad: float) -> None:
    inputs, weights = torch.ones(4).double(), torch.ones(4)
    for sizes in (inputs, weights):
        sizes[2] = bad
        assert torch.equal(balancing(inputs, weights), torch.ones(4))
        sizes[2] = 1
    assert torch.equal(balancing(torch.zeros(4).double(), weights), torch.ones(4))
    assert balancing(None, weights) is None


def test_sizes_are_those_of_inputs_and_the_model_is_left_as_it_was(tmp_path: Path) -> None:
    folder = next(family for family in FAMILIES if family.name == "llama").save(tmp_path)
    model = load_model(folder).model
    body = model.get_decoder()
    sizes = input_sizes(model, body)
    assert model.config._attn_implementation == ATTENTION_NAME
    linears = {module for module in model.modules() if isinstance(module, torch.nn.Linear)}
    assert sizes.keys() == linears
    assert not any(linear._forward_pre_hooks for linear in linears)
    first = body.layers[0]
    assert torch.equal(sizes[first.self_attn.q_proj], sizes[first.self_attn.v_proj])
    # Of what a norm gives, all rows are of one length.
    normed = sizes[first.mlp.up_proj] / first.post_attention_layernorm.weight.detach()
    assert float(normed.square().mean().sqrt()) == pytest.approx(256**0.5, rel=1e-3)


def test_a_model_that_fails_is_not_balanced(tmp_path: Path) -> None:
    folder = next(family for family in FAMILIES if family.name == "llama").save(tmp_path)
    model = load_model(folder).model
    assert input_sizes(model, lambda **_: 1 / 0) == {}


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_a_pass_without_memory_is_no_reason_for_other_weights(tmp_path: Path, error: Exception) -> None:
    folder = next(family for family in FAMILIES if family.name == "llama").save(tmp_path)
    model = load_model(folder).model

    def body(**_: object) -> None:
        raise error

    with pytest.raises(type(error)):
        input_sizes(model, body)
