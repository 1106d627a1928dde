"""What the probe finds in models it has never seen, and whom it refuses and why."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BertConfig,
    BloomConfig,
    Gemma2Config,
    LlamaConfig,
    MambaConfig,
    MistralConfig,
    PhimoeConfig,
)

from batchgen.models.attention import ATTENTION_NAME, batchgen_attention, register_attention
from batchgen.models.forward_context import current_context, forward_context
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


def build(config: Any, attention: str | None = ATTENTION_NAME) -> Any:
    register_attention()
    kwargs = {"attn_implementation": attention} if attention else {}
    return AutoModelForCausalLM.from_config(config, **kwargs).eval()


def test_finds_shapes_and_scale() -> None:
    layers = probe_model(build(LlamaConfig(**SMALL)), 128)
    assert len(layers) == 2
    spec = layers[0].spec
    assert (spec.num_heads, spec.num_kv_heads, spec.head_size, spec.v_head_size) == (4, 2, 8, 8)
    assert spec.scale == pytest.approx(8**-0.5)
    assert (spec.sliding_window, spec.softcap, spec.has_sinks) == (None, None, False)


def test_finds_the_window() -> None:
    layers = probe_model(build(MistralConfig(**SMALL, sliding_window=16)), 128)
    assert [layer.spec.sliding_window for layer in layers] == [16, 16]


def test_finds_alternating_windows_and_softcap() -> None:
    config = Gemma2Config(**SMALL, sliding_window=16, head_dim=8, attn_logit_softcapping=30.0)
    layers = probe_model(build(config), 128)
    expected = [16 if t == "sliding_attention" else None for t in config.layer_types]
    assert [layer.spec.sliding_window for layer in layers] == expected
    assert {layer.spec.softcap for layer in layers} == {30.0}


def test_refuses_own_attention_with_the_reason() -> None:
    config = BloomConfig(vocab_size=64, hidden_size=32, n_layer=1, n_head=4)
    with pytest.raises(UsageError, match="does not dispatch through transformers' attention interface"):
        probe_model(build(config, attention=None), 64)


def test_refuses_recurrent_state() -> None:
    config = MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1)
    with pytest.raises(UsageError, match="recurrent state"):
        probe_model(build(config, attention=None), 64)


def test_refuses_rope_that_depends_on_the_batch() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    model = build(LlamaConfig(**SMALL, rope_parameters=rope))
    probe_model(model, 128)
    with pytest.raises(UsageError, match=r"set model\.max_model_len to 128 or less"):
        probe_model(model, 129)


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
        probe_model(build(config), 64)


def test_refuses_a_window_that_only_the_mask_knows() -> None:
    config = PhimoeConfig(**SMALL, num_local_experts=2, sliding_window=24)
    with pytest.raises(UsageError, match="a window of 24 that layer 0 does not pass to attention"):
        probe_model(build(config), 128)
