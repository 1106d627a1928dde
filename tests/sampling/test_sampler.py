"""The sampler: each operation against a written-out formula, and independence of rows."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.sampling.noise import uniform
from batchgen.sampling.resolve import generation_defaults, resolve_sampling, unused_defaults
from batchgen.sampling.sampler import (
    SamplingRow,
    finite_rows,
    inverse_cdf,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    sample,
)
from batchgen.types import SamplingParams, UsageError

distributions = st.lists(st.integers(0, 50), min_size=1, max_size=12).filter(any)


def normalised(weights: list[int]) -> torch.Tensor:
    p = torch.tensor(weights, dtype=torch.float32)
    return p / p.sum()


@given(distributions, st.floats(0.01, 0.99))
def test_top_p_keeps_the_smallest_sufficient_set(weights: list[int], top_p: float) -> None:
    p = normalised(weights)
    ranked = sorted(range(len(p)), key=lambda i: (-float(p[i]), i))
    kept, mass = set(), 0.0
    for i in ranked:
        if kept and mass >= top_p * float(p.double().sum()):
            break
        kept.add(i)
        mass += float(p[i].double())
    result = keep_top_p(p, top_p)
    positive = {i for i in kept if p[i] > 0}
    assert set(torch.nonzero(result).flatten().tolist()) == positive
    assert torch.equal(result[sorted(positive)], p[sorted(positive)])


@given(distributions, st.integers(1, 12))
def test_top_k_keeps_the_likeliest_and_ties(weights: list[int], top_k: int) -> None:
    p = normalised(weights)
    border = sorted(p.tolist(), reverse=True)[: min(top_k, len(p))][-1]
    assert keep_top_k(p, top_k).tolist() == [x if x >= border else 0.0 for x in p.tolist()]


@given(distributions, st.floats(0, 1))
def test_min_p_is_relative_to_the_likeliest(weights: list[int], min_p: float) -> None:
    p = normalised(weights)
    expected = torch.where(p < min_p * p.max(), 0.0, p) if min_p > 0 else p
    assert torch.equal(keep_min_p(p, min_p), expected)


@given(distributions, st.floats(0, 1, exclude_max=True))
def test_inverse_cdf_never_draws_an_impossible_token(weights: list[int], noise: float) -> None:
    token = inverse_cdf(np.array(weights, dtype=np.float32), noise)
    assert weights[token] > 0
    below = sum(weights[:token])
    assert below <= noise * sum(weights) * (1 + 1e-12)


def test_draws_follow_the_distribution() -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    n, temperature = 20_000, 0.7
    params = SamplingParams(temperature=temperature)
    counts = np.zeros(4)
    for start in range(0, n, 1000):
        rows = [SamplingRow(params, row, 0, 5) for row in range(start, start + 1000)]
        for token in sample(logits.repeat(1000, 1), rows):
            counts[token] += 1
    exact = torch.softmax(logits / temperature, -1).numpy()
    chi2 = float((((counts - n * exact) ** 2) / (n * exact)).sum())
    assert chi2 < 21.1, "beyond the 0.9999 quantile with 3 degrees of freedom"


def test_noise_depends_on_every_key_and_on_nothing_else() -> None:
    base = uniform(3, 5, 0, 7)[0]
    assert uniform([3, 9], [5, 9], [0, 9], [7, 9])[0] == base
    others = [uniform(4, 5, 0, 7), uniform(3, 6, 0, 7), uniform(3, 5, 1, 7), uniform(3, 5, 0, 8)]
    assert len({base, *(o[0] for o in others)}) == 5
    assert 0 <= base < 1


def test_noise_is_pinned_for_ever() -> None:
    """A resumed job of an older version must draw the same: these values may never change."""
    drawn = uniform([0, 0, 1, 2**63 - 1], [0, 1, 0, 10**9], [0, 0, 0, 3], [0, 0, 0, 8191])
    assert [round(float(x), 12) for x in drawn] == PINNED_NOISE


PINNED_NOISE = [0.471410429668, 0.943640048734, 0.205264872632, 0.249903822406]


def test_noise_is_uniform() -> None:
    x = uniform(np.zeros(50_000, int), np.arange(50_000), np.zeros(50_000, int), np.full(50_000, 3))
    counts = np.histogram(x, bins=50, range=(0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 103, "beyond the 0.9999 quantile with 49 degrees of freedom"


@settings(max_examples=30)
@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.8]), st.sampled_from([1.0, 0.9]), st.integers(0, 5))
def test_a_row_draws_the_same_alone_and_among_others(seed: int, t: float, top_p: float, top_k: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(7, 64, generator=generator)
    params = SamplingParams(temperature=t, top_p=top_p, top_k=top_k, seed=seed)
    rows = [SamplingRow(params, i, 0, 3 + i) for i in range(7)]
    together = sample(logits.clone(), rows)
    alone = [sample(logits[i : i + 1].clone(), [rows[i]])[0] for i in range(7)]
    assert together == alone


def test_finite_rows() -> None:
    logits = torch.tensor([[1.0, 2.0], [math.nan, 0.0], [math.inf, 0.0], [0.0, -math.inf], [3e38, -3e38]])
    assert finite_rows(logits).tolist() == [True, False, False, False, True]
    assert finite_rows(torch.empty(0, 0)).tolist() == []
    assert finite_rows(torch.empty(0, 7)).tolist() == []


def test_null_keys_take_the_models_defaults_only_if_it_samples() -> None:
    assert generation_defaults({"do_sample": False, "temperature": 0.6}) == {}
    assert generation_defaults({"repetition_penalty": 1.1, "top_k": 5}) == {"repetition_penalty": 1.1}
    defaults = generation_defaults({"do_sample": True, "top_p": 0.9, "temperature": None})
    assert defaults == {"temperature": 1.0, "top_p": 0.9}
    resolved = resolve_sampling({"temperature": None, "top_p": 0.5, "max_tokens": 3}, defaults)
    assert (resolved.temperature, resolved.top_p, resolved.max_tokens) == (1.0, 0.5, 3)
    assert resolve_sampling({}, {}).greedy


def test_a_value_that_is_not_allowed_names_its_field() -> None:
    with pytest.raises(UsageError, match=r"sampling\.top_p: 1\.5 is not allowed; use a number above 0"):
        resolve_sampling({"top_p": 1.5}, {})


def test_settings_of_the_model_that_are_not_applied_are_named() -> None:
    assert unused_defaults({"typical_p": 0.9, "num_beams": 1, "suppress_tokens": []}) == ["typical_p"]
