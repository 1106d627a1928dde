"""What a step needs besides weights and cache: counted to the byte, and foreseen from small steps."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engine_harness import make_engine
from safetensors import safe_open
from safetensors.torch import save_file
from tiny_models import save_tiny_llama

from batchgen.core.scheduler import ScheduledRequest, SchedulerOutput
from batchgen.engine.reading import read_step
from batchgen.engine.step_memory import PeakBytes, largest_step, measure_step
from batchgen.models.footprint import mapped_bytes, weight_bytes
from batchgen.scores import Scoring
from batchgen.types import Request, SamplingParams

KIB = 1024


def test_only_what_lives_at_once_counts() -> None:
    weight = torch.ones(256)
    with torch.inference_mode(), PeakBytes() as watch:
        a = weight + 1
        b = a + 1
        del a
        c = b * 2
        c.add_(1)
        c.view(16, 16)[0].exp_()
        del b
        d = c + 1
    assert watch.peak == 2 * KIB
    del c, d


def test_what_is_given_is_no_new_memory() -> None:
    big = torch.ones(KIB)
    with PeakBytes() as watch:
        big.view(32, 32).t()
        big.mul_(2)
        torch.add(big, 1, out=big)
    assert watch.peak == 0


@pytest.mark.parametrize(("tokens", "logits_rows"), [(8, 1), (100, 5), (512, 512)])
def test_a_large_step_is_foreseen(tokens: int, logits_rows: int) -> None:
    def step(rows: int, sampled: int) -> None:
        hidden = torch.zeros(rows, 64)
        wide = torch.zeros(rows, 256)
        hidden = wide[:, :64] + hidden
        del wide
        logits = torch.zeros(sampled, 4096)
        torch.softmax(logits, -1)

    found = measure_step(step, tokens=tokens, logits_rows=logits_rows)
    assert found.activations == tokens * (64 + 256 + 64) * 4
    with PeakBytes() as watch:
        step(tokens, logits_rows)
    assert watch.peak <= found.step <= 1.5 * watch.peak + 2**20


def test_the_largest_step_of_an_engine_is_foreseen(tmp_path: Path) -> None:
    engine = make_engine(save_tiny_llama(tmp_path), max_num_batched_tokens=200, max_num_seqs=8)
    runner = engine.core.runner
    found = largest_step(runner, tokens=200, sampled=8, scores=True)
    requests = [Request(i, [1] * 25, SamplingParams()) for i in range(8)]
    blocks = [[1 + 2 * i, 2 + 2 * i] for i in range(8)]
    scheduled = [ScheduledRequest(r, 0, 25, True, [ids]) for r, ids in zip(requests, blocks, strict=True)]
    with PeakBytes() as watch:
        runner.execute(SchedulerOutput(scheduled, 200, [], []), whole=True)
    assert runner.program is not None
    needed = watch.peak + runner.program.buffer_bytes
    assert needed <= found.step <= 1.3 * needed
    with torch.inference_mode(), PeakBytes() as watch:
        for request in requests:
            request.scoring = Scoring(0, (1,) * 25, top_k=3)
        read_step(SchedulerOutput(scheduled, 200, [], []), runner.hidden, runner.head, 8)
    assert watch.peak <= found.scoring <= 1.1 * watch.peak
    assert largest_step(runner, tokens=200, sampled=8, scores=False).scoring == 0
    engine.core.close()


def test_scoring_has_a_line_of_its_own_where_tokens_are_scored(tmp_path: Path) -> None:
    engine = make_engine(save_tiny_llama(tmp_path))
    assert any(note.split()[0] == "scoring" for note in engine.notes)
    engine.core.close()
    engine = make_engine(tmp_path, task="embed")
    assert not any(note.split()[0] == "scoring" for note in engine.notes)
    engine.core.close()


def test_weights_in_a_mapped_file_are_told_from_others(tmp_path: Path) -> None:
    save_file({"weight": torch.ones(64, 64)}, tmp_path / "w.safetensors")
    model = torch.nn.Linear(64, 64, bias=True)
    assert (weight_bytes(model.modules()), mapped_bytes(model.modules())) == (64 * 65 * 4, 0)
    with safe_open(tmp_path / "w.safetensors", "pt") as file:
        model.weight = torch.nn.Parameter(file.get_tensor("weight"))
    assert (weight_bytes(model.modules()), mapped_bytes(model.modules())) == (64 * 65 * 4, 64 * 64 * 4)
    model.tied = model.weight  # type: ignore[assignment]
    assert weight_bytes(model.modules()) == 64 * 65 * 4
