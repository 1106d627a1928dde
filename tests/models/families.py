"""Tiny random models of many families: the table that parity, mutations and invariance are tested over.

Each has what makes its family different (windows that no block border meets, partial rotation, scales that
are not 1 …) and weights drawn so that logits have a standard deviation of at least 1.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import transformers
from packaging.version import Version
from tiny_models import save_tokenizer
from transformers import AutoModelForCausalLM, PreTrainedModel

VOCABULARY = 259
WINDOW = 21
FULL, SLIDING = "full_attention", "sliding_attention"
CONTEXT = 160
"""`max_position_embeddings` of every model here."""

_DECODER: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": None,
    "eos_token_id": 258,
    "pad_token_id": 256,
}
_EARLY: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": CONTEXT,
    "bos_token_id": None,
    "eos_token_id": 258,
}
_MLA: dict[str, Any] = {
    **_DECODER,
    "num_key_value_heads": 4,
    "kv_lora_rank": 24,
    "q_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
LONG_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7],
    "long_factor": [1.0, 1.5, 2.5, 4.0, 5.5, 7.0, 8.0, 9.0],
    "original_max_position_embeddings": 64,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One tiny model.

    Args:
        config: class of the configuration in transformers.
        settings: its arguments.
        windows: of each layer, as the probe must find them.
        sources: of each layer, whose keys and values it reads instead of its own; empty if none does.
        traits: what distinguishes it, from `gqa`, `softcap`, `sinks`, `rope`, `moe`, `mla`, `kv_sharing`.
        gain: of the output embedding, where logits would be too small or too large otherwise.
        name: the id of its tests.
    """

    name: str
    config: str
    settings: dict[str, Any]
    windows: tuple[int | None, ...] = (None, None, None)
    sources: tuple[int | None, ...] = ()
    traits: frozenset[str] = frozenset({"gqa", "rope"})
    gain: float = 2.0

    def build(self, attention: str = "eager") -> PreTrainedModel:
        """The model in evaluation mode, the same weights each time."""
        config = getattr(transformers, self.config)(**self.settings)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
        draw_weights(model, self.gain)
        return model

    def save(self, folder: Path) -> Path:
        """Write the model and a byte-level tokenizer."""
        self.build().save_pretrained(folder)
        save_tokenizer(folder)
        return folder

    def with_window(self, window: int) -> Family:
        """The same with another window in each layer that has one."""
        return replace(
            self,
            name=f"{self.name}-{window}",
            settings={**self.settings, "sliding_window": window},
            windows=tuple(w and window for w in self.windows),
        )


def draw_weights(model: PreTrainedModel, gain: float) -> None:
    """Redraw all weights and the buffers that are saved, so that attention is far from uniform.

    Args:
        gain: standard deviation of logits, about, where the last norm gives unit variance.
    """
    generator = torch.Generator().manual_seed(0)
    head = model.get_output_embeddings().weight
    with torch.no_grad():
        for name, p in (*model.named_parameters(), *persistent_buffers(model)):
            noise = torch.randn(p.shape, generator=generator)
            if p is head:
                p.copy_(gain * noise / p.shape[1] ** 0.5)
            elif p.dim() < 2:
                p.copy_((0.0 if "bias" in name else 1.0) + 0.2 * noise)
            elif "emb" in name or "wte" in name or "wpe" in name:
                p.copy_(noise)
            else:
                p.copy_(1.5 * noise / min(p.shape[-2:]) ** 0.5)


def persistent_buffers(model: PreTrainedModel) -> list[tuple[str, torch.Tensor]]:
    """Buffers that a saved model keeps, such as a router's correction."""
    saved = model.state_dict().keys()
    return [(name, b) for name, b in model.named_buffers() if name in saved and b.is_floating_point()]


def family(
    name: str,
    config: str,
    base: dict[str, Any] = _DECODER,
    *,
    windows: tuple[int | None, ...] = (None, None, None),
    sources: tuple[int | None, ...] = (),
    traits: str = "gqa rope",
    gain: float = 2.0,
    **settings: Any,
) -> Family:
    """A row of the table: the settings of a small decoder with some changed."""
    return Family(
        name=name,
        config=config,
        settings={**base, **settings},
        windows=windows,
        sources=sources,
        traits=frozenset(traits.split()),
        gain=gain,
    )


_ALTERNATING = {"sliding_window": WINDOW, "layer_types": [SLIDING, FULL, SLIDING]}
_WINDOWS = (WINDOW, None, WINDOW)
_SHARED = {
    "num_hidden_layers": 5,
    "num_kv_shared_layers": 2,
    "sliding_window": WINDOW,
    "layer_types": [SLIDING, FULL, SLIDING, SLIDING, FULL],
}
_SHARED_WINDOWS = (WINDOW, None, WINDOW, WINDOW, None)
_SOURCES = (None, None, None, 2, 1)
_EXPERTS = {"num_experts_per_tok": 2, "num_experts": 6, "moe_intermediate_size": 32}

_EVERY: tuple[Family, ...] = (
    family("llama", "LlamaConfig"),
    family("mistral", "MistralConfig", sliding_window=WINDOW, windows=(WINDOW,) * 3),
    family("qwen2", "Qwen2Config"),
    family(
        "qwen2-window",
        "Qwen2Config",
        use_sliding_window=True,
        sliding_window=WINDOW,
        max_window_layers=1,
        windows=(None, WINDOW, WINDOW),
    ),
    family("qwen3", "Qwen3Config", head_dim=24),
    family(
        "gemma2",
        "Gemma2Config",
        **_ALTERNATING,
        head_dim=24,
        query_pre_attn_scalar=20,
        attn_logit_softcapping=4.0,
        final_logit_softcapping=6.0,
        windows=_WINDOWS,
        traits="gqa rope softcap",
    ),
    family(
        "gemma3",
        "Gemma3TextConfig",
        **_ALTERNATING,
        head_dim=24,
        query_pre_attn_scalar=20,
        windows=_WINDOWS,
    ),
    family(
        "gemma3n",
        "Gemma3nTextConfig",
        **_SHARED,
        head_dim=16,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=16,
        laurel_rank=8,
        windows=_SHARED_WINDOWS,
        sources=_SOURCES,
        traits="gqa rope kv_sharing",
    ),
    family(
        "gemma4",
        "Gemma4TextConfig",
        **_SHARED,
        head_dim=16,
        global_head_dim=24,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        vocab_size_per_layer_input=VOCABULARY,
        hidden_size_per_layer_input=16,
        windows=_SHARED_WINDOWS,
        sources=_SOURCES,
        traits="gqa rope kv_sharing",
        gain=1.3,
    ),
    family("phi3", "Phi3Config", sliding_window=WINDOW, windows=(WINDOW,) * 3),
    family(
        "phi3-partial",
        "Phi3Config",
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
    ),
    family("gpt2", "GPT2Config", _EARLY, traits=""),
    family(
        "gpt_neox",
        "GPTNeoXConfig",
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        traits="rope",
    ),
    family("gptj", "GPTJConfig", _EARLY, rotary_dim=8, traits="rope"),
    family("opt", "OPTConfig", ffn_dim=96, word_embed_proj_dim=64, traits=""),
    family("starcoder2", "Starcoder2Config", sliding_window=WINDOW, windows=(WINDOW,) * 3, use_bias=True),
    family("olmo2", "Olmo2Config"),
    family("cohere2", "Cohere2Config", **_ALTERNATING, logit_scale=0.25, windows=_WINDOWS, gain=8.0),
    family(
        "granite",
        "GraniteConfig",
        embedding_multiplier=3.0,
        logits_scaling=2.0,
        residual_multiplier=0.7,
        attention_multiplier=0.4,
        gain=4.0,
    ),
    family("glm4", "Glm4Config", head_dim=16),
    family(
        "smollm3",
        "SmolLM3Config",
        no_rope_layer_interval=2,
        use_sliding_window=True,
        **_ALTERNATING,
        windows=_WINDOWS,
    ),
    family("stablelm", "StableLmConfig", use_qkv_bias=True, qk_layernorm=True),
    family("mixtral", "MixtralConfig", num_local_experts=4, num_experts_per_tok=2, traits="gqa rope moe"),
    family(
        "qwen2_moe", "Qwen2MoeConfig", **_EXPERTS, shared_expert_intermediate_size=48, traits="gqa rope moe"
    ),
    family("qwen3_moe", "Qwen3MoeConfig", **_EXPERTS, head_dim=24, traits="gqa rope moe"),
    family(
        "gpt_oss",
        "GptOssConfig",
        **_ALTERNATING,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        windows=_WINDOWS,
        traits="gqa rope moe sinks",
    ),
    family(
        "granite_swa",
        "GraniteSWAConfig",
        **_ALTERNATING,
        embedding_multiplier=3.0,
        logits_scaling=2.0,
        residual_multiplier=0.7,
        attention_multiplier=0.4,
        windows=_WINDOWS,
        traits="gqa rope sinks",
        gain=4.0,
    ),
    family(
        "phimoe",
        "PhimoeConfig",
        sliding_window=WINDOW,
        num_local_experts=4,
        windows=(WINDOW,) * 3,
        traits="gqa rope moe",
    ),
    family("minicpm3", "MiniCPM3Config", _MLA, traits="rope mla"),
    family("deepseek_v2", "DeepseekV2Config", _MLA, topk_method="greedy", traits="rope moe mla"),
    family("deepseek_v3", "DeepseekV3Config", _MLA, n_group=2, topk_group=1, traits="rope moe mla"),
)
_SINCE = {"gptj": "5.24"}
"""Versions of transformers whose code for a family calls attention by its name. Earlier ones, of which 5.17
was looked at, have a class for each kind that they know and make no model for others: it is refused."""
FAMILIES = tuple(
    one for one in _EVERY if Version(transformers.__version__) >= Version(_SINCE.get(one.name, "0"))
)
