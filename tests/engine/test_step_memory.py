"""What a step needs besides weights and cache: counted to the byte, and foreseen from small steps."""

from __future__ import annotations

import pytest
import torch

from batchgen.engine.step_memory import PeakBytes, measure_step

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
    assert watch.peak <= found.total <= 1.5 * watch.peak + 2**20
