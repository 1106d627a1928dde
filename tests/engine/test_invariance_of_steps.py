"""Steps of every size are checked for the bits of a token, with a runner that says where they differ."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from batchgen.core.scheduler import SchedulerOutput
from batchgen.engine.invariance import captured_steps_are_independent, find_step_multiple

TOKENS, SEQS, BLOCKS = 300, 40, 8
Wrong = Callable[[int, int], bool]
"""Whether a token has other bits in a step of so many rows (padded) and requests."""


class Runner:
    """Gives a token 1, and 2 where its bits are to be others."""

    def __init__(self, wrong: Wrong) -> None:
        self.wrong = wrong
        self.block_size, self.row_multiple = 16, 1
        self.layout = SimpleNamespace(groups=[0])
        self.steps: set[tuple[int, int]] = set()

    def execute(self, output: SchedulerOutput) -> torch.Tensor:
        assert output.total_tokens == sum(s.num_tokens for s in output.scheduled) <= TOKENS
        rows = -(-output.total_tokens // self.row_multiple) * self.row_multiple
        step = rows, len(output.scheduled)
        self.steps.add(step)
        logits = torch.ones(len(output.scheduled), 3)
        whole = output.scheduled[0].num_tokens > 1
        return logits + 1 if self.wrong(*step) and not whole else logits


def found(wrong: Wrong) -> tuple[int | None, Runner]:
    runner: Any = Runner(wrong)
    return find_step_multiple(runner, 250, BLOCKS, TOKENS, SEQS), runner


def test_every_size_is_tried_among_prompts_and_among_single_tokens() -> None:
    multiple, runner = found(lambda rows, requests: False)
    assert multiple == 1
    assert {rows for rows, requests in runner.steps if requests != rows} >= set(range(3, 257))
    assert {rows for rows, requests in runner.steps if requests == rows} == set(range(1, SEQS + 1))


@pytest.mark.parametrize(
    ("wrong", "multiple"),
    [
        (lambda rows, requests: rows == 17, 64),
        (lambda rows, requests: requests == rows == 17, 64),
        (lambda rows, requests: rows % 128 > 0, 128),
        (lambda rows, requests: rows == 256, None),
        (lambda rows, requests: requests > 1, None),
    ],
)
def test_a_size_with_other_bits_is_not_used(wrong: Wrong, multiple: int | None) -> None:
    assert found(wrong)[0] == multiple


def test_there_must_be_room() -> None:
    runner: Any = Runner(lambda rows, requests: False)
    assert find_step_multiple(runner, 250, 4, TOKENS, SEQS) is None
    assert not runner.steps


@pytest.mark.parametrize("requests", [1, 2, 3, 4, 5, 8, 9, 12, 13, 16, 17, 40])
def test_captured_steps_are_tried_full_and_with_the_fewest_rows(requests: int) -> None:
    sizes = [48, 16, 12, 8, 4, 2, 1]
    good: Any = Runner(lambda *_: False)
    bad: Any = Runner(lambda rows, found: rows == found == requests)
    assert captured_steps_are_independent(good, 250, TOKENS, SEQS, sizes)
    assert (requests, requests) in good.steps
    assert not captured_steps_are_independent(bad, 250, TOKENS, SEQS, sizes)
