"""Which layers become one program, and that the rest of a model still computes what it should."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import make_engine, run
from families import FAMILIES

from batchgen.models import substitutes as module
from batchgen.models.decoder import read_decoder
from batchgen.models.fused import FusedDecoder
from batchgen.models.substitutes import Substitutes
from batchgen.types import SamplingParams

PROMPTS = [[5, 9, 2, 7, 7, 3, 1], [8, 8, 4]]
GREEDY = SamplingParams(max_tokens=6)

FUSED = (
    *("llama", "mistral", "qwen2", "qwen3", "smollm3"),
    *("phi3", "phi3-partial", "gemma2", "gemma3", "olmo2", "granite"),
)
DIFFERENT = {
    "glm4": "a layer has the parts",
    "gpt2": "the model has the parts",
    "mixtral": "the gated unit has the parts",
    "gpt_oss": "attention has weights of its own",
}


def family(name: str) -> Any:
    return next(f for f in FAMILIES if f.name == name)


@pytest.mark.parametrize("name", FUSED)
def test_decoders_that_become_one_program(name: str) -> None:
    assert isinstance(read_decoder(family(name).build().get_decoder()), FusedDecoder)


@pytest.mark.parametrize("name", DIFFERENT)
def test_decoders_that_are_built_otherwise(name: str) -> None:
    found = read_decoder(family(name).build().get_decoder())
    assert isinstance(found, str)
    assert found.startswith(DIFFERENT[name])


def layers_line(engine: Any) -> str:
    return next(note for note in engine.notes if note.startswith("layers:"))


def without_positions(found: FusedDecoder[Any]) -> FusedDecoder[Any]:
    layers = [replace(layer, rope=None) for layer in found.weights.layers]
    return FusedDecoder(replace(found.weights, layers=layers), found.preparation)


def with_one_table(found: FusedDecoder[Any]) -> FusedDecoder[Any]:
    assert {layer.rope for layer in found.weights.layers} == {0, 1}
    layers = [replace(layer, rope=0) for layer in found.weights.layers]
    return FusedDecoder(replace(found.weights, layers=layers), found.preparation)


def with_plain_embeddings(found: FusedDecoder[Any]) -> FusedDecoder[Any]:
    assert found.preparation.multiplier == 3
    return FusedDecoder(found.weights, replace(found.preparation, multiplier=1.0))


@pytest.mark.parametrize(
    ("name", "twist"),
    [("llama", without_positions), ("gemma3", with_one_table), ("granite", with_plain_embeddings)],
)
def test_a_program_that_computes_something_else_is_not_used(
    name: str,
    twist: Callable[[FusedDecoder[Any]], FusedDecoder[Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As with a twist inside a layer that its structure does not show."""
    folder = family(name).save(tmp_path)
    right = make_engine(folder, max_model_len=128)
    assert layers_line(right) == "layers: one program of our own products"
    wanted = [output.token_ids for output in run(right, PROMPTS, GREEDY)]

    def twisted(body: Any, **options: Any) -> FusedDecoder[Any]:
        found = read_decoder(body, **options)
        assert isinstance(found, FusedDecoder)
        return twist(found)

    monkeypatch.setattr(module, "read_decoder", twisted)
    engine = make_engine(folder, max_model_len=128)
    assert "transformers' own" in layers_line(engine)
    assert "would compute something else" in layers_line(engine)
    assert [output.token_ids for output in run(engine, PROMPTS, GREEDY)] == wanted


@pytest.mark.parametrize("stored_as", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_a_program_stores_keys_in_16_bits_as_torch_rounds_them(
    name: str, stored_as: str, tmp_path: Path
) -> None:
    """Those of the first layer, which depend on nothing that was read from the cache."""
    folder = family(name).save(tmp_path)
    caches = []
    for dtype in ("float32", stored_as):
        engine = make_engine(folder, kv_cache_dtype=dtype, max_model_len=128)
        assert layers_line(engine) == "layers: one program of our own products"
        run(engine, PROMPTS, GREEDY)
        caches.append(engine.core.runner.kv.caches[0])
    wide, narrow = caches
    assert wide.key.count_nonzero() > 0
    for exact, rounded in ((wide.key, narrow.key), (wide.value, narrow.value)):
        # Of the longer prompt: what was sampled after it may differ.
        blocks = exact.flatten(1).any(1).nonzero().flatten()
        assert torch.equal(rounded[blocks][..., :7], exact[blocks][..., :7].to(rounded.dtype))


def test_what_is_replaced_is_given_back() -> None:
    model = family("llama").build()
    substitutes = Substitutes(model, model.get_decoder())
    assert any(isinstance(m, torch.nn.Linear) for m in model.modules())
    substitutes.settle()
    assert not any(isinstance(m, torch.nn.Linear) for m in model.modules())
    assert len(model.get_decoder().layers) == 0


def test_suspended_substitutes_compute_as_transformers_do() -> None:
    model, original = family("gpt2").build(), family("gpt2").build()
    substitutes = Substitutes(model, model.get_decoder())
    ids = torch.tensor([PROMPTS[0]])
    with torch.inference_mode(), substitutes.suspended():
        assert torch.equal(model(ids).logits, original(ids).logits)
    with torch.inference_mode():
        ours, theirs = model(ids).logits, original(ids).logits
    assert not torch.equal(ours, theirs)
    assert torch.allclose(ours, theirs, atol=1e-4)


@pytest.mark.parametrize(("name", "is_alone"), [("llama", True), ("qwen3", False), ("gemma2", False)])
def test_rows_are_padded_where_torch_computes(name: str, is_alone: bool, tmp_path: Path) -> None:
    """The end of a tensor that is no whole vector has other bits: soft caps of 259 logits, 24 rotations."""
    multiple = make_engine(family(name).save(tmp_path), max_model_len=128).facts["row_multiple"]
    assert (multiple == 1) is is_alone
    assert multiple % (1 if is_alone else 4) == 0
