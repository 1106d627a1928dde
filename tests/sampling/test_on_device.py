"""Tokens drawn where the logits are: those that the host draws, row by row."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch

from batchgen.sampling import on_device
from batchgen.sampling.history import TokenHistory
from batchgen.sampling.on_device import draw
from batchgen.sampling.operations import (
    AllowedTokens,
    BadWords,
    Custom,
    LogitBias,
    MinTokens,
    Operation,
    Penalties,
)
from batchgen.sampling.sampler import SamplingRow, sample
from batchgen.types import RowError, SamplingParams

WIDTH = 97


def transfer(arrays: Sequence[npt.NDArray[np.generic]]) -> list[torch.Tensor]:
    return [torch.from_numpy(array) for array in arrays]


def logits(rows: int, seed: int = 0, coarse: bool = False) -> torch.Tensor:
    drawn = 3 * torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))
    # As bfloat16 gives them: many are equal.
    return drawn.to(torch.bfloat16).float().round() if coarse else drawn


def settings() -> list[SamplingParams]:
    every = itertools.product((0.0, 0.5, 1.3), (0.0, 0.05), (0, 1, 7, 500), (1.0, 0.9, 0.3, 1e-6))
    return [SamplingParams(temperature=t, min_p=m, top_k=k, top_p=p, seed=3) for t, m, k, p in every]


def rows_of(kinds: list[SamplingParams]) -> list[SamplingRow]:
    return [SamplingRow(kind, 10 + i, i % 3, 40 + i) for i, kind in enumerate(kinds)]


def test_as_on_the_host_with_every_setting() -> None:
    kinds = settings()
    for seed, coarse in itertools.product(range(10), (False, True)):
        given = logits(len(kinds), seed, coarse)
        assert draw(given, rows_of(kinds), transfer).result() == sample(given, rows_of(kinds))


def test_pieces_of_few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = settings()
    given = logits(2 * len(kinds))
    rows = rows_of(kinds * 2)
    rows[3::5] = [row._replace(operations=MORE, history=TokenHistory([1, 2], [3])) for row in rows[3::5]]
    whole = draw(given, rows, transfer).result()
    monkeypatch.setattr(on_device, "_AT_ONCE", 5 * WIDTH)
    assert draw(given, rows, transfer).result() == whole


def test_noise_at_both_ends_and_mass_at_one() -> None:
    certain = torch.full((1, WIDTH), -1e9)
    certain[0, 41] = 0.0
    for noise in (0.0, 0.5, 1 - 2.0**-53):
        found = on_device._inverse_cdf(torch.softmax(certain, -1), torch.tensor([[noise]]).double())
        assert found.tolist() == [41]
    even = torch.full((2, 4), 0.25)
    assert on_device._inverse_cdf(even, torch.tensor([[0.0], [1 - 2.0**-53]]).double()).tolist() == [0, 3]


def test_rows_that_are_not_finite_have_no_token_and_others_do() -> None:
    given = logits(5)
    given[1, 3], given[3, 90] = float("nan"), float("-inf")
    kinds = [
        SamplingParams(),
        SamplingParams(),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.0),
    ]
    bias = SamplingParams(logit_bias={5: 100.0})
    rows = [*rows_of(kinds), SamplingRow(bias, 9, 0, 3, (LogitBias({5: 100.0}),), TokenHistory([1], []))]
    found = draw(given, rows, transfer).result()
    assert [found[1], found[3], found[4]] == [None, None, 5]
    assert [found[0], found[2]] == [sample(given[i : i + 1], [rows[i]])[0] for i in (0, 2)]


WORDS = {(5,), (6, 7), (8, 9, 10)}
OPERATIONS: tuple[Operation, ...] = (
    AllowedTokens(list(range(0, WIDTH, 2))),
    BadWords(sorted(WORDS)),
    MinTokens(3, torch.tensor([2, 40])),
    LogitBias({7: 2.0, 41: -3.0, 60: 100.0}),
    Penalties(1.3, 0.0, 0.0),
)
MORE: tuple[Operation, ...] = (LogitBias({1: 0.3}), Penalties(1.0, 0.7, 0.4))


def test_operations_are_those_of_the_host() -> None:
    """Each alone, all together in their order, and rows that have none among them."""
    generator = random.Random(5)
    kinds = [(), *([operation] for operation in OPERATIONS), MORE, OPERATIONS]
    sampled = SamplingParams(temperature=1.0, top_p=0.9, seed=2)
    for seed, coarse in itertools.product(range(5), (False, True)):
        rows = []
        for i in range(40):
            written = [generator.randrange(WIDTH) for _ in range(generator.randrange(6))]
            prompt = [generator.randrange(WIDTH) for _ in range(generator.randrange(1, 30))]
            tail = generator.choice([[], [6], [8, 9], [9]])
            history = TokenHistory(prompt, written + tail)
            settings = SamplingParams() if i % 2 else sampled
            rows.append(SamplingRow(settings, i, 0, 9, tuple(kinds[i % len(kinds)]), history))
        given = logits(len(rows), seed, coarse)
        before = given.clone()
        assert draw(given, rows, transfer).result() == sample(given, rows)
        assert torch.equal(given, before), "other samples of a row are drawn from the same logits"


def test_a_row_that_may_draw_nothing_says_so_and_others_go_on() -> None:
    given = logits(3)
    given[1, 4] = float("nan")
    barred = (AllowedTokens([5]), BadWords([(5,)]))
    rows = [SamplingRow(SamplingParams(), i, 0, 3, barred, TokenHistory([1], [])) for i in range(2)]
    rows.append(SamplingRow(SamplingParams(), 2, 0, 3, MORE, TokenHistory([1], [])))
    found = draw(given, rows, transfer).result()
    assert found == [sample(given[:1], rows[:1])[0], None, sample(given[2:], rows[2:])[0]]
    assert isinstance(found[0], RowError)


def test_functions_of_the_callers_are_called_on_the_host() -> None:
    given = logits(4)
    given[2, 0] = float("inf")
    custom = (LogitBias({7: 2.0}), Custom(lambda _, scores: scores.roll(1), 0))
    rows = [SamplingRow(SamplingParams(), i, 0, 3, custom, TokenHistory([1], [])) for i in range(4)]
    found = draw(given, rows, transfer).result()
    assert found[2] is None
    assert [found[i] for i in (0, 1, 3)] == sample(given[[0, 1, 3]], [rows[i] for i in (0, 1, 3)])


def test_forks_share_a_row_of_logits() -> None:
    given = logits(2)
    kind = SamplingParams(temperature=1.0, n=4, seed=8)
    source = [0, 0, 0, 0, 1, 1, 1, 1]
    rows = [SamplingRow(kind, row, i % 4, 7) for i, row in enumerate(source)]
    assert draw(given, rows, transfer, source).result() == sample(given[source], rows)
