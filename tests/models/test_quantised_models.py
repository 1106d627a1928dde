"""Models with products in int8: as a torch model of the same arithmetic computes; no row changes another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from engine_harness import make_engine, run
from families import FAMILIES
from parity import make_prompts
from safetensors.torch import load_file, save_file
from tiny_models import save_tiny_llama
from transformers import AutoModelForCausalLM
from transformers.pytorch_utils import Conv1D

from batchgen.models import substitutes
from batchgen.models.balance import InputSizes, balancing, input_sizes
from batchgen.types import ErrorClass, SamplingParams, UsageError

GROUP, LARGEST, FEWEST = 64, 127, 64
GREEDY = SamplingParams(max_tokens=8, ignore_eos=True)
BAD_TOKEN = 7
SAME_ROUNDING = 1e-3
"""Share of what int8 changes that is left beside a model with the same rounding, of two prompts at least. Of
long ones more may be: a number between two whole ones goes to the other where float32 sums are added in
another order, and what follows differs."""


def turned(x: torch.Tensor) -> torch.Tensor:
    """A Hadamard matrix times each group, in float32, halves first."""
    distance = GROUP // 2
    while distance:
        first, second = x.unflatten(-1, (-1, 2, distance)).unbind(-2)
        x = torch.stack([first + second, first - second], dim=-2).flatten(-3)
        distance //= 2
    return x


def rounded(x: torch.Tensor) -> torch.Tensor:
    """`(..., features)` turned, and rounded as int8 with a scale for each group; float64."""
    groups = turned(F.pad(x, (0, -x.shape[-1] % GROUP)).unflatten(-1, (-1, GROUP)))
    largest = groups.abs().amax(-1, keepdim=True)
    q = (groups.double() * (LARGEST / largest).double()).round()
    return torch.where(largest > 0, q * (largest / LARGEST).double(), 0.0).flatten(-2)


class RoundedLinear(torch.nn.Module):
    """A linear layer of the same arithmetic, written down in the simplest way."""

    def __init__(self, original: Any, balance: torch.Tensor) -> None:
        super().__init__()
        self.weight, self.bias = rounded(weight_of(original) / balance) / GROUP, original.bias
        self.balance = balance

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = (rounded(x * self.balance) @ self.weight.T).float()
        return y if self.bias is None else y + self.bias


def weight_of(linear: Any) -> torch.Tensor:
    weight: torch.Tensor = linear.weight.T if isinstance(linear, Conv1D) else linear.weight
    return weight


def balance_of(sizes: InputSizes, name: str, parent: Any, *, fused: bool, normed: bool) -> torch.Tensor:
    """Of a linear layer; in a program products of the same input share theirs, which needs a norm before."""
    together = [name]
    if fused and name != "lm_head":
        groups = (["q_proj", "k_proj", "v_proj"], ["gate_proj", "up_proj"])
        together = next((group for group in groups if name in group), together)
        if name == "o_proj" or (name != "down_proj" and not normed):
            return torch.ones(getattr(parent, name).in_features)
    linear = getattr(parent, together[0])
    weights = torch.cat([weight_of(getattr(parent, other)) for other in together])
    found = balancing(sizes.get(linear), weights.square().mean(dim=0).sqrt())
    assert found is not None
    return found


@torch.inference_mode()
def round_products(model: Any, *, fused: bool) -> None:
    body = model.get_decoder()
    sizes = input_sizes(model, body)
    model.set_attn_implementation("eager")
    normed = fused and hasattr(body.layers[0], "input_layernorm")
    rounded_ones = {}
    for parent in list(model.modules()):
        for name, child in parent.named_children():
            few = not fused and type(child) in (torch.nn.Linear, Conv1D) and min(child.weight.shape) < FEWEST
            if type(child) in (torch.nn.Linear, Conv1D) and not few:
                balance = balance_of(sizes, name, parent, fused=fused, normed=normed)
                rounded_ones[parent, name] = RoundedLinear(child, balance)
    for (parent, name), linear in rounded_ones.items():
        setattr(parent, name, linear)


def family(name: str) -> Any:
    return next(f for f in FAMILIES if f.name == name)


def logits_of(engine: Any, prompts: list[list[int]]) -> torch.Tensor:
    """Of the last position of each."""
    seen = {}
    execute = engine.core.runner.execute

    def recording(output: Any) -> torch.Tensor:
        logits = execute(output)
        for s, row in zip((s for s in output.scheduled if s.samples), logits, strict=True):
            seen.setdefault(s.request.request_id, row.clone())
        return logits

    engine.core.runner.execute = recording
    run(engine, prompts, GREEDY)
    return torch.stack([seen[i] for i in range(len(prompts))])


@torch.inference_mode()
def theirs(model: Any, prompts: list[list[int]]) -> torch.Tensor:
    return torch.stack([model(torch.tensor([ids]), use_cache=False).logits[0, -1] for ids in prompts])


def layers_line(engine: Any) -> str:
    return next(note for note in engine.notes if note.startswith("layers:"))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("llama", "one program of our own products in int8, but for embeddings"),
        ("qwen2", "one program of our own products in int8, but for embeddings"),
        ("qwen3", "one program of our own products in int8, but for embeddings"),
        ("olmo2", "one program of our own products in int8, but for embeddings"),
        ("gpt2", "13 products of ours in int8, but for embeddings, as"),
        ("gemma2", "one program of our own products in int8, but for embeddings"),
        (
            "mixtral",
            "in int8, but for MixtralExperts, MixtralTopKRouter, embeddings, products of few numbers, as",
        ),
    ],
)
def test_computes_what_a_model_with_the_same_rounding_does(name: str, said: str, tmp_path: Path) -> None:
    folder = family(name).save(tmp_path)
    engine = make_engine(folder, quantization="int8", max_model_len=160)
    assert said in layers_line(engine)
    prompts = make_prompts()
    ours = logits_of(engine, prompts)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    exact = theirs(model, prompts)
    fused = engine.core.runner.program is not None
    round_products(model, fused=fused)
    wanted = theirs(model, prompts)
    change = (wanted - exact).square().mean().sqrt()
    left = (ours - wanted).square().mean(dim=1).sqrt()
    assert 0.001 * exact.std() < change < 0.2 * exact.std()
    assert left.sort().values[1] < SAME_ROUNDING * change
    assert left.max() < change


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("llama"))


def test_weights_take_less_memory(folder: Path) -> None:
    def size(**settings: Any) -> int:
        engine = make_engine(folder, **settings)
        model = engine.loaded.model
        return sum(t.nbytes for t in (*model.parameters(), *model.buffers()))

    assert size(quantization="int8") < size()


# Each compiles a program of its own.
@pytest.mark.parametrize(
    "stored", ["float32", *(pytest.param(stored, marks=pytest.mark.slow) for stored in ("float16", "int8"))]
)
def test_keys_and_values_are_stored_as_asked(folder: Path, stored: str) -> None:
    engine = make_engine(folder, quantization="int8", kv_cache_dtype=stored)
    assert "one program" in layers_line(engine)
    assert all(len(o.token_ids) == GREEDY.max_tokens for o in run(engine, make_prompts(), GREEDY))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_row_that_is_not_finite_is_an_error_and_no_other(name: str, tmp_path: Path) -> None:
    place = family(name).save(tmp_path)
    good = [[5, 9, 2, 11, 3, 1], [8, 8, 4]]
    weights = load_file(place / "model.safetensors")
    key = next(k for k in weights if k.endswith(("embed_tokens.weight", "wte.weight")))
    weights[key][BAD_TOKEN] = float("inf")
    if "lm_head.weight" not in weights:
        pytest.skip("its embedding is its head")
    save_file(weights, place / "model.safetensors", metadata={"format": "pt"})
    expected, outputs = (
        run(make_engine(place, quantization="int8", max_model_len=160), prompts, GREEDY)
        for prompts in (good, [good[0], [3, BAD_TOKEN, 2], good[1]])
    )
    assert outputs[1].error is not None
    assert outputs[1].error.error_class is ErrorClass.NONFINITE
    assert [outputs[0].token_ids, outputs[2].token_ids] == [o.token_ids for o in expected]


def test_a_program_that_computes_something_else_is_not_used(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    from batchgen.models.decoder import read_decoder
    from batchgen.models.fused import FusedDecoder

    def twisted(body: Any, **options: Any) -> FusedDecoder[Any]:
        found = read_decoder(body, **options)
        assert isinstance(found, FusedDecoder)
        layers = [replace(layer, rope=None) for layer in found.weights.layers]
        return FusedDecoder(replace(found.weights, layers=layers), found.preparation)

    monkeypatch.setattr(substitutes, "read_decoder", twisted)
    assert "would compute something else" in layers_line(make_engine(folder, quantization="int8"))


def test_a_model_that_int8_is_too_coarse_for_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from batchgen.engine import materials

    monkeypatch.setattr(materials, "_SLIGHTLY_ROUNDED", 1e-4)
    with pytest.raises(UsageError, match=r"model\.quantization: with int8 .* leave model\.quantization out"):
        make_engine(folder, quantization="int8")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"dtype": "bfloat16"}, r"int8 is for a model in float32 on a processor, not in bfloat16"),
        ({"attention": "reference"}, r"needs the cpu attention backend, and this is reference"),
        ({"quantization": "int4"}, r"'int4' is not allowed; use int8 or null"),
    ],
)
def test_what_cannot_be_is_refused(folder: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=r"model\.quantization: .*" + message):
        make_engine(folder, **{"quantization": "int8", **settings})
