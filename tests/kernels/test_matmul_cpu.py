"""Products with packed weights: right, and the same for a row whatever shares the call."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from batchgen_kernels.cpu.linear import Linear, cut, pack, pack_gated
from batchgen_kernels.cpu.matmul import ROWS, Epilogue

MANY = 3 * ROWS + 1


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@given(
    rows=st.integers(1, MANY),
    features=st.integers(1, 70),
    outputs=st.integers(1, 100),
    has_bias=st.booleans(),
    threads=st.integers(1, 3),
)
def test_equals_the_product(rows: int, features: int, outputs: int, has_bias: bool, threads: int) -> None:
    torch.set_num_threads(threads)
    weight, x = random(0, outputs, features), random(1, rows, features)
    bias = random(2, outputs) if has_bias else None
    y = Linear(pack(weight, bias))(x)
    wanted = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    assert y.shape == (rows, outputs)
    assert torch.allclose(y.double(), wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("epilogue", "activation"),
    [(Epilogue.SILU, F.silu), (Epilogue.GELU_TANH, lambda x: F.gelu(x, approximate="tanh"))],
    ids=["silu", "gelu_tanh"],
)
@pytest.mark.parametrize("outputs", [16, 50, 96])
def test_gated_unit(epilogue: Epilogue, activation, outputs: int) -> None:
    gate, up, x = random(0, outputs, 40), random(1, outputs, 40), 3 * random(2, MANY, 40)
    y = Linear(pack_gated(gate, up, epilogue))(x)
    wanted = activation(F.linear(x.double(), gate.double())) * F.linear(x.double(), up.double())
    assert y.shape == wanted.shape
    assert torch.allclose(y.double(), wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("epilogue", [Epilogue.SILU, Epilogue.GELU_TANH], ids=str)
def test_activations_far_from_zero(epilogue: Epilogue) -> None:
    x = torch.tensor([[1e4], [-1e4], [0.0], [float("nan")]])
    one = torch.ones(1, 1)
    y = Linear(pack_gated(one, torch.zeros(1, 1), epilogue))(x)[:, 0]
    assert y[:3].tolist() == [0.0, 0.0, 0.0]
    assert y[3].isnan()
    gate = Linear(pack_gated(one, one, epilogue))(x[:3])[:, 0]
    assert gate.tolist() == [1e8, 0.0, 0.0]


@pytest.mark.parametrize("features", [33, 576])
def test_a_row_has_the_same_bits_in_every_call(features: int) -> None:
    linear = Linear(pack(random(0, 200, features), random(1, 200)))
    x = random(2, MANY, features)
    torch.set_num_threads(1)
    whole = linear(x)
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        for rows in (*range(1, ROWS + 2), MANY):
            for first in {0, 1, MANY - rows}:
                assert torch.equal(linear(x[first : first + rows]), whole[first : first + rows])


def test_rows_that_lie_apart() -> None:
    weight, x = random(0, 40, 16), random(1, 5, 3, 32)
    linear = Linear(pack(weight))
    assert torch.equal(linear(x[..., ::2]), linear(x[..., ::2].contiguous()))
    assert torch.equal(linear(x[:, 1, 16:]), linear(x[:, 1, 16:].contiguous()))
    assert linear(x[..., :16]).shape == (5, 3, 40)
    assert linear(x[:0, 0, :16]).shape == (0, 40)


@pytest.mark.parametrize(
    ("x", "named"),
    [(torch.zeros(2, 15), r"16 input features.*\(2, 15\)"), (torch.zeros(2, 16).double(), "float64")],
    ids=["width", "dtype"],
)
def test_what_does_not_fit_is_refused(x: torch.Tensor, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Linear(pack(torch.zeros(4, 16)))(x)


@given(st.integers(1, 400), st.integers(1, 5000), st.integers(1, 40))
def test_chunks_cover_everything_once(panels: int, rows: int, threads: int) -> None:
    weights = pack(torch.zeros(1, 1))
    weights = type(weights)(torch.zeros(1, 1, 1).expand(panels, 64, 32), None, panels * 32)
    per_chunk, rows_per_chunk, chunks = cut(weights, rows, threads)
    assert chunks == -(-panels // per_chunk) * -(-rows // rows_per_chunk)
