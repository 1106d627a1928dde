"""Keys and values in other dtypes than the model's: right, the same in every batch, and bad ones seen."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from engine_harness import make_engine, run, small_pool
from safetensors.torch import load_file, save_file
from tiny_models import oracle, save_tiny_llama

from batchgen.models.dtypes import DTYPES
from batchgen.promise import STORABLE
from batchgen.types import ErrorClass, SamplingParams, UsageError
from batchgen_kernels.capability import KV_DTYPES

GREEDY = SamplingParams(max_tokens=16, ignore_eos=True)
STORED = ["float32", "bfloat16", "float16", "int8"]
BAD_TOKEN = 7


def make_prompts() -> list[list[int]]:
    rng = random.Random(5)
    shared = [rng.randrange(8, 256) for _ in range(40)]
    lengths = (1, 2, 15, 16, 17, 31, 50, 90)
    prompts = [[rng.randrange(8, 256) for _ in range(n)] for n in lengths]
    return prompts + [shared + [rng.randrange(8, 256) for _ in range(n)] for n in (1, 9, 30)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("llama"))


def token_ids(folder: Path, **settings: object) -> list[list[int]]:
    engine = make_engine(folder, **settings)
    outputs = run(engine, make_prompts(), GREEDY)
    engine.core.close()
    return [o.token_ids for o in outputs]


@pytest.mark.parametrize("stored", STORED)
def test_chunks_and_backends_change_no_token(folder: Path, stored: str) -> None:
    """A prompt attends to its own keys as they are stored, be they of this step or an earlier one."""
    want = token_ids(folder, attention="reference", kv_cache_dtype=stored, max_num_seqs=1)
    assert token_ids(folder, attention="cpu", kv_cache_dtype=stored) == want
    assert token_ids(folder, attention="reference", kv_cache_dtype=stored, max_num_batched_tokens=24) == want


def test_float32_is_exact_and_int8_is_not(folder: Path) -> None:
    engine = make_engine(folder, kv_cache_dtype="float32")
    exact = oracle(folder, make_prompts(), GREEDY.max_tokens)
    got = [o.token_ids for o in run(engine, make_prompts(), SamplingParams(max_tokens=GREEDY.max_tokens))]
    assert got == exact
    assert token_ids(folder, kv_cache_dtype="int8") != token_ids(folder)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_models_store_what_they_compute(folder: Path, dtype: str) -> None:
    engine = make_engine(folder, dtype=dtype)
    assert {cache.dtype for cache in engine.core.runner.kv.caches} == {getattr(torch, dtype)}
    assert engine.pinned["kv_cache_dtype"] == dtype
    assert all(len(o.token_ids) == GREEDY.max_tokens for o in run(engine, make_prompts(), GREEDY))


def test_memory_per_token_is_that_of_the_dtype(folder: Path) -> None:
    def bytes_per_token(stored: str) -> float:
        runner = make_engine(folder, kv_cache_dtype=stored).core.runner
        return runner.layout.block_bytes / runner.block_size

    vectors, width, layers = 2 * 2, 16, 2
    assert bytes_per_token("float32") == layers * vectors * width * 4
    assert bytes_per_token("bfloat16") == bytes_per_token("float16") == layers * vectors * width * 2
    assert bytes_per_token("int8") == layers * vectors * (width + 4)


def test_fp8_is_the_reference_backend_s_on_a_processor(folder: Path) -> None:
    engine = make_engine(folder, kv_cache_dtype="fp8")
    assert {cache.dtype for cache in engine.core.runner.kv.caches} == {torch.float8_e4m3fn}
    assert (engine.facts["attention"], engine.pinned["kv_cache_dtype"]) == ("reference", "fp8")
    got = [o.token_ids for o in run(engine, make_prompts(), GREEDY)]
    assert got == token_ids(folder, attention="reference", kv_cache_dtype="fp8", max_num_batched_tokens=24)
    with pytest.raises(UsageError, match=r"engine\.attention: .* float32 or int8, not as fp8"):
        make_engine(folder, attention="cpu", kv_cache_dtype="fp8")


@pytest.mark.parametrize("stored", STORED)
def test_a_value_beyond_float16_is_an_error_of_its_row(folder: Path, tmp_path: Path, stored: str) -> None:
    """One token's value in the first layer is 200,000, and no other token's comes near."""
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(folder / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"][BAD_TOKEN]
    normed = embedding / embedding.square().mean().sqrt() * weights["model.layers.0.input_layernorm.weight"]
    weights["model.layers.0.self_attn.v_proj.weight"][0] = 2e5 * normed / normed.square().sum()
    # Without this the value would drown whatever else the model computes.
    weights["model.layers.0.self_attn.o_proj.weight"][:, 0] = 0
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    prompts = make_prompts()
    sick = [*prompts[3][:9], BAD_TOKEN, *prompts[3][9:]]
    want = run(make_engine(tmp_path, kv_cache_dtype=stored), prompts, GREEDY)
    engine = make_engine(tmp_path, kv_cache_dtype=stored, max_num_batched_tokens=64)
    *well, bad = run(engine, [*prompts, sick], GREEDY)
    assert [o.token_ids for o in well] == [o.token_ids for o in want]
    if stored == "float16":
        assert bad.error is not None
        assert bad.error.error_class is ErrorClass.NONFINITE
    else:
        assert bad.error is None


def test_what_a_model_cannot_be_stored_as_is_refused_before_its_weights_are_read(folder: Path) -> None:
    with pytest.raises(UsageError, match=r"engine\.kv_cache_dtype: float16 is not for a model in bfloat16"):
        make_engine(folder / "nowhere", dtype="bfloat16", kv_cache_dtype="float16")


def test_the_names_that_a_job_may_use_are_those_of_the_kernels_table() -> None:
    """`validate` loads no torch for a job file, so its own table has names."""

    def name(dtype: torch.dtype) -> str:
        return "fp8" if dtype == torch.float8_e4m3fn else str(dtype).removeprefix("torch.")

    known = {name(dtype): {name(one) for one in stored} for dtype, stored in KV_DTYPES.items()}
    assert {dtype: set(stored) for dtype, stored in STORABLE.items()} == {d: known[d] for d in DTYPES}


def test_preemption_and_small_pools(folder: Path) -> None:
    want = token_ids(folder, kv_cache_dtype="int8")
    engine = small_pool(folder, tokens=144, max_model_len=128, kv_cache_dtype="int8", max_num_seqs=4)
    assert [o.token_ids for o in run(engine, make_prompts(), GREEDY)] == want
    assert engine.core.scheduler.stats.preemptions > 0
