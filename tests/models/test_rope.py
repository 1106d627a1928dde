"""Rope that transformers changes with the length of a batch is pinned once, for `max_model_len`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_harness import make_engine
from families import LONG_ROPE, Family, family
from parity import MAX_TOKENS, SCHEDULES, Oracle, compare, make_prompts, run_schedule
from transformers import PreTrainedModel

from batchgen.engine.build import Engine
from batchgen.models.rope import pin_rope
from batchgen.types import UsageError

ORIGINAL = 64
PHI3 = family(
    "phi3-longrope",
    "Phi3Config",
    rope_parameters=LONG_ROPE,
    max_position_embeddings=256,
    original_max_position_embeddings=ORIGINAL,
)
DYNAMIC = family(
    "llama-dynamic",
    "LlamaConfig",
    rope_parameters={"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
    max_position_embeddings=ORIGINAL,
)
BOTH = pytest.mark.parametrize("kind", [PHI3, DYNAMIC], ids=lambda kind: kind.name)


class Forced(Oracle):
    """transformers' model, which sees `length` positions whatever it is given, and so picks rope for them.

    A first row of the batch with the last position does it: in eager attention it changes nothing else.
    """

    def __init__(self, model: PreTrainedModel, length: int) -> None:
        super().__init__(model)
        self.length = length

    @torch.inference_mode()
    def logits(self, ids: list[int]) -> torch.Tensor:
        positions = torch.arange(len(ids))
        far = positions + self.length - len(ids)
        result: torch.Tensor = self.model(
            input_ids=torch.tensor([ids, ids]),
            position_ids=torch.stack([far, positions]),
            attention_mask=torch.ones(2, len(ids), dtype=torch.long),
            use_cache=False,
        ).logits[1]
        return result


def engine_for(kind: Family, folder: Path, length: int) -> Engine:
    return make_engine(kind.save(folder), max_model_len=length, max_num_seqs=13)


@BOTH
def test_long_rope_equals_transformers_with_the_same_factor(kind: Family, tmp_path: Path) -> None:
    engine = engine_for(kind, tmp_path, 160)
    assert any("pinned as for sequences of 160 tokens (model.max_model_len)" in n for n in engine.notes)
    for schedule in SCHEDULES:
        seen = compare(Forced(kind.build(), 160), run_schedule(engine, schedule))
        assert seen.spread >= 1
        assert seen.ok, (schedule.name, seen)


@BOTH
def test_the_factor_matters(kind: Family) -> None:
    """Short rows differ from what transformers makes of them alone: what the note says is so."""
    ids = make_prompts()[1]
    alone = Oracle(kind.build()).logits(ids)
    assert (Forced(kind.build(), 160).logits(ids) - alone).abs().max() > 0.1


@BOTH
def test_within_the_original_length_rope_is_the_original(kind: Family) -> None:
    model, plain = kind.build(), kind.build()
    notes = pin_rope(model, ORIGINAL)
    assert [note.endswith(f"of up to {ORIGINAL} tokens, for every row") for note in notes] == [True]
    ids = make_prompts()[0] + make_prompts()[1] + [7] * MAX_TOKENS
    assert torch.equal(Oracle(model).logits(ids), Oracle(plain).logits(ids))


def test_rope_by_layer_type() -> None:
    kind = family(
        "gemma3-dynamic",
        "Gemma3TextConfig",
        head_dim=16,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    )
    model = kind.build()
    before = {name: b.clone() for name, b in model.named_buffers() if "inv_freq" in name}
    assert len(pin_rope(model, 400)) == 1
    changed = {
        name for name, b in model.named_buffers() if name in before and not torch.equal(b, before[name])
    }
    assert changed == {"model.rotary_emb.full_attention_inv_freq"}
    ids = [3] * 40
    assert torch.equal(Oracle(model).logits(ids), Oracle(model).logits(ids))


def test_dynamic_rope_stretches_no_further_than_its_factor(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"model\.max_model_len: 257 is more than the 256 tokens"):
        engine_for(DYNAMIC, tmp_path, 257)


def test_other_ropes_are_left_alone() -> None:
    kind = family("llama", "LlamaConfig")
    assert pin_rope(kind.build(), 160) == []
