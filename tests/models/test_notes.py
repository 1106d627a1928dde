"""What is said at load about a model's kind: latents, rope; and the text model inside a multimodal one."""

from __future__ import annotations

from pathlib import Path

import transformers
from engine_harness import make_engine
from families import FAMILIES, Family, draw_weights
from parity import SCHEDULES, Oracle, compare, open_engine, run_schedule
from tiny_models import save_tokenizer
from transformers import AutoModelForCausalLM


def named(name: str) -> Family:
    return next(family for family in FAMILIES if family.name == name)


def test_what_latents_would_save(tmp_path: Path) -> None:
    """Float32; three layers of 4 heads, keys of 24 and values of 12; latents of 24 and 8 rotated."""
    engine = open_engine(named("minicpm3"), tmp_path)
    assert [note for note in engine.notes if note.startswith("latent attention")] == [
        "latent attention: its keys and values are cached expanded, 1,728 bytes a token; "
        "their latents would take 384, which would save 1,344 bytes a token"
    ]


def test_models_without_latents_or_changing_rope_say_nothing(tmp_path: Path) -> None:
    engine = open_engine(named("llama"), tmp_path)
    assert not [note for note in engine.notes if note.startswith(("latent", "rope"))]


def test_text_of_a_multimodal_model(tmp_path: Path) -> None:
    """Gemma 3 with a vision tower: `generate` from text is what its text model makes of it."""
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=named("gemma3").settings,
        vision_config={**vision, "image_size": 28, "patch_size": 14},
        mm_tokens_per_image=4,
        boi_token_index=256,
        eoi_token_index=256,
        image_token_index=257,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    draw_weights(model, 2.0)
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    engine = make_engine(tmp_path, max_model_len=160, max_num_seqs=13)
    assert compare(Oracle(model), run_schedule(engine, SCHEDULES[1], 8)).ok
