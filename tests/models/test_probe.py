"""What the probe finds in models it has never seen, and whom it refuses and why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PhimoeConfig,
    VaultGemmaConfig,
)

from batchgen.models.attention import ATTENTION_NAME, batchgen_attention, register_attention
from batchgen.models.forward_context import current_context, forward_context
from batchgen.models.mask_probe import OwnMaskError, SeenMasks
from batchgen.models.probe import probe_model
from batchgen.types import UsageError

SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def build(config: Any) -> Any:
    register_attention()
    return AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION_NAME).eval()


def test_finds_shapes_and_scale() -> None:
    layers = probe_model(build(LlamaConfig(**SMALL)))
    assert len(layers) == 2
    spec = layers[0].spec
    assert (spec.num_heads, spec.num_kv_heads, spec.head_size, spec.v_head_size) == (4, 2, 8, 8)
    assert spec.scale == pytest.approx(8**-0.5)
    assert (spec.sliding_window, spec.softcap, spec.has_sinks) == (None, None, False)


def test_finds_the_window() -> None:
    layers = probe_model(build(MistralConfig(**SMALL, sliding_window=16)))
    assert [layer.spec.sliding_window for layer in layers] == [16, 16]


def test_finds_alternating_windows_and_softcap() -> None:
    config = Gemma2Config(**SMALL, sliding_window=16, head_dim=8, attn_logit_softcapping=30.0)
    layers = probe_model(build(config))
    expected = [16 if t == "sliding_attention" else None for t in config.layer_types]
    assert [layer.spec.sliding_window for layer in layers] == expected
    assert {layer.spec.softcap for layer in layers} == {30.0}


def test_attention_outside_a_forward_pass_is_an_error() -> None:
    q = torch.zeros(1, 1, 1, 8)
    with pytest.raises(RuntimeError, match="outside a forward context"):
        batchgen_attention(torch.nn.Identity(), q, q, q)


def test_contexts_do_not_nest_and_end() -> None:
    class Nothing:
        def attend(self, *args: Any, **kwargs: Any) -> torch.Tensor:
            raise AssertionError("not called")

    with forward_context(Nothing()):
        assert isinstance(current_context(), Nothing)
        with pytest.raises(RuntimeError, match="do not nest"), forward_context(Nothing()):
            pass
    with pytest.raises(RuntimeError):
        current_context()


def test_refuses_an_encoder() -> None:
    config = BertConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48
    )
    with pytest.raises(UsageError, match=r"looks ahead \(an encoder\)"):
        probe_model(build(config))


def test_finds_a_window_that_only_the_mask_knows() -> None:
    config = PhimoeConfig(**SMALL, num_local_experts=2, sliding_window=24)
    assert [layer.spec.sliding_window for layer in probe_model(build(config))] == [24, 24]


def test_finds_no_window_where_only_the_configuration_has_one() -> None:
    config = VaultGemmaConfig(**SMALL, head_dim=8, sliding_window=24, layer_types=["full_attention"] * 2)
    assert [layer.spec.sliding_window for layer in probe_model(build(config))] == [None, None]


def test_refuses_a_mask_that_looks_ahead() -> None:
    config = Gemma3TextConfig(**SMALL, head_dim=8, use_bidirectional_attention=True)
    with pytest.raises(UsageError, match=r"layer 0 looks ahead \(an encoder\)"):
        probe_model(build(config))


def test_refuses_a_mask_of_the_models_own() -> None:
    masks = SeenMasks(torch.device("cpu"))
    masks.build(q_length=3, kv_length=3, mask_function=lambda b, h, q, k: k <= q)
    with pytest.raises(OwnMaskError, match="of its own"):
        masks.window(torch.zeros(1, 1, 3, 3))


def test_batchgens_attention_is_back_after_the_probe() -> None:
    model = build(LlamaConfig(**SMALL))
    probe_model(model)
    assert model.config._attn_implementation == ATTENTION_NAME
