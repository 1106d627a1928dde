"""Tokens drawn by the kernel, interpreted, are those that the sampler draws on the host."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.runtime.errors import InterpreterError
from triton_cases import EXAMPLES, mutated, quiet

from batchgen.sampling import on_device
from batchgen.sampling.history import TokenHistory
from batchgen.sampling.noise import uniform
from batchgen.sampling.operations import AllowedTokens, LogitBias
from batchgen.sampling.sampler import SamplingRow, finite_rows, sample
from batchgen.types import RowError, SamplingParams
from batchgen_kernels.triton_kernels import sampling, sampling_kernel

ROWS, DRAWS = 8, 20


def draw(logits: torch.Tensor, rows: list[SamplingRow], source: list[int] | None = None) -> list[int]:
    order = list(range(len(rows))) if source is None else source
    every = [(row, row.sampling) for row in rows]
    numbers = [[s.seed, row.row, row.sample, row.position, s.top_k] for row, s in every]
    floats = [[s.temperature, s.min_p, s.top_p] for _, s in every]
    with quiet():
        found = sampling.draw(
            logits,
            torch.tensor(order, dtype=torch.int64),
            torch.tensor(numbers, dtype=torch.int64).view(-1, 5),
            torch.tensor(floats, dtype=torch.float64).view(-1, 3),
        )
    return found.tolist()


def random_logits(kind: str, count: int, vocab: int, g: torch.Generator) -> torch.Tensor:
    logits = torch.randn(count, vocab, generator=g) * torch.rand(count, 1, generator=g) * 8
    if kind == "ties":
        return logits.round()
    if kind == "few ties":
        return (logits * 8).round() / 8
    if kind == "equal":
        return torch.full_like(logits, 1.5)
    if kind == "a peak behind equal ones":
        logits = torch.zeros_like(logits)
        logits[:, vocab * 3 // 4] = 3
        return logits
    if kind == "far apart":
        return logits * 40
    return logits


def random_rows(count: int, vocab: int, g: np.random.Generator) -> list[SamplingRow]:
    rows = []
    for i in range(count):
        params = SamplingParams(
            temperature=float(g.choice([0.0, 0.3, 0.7, 1.0, 1.7])),
            top_k=int(g.choice([0, 0, 1, 2, 5, 40, vocab - 1, vocab, 2 * vocab])),
            top_p=float(g.choice([1.0, 1.0, 0.95, 0.9, 0.5, 0.1, 1e-6])),
            min_p=float(g.choice([0.0, 0.0, 0.01, 0.2, 1.0])),
            seed=int(g.integers(0, 2**62)),
        )
        rows.append(SamplingRow(params, i, int(g.integers(0, 4)), int(g.integers(0, 9999))))
    return rows


@settings(max_examples=EXAMPLES)
@given(
    st.sampled_from(["random", "ties", "few ties", "equal", "far apart"]),
    st.sampled_from([1, 2, 127, 128, 129, 300]),
    st.sampled_from([128, 4096]),
    st.integers(0, 2**31),
)
def test_tokens_are_those_of_the_host(kind: str, vocab: int, block: int, seed: int) -> None:
    logits = random_logits(kind, ROWS, vocab, torch.Generator().manual_seed(seed))
    rows = random_rows(ROWS, vocab, np.random.default_rng(seed))
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(sampling, "BLOCK", block)
        assert draw(logits, rows) == sample(logits, rows)


@pytest.mark.parametrize(
    ("kind", "cut"),
    [
        ("random", {"top_k": 2}),
        ("equal", {"top_p": 0.6}),
        ("a peak behind equal ones", {"top_p": 0.65}),
        ("few ties", {"top_p": 0.7, "top_k": 30}),
    ],
)
def test_one_cut_in_many_draws(kind: str, cut: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "BLOCK", 128)
    logits = random_logits(kind, 1, 300, torch.Generator().manual_seed(4))
    params = SamplingParams(temperature=1.0, seed=3, **cut)  # type: ignore[arg-type]
    rows = [SamplingRow(params, 0, 0, i) for i in range(DRAWS)]
    assert draw(logits, rows, [0] * DRAWS) == sample(logits.expand(DRAWS, -1), rows)


def test_the_engine_s_draw_is_the_kernel_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows with operations may bar tokens, or all of them, and rows that are not finite have no token."""
    monkeypatch.setattr(on_device, "_has_kernel", lambda _: True)
    logits = torch.randn(8, 200)
    logits[3, 5] = logits[6, 7] = torch.nan
    rows = random_rows(8, 200, np.random.default_rng(6))
    barred = LogitBias({5: -torch.inf})
    of_rows = {
        1: [LogitBias({9: 50.0})],
        2: [AllowedTokens([4, 7])],
        6: [barred],
        7: [AllowedTokens([5]), barred],
    }
    for i, operations in of_rows.items():
        rows[i] = rows[i]._replace(operations=tuple(operations), history=TokenHistory([1], []))
    with quiet():
        drawn = on_device.draw(logits, rows, lambda arrays: [torch.from_numpy(a) for a in arrays])
    well = [0, 1, 2, 4, 5, 7]
    want = dict(zip(well, sample(logits[well], [rows[i] for i in well]), strict=True))
    assert want[1] == 9
    assert isinstance(want[7], RowError)
    assert drawn.result() == [want.get(i) for i in range(8)]


def test_rows_that_are_not_finite_say_so() -> None:
    logits = torch.randn(5, 200)
    logits[1, 7], logits[2, 190], logits[3, :], logits[4, 66] = torch.nan, torch.inf, -torch.inf, -torch.inf
    rows = random_rows(5, 200, np.random.default_rng(0))
    assert [token >= 0 for token in draw(logits, rows)] == finite_rows(logits).tolist()


def test_several_tokens_of_one_row_and_rows_apart() -> None:
    logits = torch.randn(3, 128)[:, :100]
    rows = random_rows(7, 100, np.random.default_rng(1))
    source = [2, 0, 0, 1, 2, 2, 0]
    assert draw(logits, rows, source) == sample(logits[source], rows)
    assert draw(logits, [], []) == []


def test_logits_in_16_bits() -> None:
    logits = torch.randn(9, 300).half()
    rows = random_rows(9, 300, np.random.default_rng(2))
    assert draw(logits, rows) == sample(logits.float(), rows)


def test_noise_is_that_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """With equal logits a token is its noise, cut to the vocabulary."""
    g = np.random.default_rng(3)
    numbers = [tuple(int(n) for n in g.integers(0, 2**62, 4)) for _ in range(50)] + [(0, 0, 0, 0)]
    rows = [SamplingRow(SamplingParams(temperature=1.0, seed=a), b, c, d) for a, b, c, d in numbers]
    want = (uniform(*np.array(numbers).T) * 4096).astype(int).tolist()
    assert draw(torch.zeros(len(rows), 4096), rows) == want


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"settings of 2 rows have shapes \(2, 4\) and \(2, 3\)"):
        sampling.draw(torch.zeros(2, 9), torch.arange(2), torch.zeros(2, 4), torch.zeros(2, 3))
    with pytest.raises(ValueError, match=r"shape \(2, 9\) are no rows"):
        sampling.draw(torch.zeros(9, 2).t(), torch.arange(2), torch.zeros(2, 5), torch.zeros(2, 3))


MUTATIONS = {
    "the last of the likeliest": ("best == largest, place, vocab", "best < largest, place, vocab"),
    "the noise of another position": ("for i in range(4)", "for i in range(3)"),
    "the temperature is left out": ("tl.exp(tl.div_rn(x, temperature) - largest)", "tl.exp(x - largest)"),
    "min-p keeps all": ("tl.maximum(min_p.to(tl.int32, bitcast=True), 1)", "1 + 0 * top_k.to(tl.int32)"),
    "top-k keeps one more": ("reached = count >= wanted", "reached = count > wanted"),
    "top-p keeps one less": ("reached = mass >= wanted", "reached = mass * 0.9 >= wanted"),
    "all equal ones are kept": ("tl.ceil((wanted - above) / tie)", "1e9 + 0 * above"),
    "the last of equal ones are kept": ("is_tie.to(tl.int32), 0) <= ties", "is_tie.to(tl.int32), 0) >= ties"),
    "ties of blocks before are forgotten": ("ties = ties - tl.sum", "ties = ties - 0 * tl.sum"),
    "mass of blocks before is forgotten": (
        "0.0).to(tl.float64), 0) + mass_before",
        "0.0).to(tl.float64), 0)",
    ),
    "NaN is not seen": ("if sick > 0", "if sick > vocab"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mistake_is_noticed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = mutated(sampling_kernel, *MUTATIONS[name], tmp_path)
    monkeypatch.setattr(sampling, "draw_kernel", module.draw_kernel)
    # The interpreter itself may warn of NaN.
    with pytest.raises((AssertionError, InterpreterError)):
        _all_once(monkeypatch)


def _all_once(monkeypatch: pytest.MonkeyPatch) -> None:
    test_tokens_are_those_of_the_host.hypothesis.inner_test("ties", 300, 128, 5)
    test_one_cut_in_many_draws("random", {"top_k": 2}, monkeypatch)
    test_one_cut_in_many_draws("a peak behind equal ones", {"top_p": 0.65}, monkeypatch)
    test_rows_that_are_not_finite_say_so()


def test_the_kernel_itself_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    _all_once(monkeypatch)
