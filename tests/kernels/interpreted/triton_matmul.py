"""Products of the deterministic mode, interpreted: right, and the same bits whatever other rows there are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_cases import EXAMPLES, FLOATS, TOLERANCE, mutated, quiet

from batchgen.engine import invariant_products
from batchgen_kernels.triton_kernels import matmul, matmul_kernel


def draw(seed: int, *sizes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=g).to(dtype) for size in sizes]


@settings(max_examples=EXAMPLES * len(FLOATS))
@given(
    st.integers(0, 200),
    st.sampled_from([1, 16, 31, 128, 129, 300]),
    st.sampled_from([1, 5, 64, 65, 200]),
    st.sampled_from(FLOATS),
    st.booleans(),
    st.none() | st.sampled_from([1.0, 0.22]),
    st.integers(0, 99),
)
def test_products(
    rows: int, width: int, outputs: int, dtype: torch.dtype, biased: bool, factor: float | None, seed: int
) -> None:
    x, weight, bias, out = draw(
        seed, (rows, width), (outputs, width + 3), (outputs,), (rows, outputs), dtype=dtype
    )
    weight = weight[:, :width] / width**0.5
    want = x.double() @ weight.double().t() + (bias.double() if biased else 0)
    if factor is not None:
        want = out.double() + factor * want
    got = matmul.multiply(
        x, weight, bias if biased else None, out=out if factor is not None else None, factor=factor
    )
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(got, want.to(dtype), rtol=tolerance, atol=tolerance)
    assert factor is None or got is out


@pytest.mark.parametrize("dtype", FLOATS)
def test_bits_of_a_row_do_not_depend_on_how_many_there_are(dtype: torch.dtype) -> None:
    x, weight = draw(0, (131, 200), (70, 200), dtype=dtype)
    whole = matmul.multiply(x, weight)
    for rows in (1, 2, 63, 64, 65, 130):
        assert torch.equal(matmul.multiply(x[:rows], weight), whole[:rows])
    for first in (1, 64, 100):
        assert torch.equal(matmul.multiply(x[first:], weight), whole[first:])


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match=r"weight of torch.float32 \(5, 8\) .* not torch.float32 \(5, 9\)"):
        matmul.multiply(torch.ones(2, 8), torch.ones(5, 9))
    with pytest.raises(ValueError, match=r"takes out of torch.float32 \(2, 5\)"):
        matmul.multiply(torch.ones(2, 8), torch.ones(5, 8), out=torch.ones(5, 2).t())


def test_linear_layers_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(invariant_products, "_has_kernel", lambda _: True)
    model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.ReLU(), torch.nn.Linear(30, 7, bias=False))
    (x,) = draw(0, (2, 9, 20))
    with torch.inference_mode():
        want = model(x)
        invariant_products.make_products_rowwise(model)
        got = model(x)
        assert torch.equal(model(x[1, 3:4]), got[1, 3:4])
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
    assert ["forward" in vars(layer) for layer in model] == [True, False, True]


MUTATIONS = {
    "the last features are left out": ("range(0, WIDTH, BLOCK_K)", "range(0, WIDTH - 1, BLOCK_K)"),
    "features beyond the last are multiplied": (
        "present = first + feature < WIDTH",
        "present = feature >= 0",
    ),
    "no bias": ("total += tl.load(bias_ptr", "total += 0 * tl.load(bias_ptr"),
    "the factor is left out": ("+ factor * total", "+ total"),
    "a sum replaces what was there": (
        "mask=mask, other=0).to(tl.float32) + factor",
        "mask=mask, other=0) * 0 + factor",
    ),
    "the first outputs for all": ("tl.program_id(1) * BLOCK_N + tl", "0 * BLOCK_N + tl"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mistake_is_noticed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = mutated(matmul_kernel, *MUTATIONS[name], tmp_path)
    monkeypatch.setattr(matmul, "multiply_kernel", module.multiply_kernel)
    with quiet(), pytest.raises(AssertionError):
        _all_once()


def _all_once() -> None:
    test_products.hypothesis.inner_test(5, 129, 65, torch.float32, True, 0.22, 0)


def test_the_kernel_itself_passes() -> None:
    _all_once()
