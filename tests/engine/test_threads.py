"""Batch invariance on other numbers of threads than this machine has cores: what is said must hold."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from engine_harness import make_engine, record_logits, reschedule, run
from tiny_models import save_tiny_llama

from batchgen.models.activations import RowwiseActivation
from batchgen.types import SamplingParams


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("wide"), intermediate_size=1408)


@pytest.fixture(autouse=True)
def restore_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 3, 4, 8])
def test_a_claim_of_invariance_holds(folder: Path, threads: int) -> None:
    rng = random.Random(threads)
    prompts = [[rng.randrange(256) for _ in range(rng.randrange(2, 60))] for _ in range(16)]
    engine = make_engine(folder, num_threads=threads, max_num_seqs=16, max_num_batched_tokens=256)
    assert engine.facts["batch_invariant"]
    greedy = SamplingParams(max_tokens=6, ignore_eos=True)
    alone = reschedule(engine, 2048, max_num_seqs=1, max_num_batched_tokens=256, prefix_caching=False)
    truth = record_logits(alone)
    run(alone, prompts, greedy)
    together = reschedule(engine, 2048, max_num_seqs=16, max_num_batched_tokens=256)
    seen = record_logits(together)
    run(together, prompts, greedy)
    assert [key for key, logits in seen.items() if not torch.equal(truth[key], logits)] == []


@pytest.mark.parametrize("width", [64, 100, 1408, 5632, 40_000])
def test_rowwise_activation_is_the_activation(width: int) -> None:
    x = torch.randn(1, 37, width)
    expected = torch.nn.functional.silu(x.double()).float()
    torch.testing.assert_close(RowwiseActivation(torch.nn.SiLU())(x), expected)
