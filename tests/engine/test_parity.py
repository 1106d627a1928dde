"""Greedy output equals transformers' `generate`, token for token, however the engine is driven."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import make_engine, run, small_pool
from tiny_models import oracle, save_tiny_llama

from batchgen.engine.runner import ModelRunner
from batchgen.types import ErrorClass, FinishReason, SamplingParams
from batchgen_kernels.metadata import AttentionMetadata, PackedSequences

MAX_TOKENS = 24


def make_prompts() -> list[list[int]]:
    rng = random.Random(5)
    shared = [rng.randrange(256) for _ in range(40)]
    prompts = [[rng.randrange(256) for _ in range(n)] for n in (1, 2, 15, 16, 17, 31, 50, 90)]
    return prompts + [shared + [rng.randrange(256) for _ in range(n)] for n in (1, 8, 9, 30)] + [shared]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[list[int]]:
    return oracle(folder, make_prompts(), MAX_TOKENS)


SETTINGS: list[dict[str, Any]] = [
    {},
    {"prefix_caching": False},
    {"max_num_batched_tokens": 32},
    {"max_num_batched_tokens": 8, "max_num_seqs": 3},
    {"max_num_seqs": 1},
    {"max_num_seqs": 64},
    {"block_size": 32},
    {"attention": "reference"},
    {"attention": "cpu"},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_equals_generate(folder: Path, expected: list[list[int]], settings: dict[str, Any]) -> None:
    engine = make_engine(folder, **settings)
    outputs = run(engine, make_prompts(), SamplingParams(max_tokens=MAX_TOKENS))
    assert [o.token_ids for o in outputs] == expected
    assert all(
        o.finish_reason is (FinishReason.LENGTH if len(o.token_ids) == MAX_TOKENS else FinishReason.STOP)
        for o in outputs
    )


def test_equals_generate_through_preemptions(folder: Path, expected: list[list[int]]) -> None:
    engine = small_pool(folder, tokens=192, max_model_len=160)
    outputs = run(engine, make_prompts(), SamplingParams(max_tokens=MAX_TOKENS))
    assert [o.token_ids for o in outputs] == expected
    assert engine.core.scheduler.stats.preemptions > 0


def test_second_run_of_one_engine_hits_its_cache(folder: Path, expected: list[list[int]]) -> None:
    engine = make_engine(folder)
    run(engine, make_prompts(), SamplingParams(max_tokens=MAX_TOKENS))
    again = run(engine, make_prompts(), SamplingParams(max_tokens=MAX_TOKENS), first_row=100)
    assert [o.token_ids for o in again] == expected
    assert sum(o.cached_tokens for o in again) > 200


def test_equal_prefixes_of_one_step_are_computed_once(folder: Path) -> None:
    rng = random.Random(1)
    shared = [rng.randrange(256) for _ in range(64)]
    prompts = [[*shared, i] for i in range(6)]
    engine = make_engine(folder)
    outputs = run(engine, prompts, SamplingParams(max_tokens=1))
    assert [o.cached_tokens for o in outputs] == [0] + [64] * 5


@pytest.mark.parametrize("cut", [1, 7, 20])
def test_a_resumed_row_goes_on_where_it_was(folder: Path, expected: list[list[int]], cut: int) -> None:
    engine = make_engine(folder)
    partial = [tokens[:cut] for tokens in expected]
    outputs = run(engine, make_prompts(), SamplingParams(max_tokens=MAX_TOKENS), partial=partial)
    assert [o.token_ids for o in outputs] == expected


def test_context_limits(folder: Path) -> None:
    engine = make_engine(folder, max_model_len=48)
    prompts = [[1] * 48, [2] * 47, [3] * 10]
    outputs = run(engine, prompts, SamplingParams(max_tokens=8, ignore_eos=True))
    assert outputs[0].error is not None
    assert outputs[0].error.error_class is ErrorClass.CONTEXT_LENGTH
    assert "48" in outputs[0].error.message
    assert [len(o.token_ids) for o in outputs[1:]] == [1, 8]
    assert outputs[1].finish_reason is FinishReason.LENGTH


def break_rope(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = ModelRunner.forward

    def shifted(self: ModelRunner, step: Any) -> torch.Tensor:
        step.position_ids[:, step.position_ids[0] > 20] += 1
        return forward(self, step)

    monkeypatch.setattr(ModelRunner, "forward", shifted)


def break_causality(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row of a prefill sees one key less than it should."""

    def short(meta: AttentionMetadata) -> AttentionMetadata:
        meta.seq_lens[meta.seq_lens > 1] -= 1
        return meta

    patch_metadata(monkeypatch, short)


def break_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention reads another sequence's block."""

    def stale(meta: AttentionMetadata) -> AttentionMetadata:
        if meta.block_table.shape[1] > 1:
            meta.block_table[:, 0] = meta.block_table[0, 0]
        return meta

    patch_metadata(monkeypatch, stale)


def patch_metadata(monkeypatch: pytest.MonkeyPatch, change: Any) -> None:
    build = PackedSequences.metadata

    def changed(self: PackedSequences, tensors: Any) -> AttentionMetadata:
        return change(build(self, tensors))

    monkeypatch.setattr(PackedSequences, "metadata", changed)


@pytest.mark.parametrize("mutation", [break_rope, break_causality, break_blocks])
def test_parity_fails_when_something_is_broken(
    folder: Path, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch, mutation: Any
) -> None:
    engine = make_engine(folder, attention="reference")
    mutation(monkeypatch)
    try:
        outputs = run(engine, make_prompts(), SamplingParams(max_tokens=MAX_TOKENS))
    except ValueError:
        return
    assert [o.token_ids for o in outputs] != expected
