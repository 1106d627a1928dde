"""Operations and bytes of steps, against torch's own counter and the sizes of tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_harness import make_engine
from tiny_models import save_tiny_llama
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from batchgen.bench.kernels import Ceilings
from batchgen.bench.machine import ProductRate
from batchgen.bench.parts import DECODING, MIXED, PROMPTS
from batchgen.bench.passes import run_pass
from batchgen.bench.shapes import ModelShapes, Product, model_shapes
from batchgen.bench.steps import Span, Step
from batchgen.bench.utilisation import CacheReads, Limits, computed_flop, utilisation
from batchgen.engine.build import Engine
from batchgen.types import Request, SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model"))


def shapes_of(engine: Engine, folder: Path) -> ModelShapes:
    layers = [layer.spec for layer in engine.core.runner.layers]
    shapes = model_shapes(AutoConfig.from_pretrained(folder), layers)
    assert shapes is not None
    return shapes


@torch.inference_mode()
def counted(folder: Path, start: int, stop: int, logits: int) -> int:
    """What torch counts in transformers, a token at a time as it then sees no others."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    cache, ids = DynamicCache(), torch.arange(1, stop + 1).unsqueeze(0) % 250
    if start:
        model.model(ids[:, :start], past_key_values=cache)
    with FlopCounterMode(display=False) as counter:
        for position in range(start, stop):
            states = model.model(ids[:, position : position + 1], past_key_values=cache).last_hidden_state
            if stop - position <= logits:
                model.lm_head(states)
    return int(counter.get_total_flops())


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
@pytest.mark.parametrize(
    ("start", "stop", "logits"), [(0, 1, 1), (0, 13, 1), (7, 8, 1), (5, 21, 0), (5, 21, 4)]
)
def test_operations_are_those_that_torch_counts(folder: Path, start: int, stop: int, logits: int) -> None:
    shapes = shapes_of(make_engine(folder), folder)
    scored = range(stop - logits, stop)
    step = Step([Span(start, stop, False, scored=scored)], 1.0, 0)
    assert computed_flop(shapes, [step], whole=True) == counted(folder, start, stop, logits)


def test_what_nobody_reads_of_the_last_layer(folder: Path) -> None:
    """Of 10 tokens 9 go without attention, output and gated unit of one layer of two."""
    shapes = shapes_of(make_engine(folder), folder)
    step = Step([Span(4, 14, True)], 1.0, 0)
    left_out = 9 * 2 * (64 * 64 + 64 * 256 + 128 * 64) + 2 * 4 * 32 * sum(range(5, 14))
    whole = computed_flop(shapes, [step], whole=True)
    assert computed_flop(shapes, [step], whole=False) == whole - left_out
    every = Step([Span(4, 14, False, scored=range(4, 14))], 1.0, 0)
    assert computed_flop(shapes, [every], whole=True) == computed_flop(shapes, [every], whole=False)


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_bytes_are_those_of_tensors(folder: Path, kv_dtype: str) -> None:
    runner = make_engine(folder, kv_cache_dtype=kv_dtype).core.runner
    blocks = sum(tensor[0].nbytes for cache in runner.kv.caches for tensor in cache.tensors)
    reads = CacheReads.of(runner)
    assert reads.bytes(Span(36, 37, True)) == pytest.approx(37 * blocks / runner.block_size)
    if kv_dtype == "auto":
        assert reads.bytes(Span(36, 37, True)) == 37 * 2 * 2 * 2 * 16 * 4


def test_windows_bound_what_is_read() -> None:
    reads = CacheReads({None: 10.0, 4: 2.0})
    assert reads.bytes(Span(2, 3, True)) == 3 * 12
    assert reads.bytes(Span(9, 10, True)) == 10 * 10 + 4 * 2
    # The first of three tokens sees back as far as its own window.
    assert reads.bytes(Span(7, 10, True)) == 10 * 10 + 6 * 2


def test_shares_of_a_pass(folder: Path) -> None:
    engine = make_engine(folder)
    core, shapes = engine.core, shapes_of(engine, folder)
    sampling = SamplingParams(max_tokens=3, ignore_eos=True)
    rows = [Request(i, [(i * 31 + j) % 250 for j in range(16)], sampling) for i in range(2)]
    done = run_pass(core, rows)
    done.seconds = 8.0
    done.steps = [Step(step.spans, 2.0, step.held) for step in done.steps]
    found = utilisation(core, shapes, done, Limits(1e6, 1e5))
    assert found["kinds"][MIXED] is None
    prompts, decoding = found["kinds"][PROMPTS], found["kinds"][DECODING]
    assert (prompts["steps"], prompts["tokens"], prompts["rows"]) == (1, 32, 2)
    assert (decoding["steps"], decoding["tokens"], decoding["rows"], decoding["seconds"]) == (2, 2, 2, 4.0)
    layer = 2 * (64 * 128 + 64 * 64 + 64 * 256 + 128 * 64)
    head, pair = 2 * 64 * 259, 2 * 4 * 32
    of_decoding = 4 * (2 * layer + head) + 2 * 2 * pair * (17 + 18)
    assert decoding["flop"] == of_decoding
    behind = 2 * (64 * 64 + 64 * 256 + 128 * 64)
    of_prompts = 2 * (16 * 2 * layer + head - 15 * behind + pair * (sum(range(1, 17)) + 16))
    assert prompts["flop"] == of_prompts
    assert found["flop"] == of_prompts + of_decoding
    assert found["flop_share"] == pytest.approx(found["flop"] / 8.0 / 1e6)
    assert prompts["flop_share"] == pytest.approx(of_prompts / 2.0 / 1e6)
    read = core.runner.parts.read_bytes + 2 * 17.5 * 2 * 2 * 2 * 16 * 4
    assert decoding["bytes"] == pytest.approx(read)
    assert decoding["bandwidth_share"] == pytest.approx(read / 2.0 / 1e5)


@pytest.mark.parametrize("program", [True, False])
def test_the_last_layer_is_whole_where_layers_are_transformers(folder: Path, program: bool) -> None:
    core = (engine := make_engine(folder, attention="auto" if program else "reference")).core
    assert (core.runner.program is not None) == program
    shapes = shapes_of(engine, folder)
    done = run_pass(core, [Request(0, [*range(9)], SamplingParams(max_tokens=1))])
    found = utilisation(core, shapes, done, Limits(1.0, 1.0))["flop"]
    assert found == computed_flop(shapes, done.steps, whole=not program)
    assert computed_flop(shapes, done.steps, whole=True) > computed_flop(shapes, done.steps, whole=False)


def test_a_prefix_that_all_rows_share_is_read_by_each(folder: Path) -> None:
    engine = make_engine(folder)
    sampling = SamplingParams(max_tokens=4, ignore_eos=True)
    rows = [Request(i, [*range(64), 100 + i], sampling) for i in range(4)]
    found = utilisation(engine.core, shapes_of(engine, folder), run_pass(engine.core, rows), Limits(1.0, 1.0))
    decoding, weights = found["kinds"][DECODING], engine.core.runner.parts.read_bytes
    of_token = 2 * 2 * 2 * 16 * 4
    assert decoding["bytes"] - weights == pytest.approx(4 * 67 * of_token)
    assert decoding["distinct_bytes"] - weights == pytest.approx((64 + 4 * 3) * of_token)


def test_a_model_whose_operations_are_not_counted(folder: Path) -> None:
    core = make_engine(folder).core
    done = run_pass(core, [Request(0, [1, 2, 3], SamplingParams(max_tokens=3, ignore_eos=True))])
    found = utilisation(core, None, done, Limits(1.0, 1.0))
    assert found["flop"] is found["flop_share"] is None
    assert found["kinds"][DECODING]["steps"] == 2
    assert found["kinds"][DECODING]["bytes"] is None


def test_the_fastest_product_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    place = torch.device("cpu")
    found = Ceilings("processor", "float32", 5e9, 70e9)
    monkeypatch.setattr("batchgen.bench.utilisation.ceilings", lambda *_, quick: found)
    monkeypatch.setattr("batchgen.bench.utilisation.read_bandwidth", lambda _: 9e9)
    rates = [ProductRate(Product("qkv", 8, 8, 1), 4, ours, 60.0) for ours in (None, 80.0)]
    assert Limits.measured(place, torch.float32, rates) == Limits(80e9, 9e9)
    assert Limits.measured(place, torch.float32, rates[:1]) == Limits(70e9, 9e9)
    assert Limits.measured(torch.device("cuda"), torch.float32, []) == Limits(70e9, 5e9)
