"""Products in int8: exact where they can be, close elsewhere, the same for a row whatever shares the call."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from batchgen_kernels.cpu.linear import Linear, feature_sizes, pack, pack_gated, scaled, scaled_gated
from batchgen_kernels.cpu.matmul import ROWS, Epilogue
from batchgen_kernels.cpu.quantised_weights import quantise_weights, quantised
from batchgen_kernels.cpu.records import GROUP, LARGEST, TINY

MANY = 3 * ROWS + 1


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def product(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Linear:
    return Linear(quantised(pack(weight, bias)))


def hadamard() -> torch.Tensor:
    """Sylvester's matrix of order GROUP; its square is GROUP times the identity."""
    matrix = torch.ones(1, 1)
    while len(matrix) < GROUP:
        matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
    return matrix


def turned(x: torch.Tensor) -> torch.Tensor:
    """`(rows, groups, GROUP)` float64."""
    padded = F.pad(x.double(), (0, -x.shape[1] % GROUP))
    return padded.view(len(x), -1, GROUP) @ hadamard().double()


def known_numbers(seed: int, rows: int, groups: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows in float32, and the whole numbers that they must become, with a scale of exactly 1."""
    generator = torch.Generator().manual_seed(seed)
    q = torch.randint(-LARGEST, LARGEST + 1, (rows, groups, GROUP), generator=generator)
    q[:, :, seed % GROUP] = LARGEST
    return (q.float() @ hadamard() / GROUP).flatten(1), q


@given(
    rows=st.integers(1, MANY),
    groups=st.integers(1, 5),
    outputs=st.integers(1, 100),
    threads=st.integers(1, 3),
    seed=st.integers(0, 1000),
)
def test_sums_are_exact(rows: int, groups: int, outputs: int, threads: int, seed: int) -> None:
    torch.set_num_threads(threads)
    x, of_x = known_numbers(seed, rows, groups)
    weight, of_weight = known_numbers(seed + 1, outputs, groups)
    exact = of_x.flatten(1) @ of_weight.flatten(1).T
    assert exact.abs().max() < 2**24
    assert torch.equal(product(weight)(x) * GROUP, exact.float())


@given(st.integers(1, 20), st.integers(1, 200), st.integers(0, 1000))
def test_what_numbers_become(rows: int, features: int, seed: int) -> None:
    """Whole numbers, so that turning them is exact."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-999, 1000, (rows, features), generator=generator).float()
    q, scales = quantise_weights(x)
    exact = turned(x)
    largest = exact.abs().amax(-1).float()
    assert torch.equal(scales, largest / LARGEST / GROUP)
    factors = torch.where(largest > 0, LARGEST / largest, 0.0)
    assert torch.equal(q.double(), (exact * factors.double()[:, :, None]).round())


@given(
    rows=st.integers(1, MANY),
    features=st.integers(1, 200),
    outputs=st.integers(1, 100),
    has_bias=st.booleans(),
)
def test_is_close_to_the_product(rows: int, features: int, outputs: int, has_bias: bool) -> None:
    weight, x = random(0, outputs, features), random(1, rows, features)
    bias = random(2, outputs) if has_bias else None
    y = product(weight, bias)(x)
    assert y.shape == (rows, outputs)
    wanted = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    lengths = x.double().norm(dim=1)[:, None] * weight.double().norm(dim=1)
    assert ((y.double() - wanted).abs() <= 0.05 * lengths).all()


def test_an_outlier_costs_little() -> None:
    weight, x = random(0, 96, 256), random(1, 20, 256)
    x[:, 77] *= 100
    y, wanted = product(weight)(x), x @ weight.T
    others = (wanted - x[:, 77, None] * weight[:, 77]).std()
    assert (y - wanted).std() < 0.1 * others


@pytest.mark.parametrize("features", [1, 3, 16, 63, 65, 77, 190])
def test_widths_that_are_no_whole_groups_are_filled_up(features: int) -> None:
    weight, x, missing = random(0, 70, features), random(1, 9, features), -features % GROUP
    assert torch.equal(product(weight)(x), product(F.pad(weight, (0, missing)))(F.pad(x, (0, missing))))
    beyond = torch.full((9, 300), float("nan"))
    beyond[:, :features] = x
    assert torch.equal(product(weight)(beyond[:, :features]), product(weight)(x))


@pytest.mark.parametrize(
    ("epilogue", "activation"),
    [(Epilogue.SILU, F.silu), (Epilogue.GELU_TANH, lambda x: F.gelu(x, approximate="tanh"))],
    ids=["silu", "gelu_tanh"],
)
@pytest.mark.parametrize("outputs", [16, 50, 96])
def test_gated_unit(epilogue: Epilogue, activation, outputs: int) -> None:
    gate, up, x = random(0, outputs, 140), random(1, outputs, 140), 0.3 * random(2, MANY, 140)
    y = Linear(quantised(pack_gated(gate, up, epilogue)))(x)
    assert torch.allclose(y, activation(product(gate)(x)) * product(up)(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("outputs", [32, 50])
def test_sizes_of_the_weights_of_features(outputs: int) -> None:
    weight = random(0, outputs, 40)
    sizes, wanted = feature_sizes(pack(weight)), weight.square().mean(dim=0).sqrt()
    assert torch.allclose(sizes / sizes.mean(), wanted / wanted.mean())


def powers_of_two(seed: int, count: int) -> torch.Tensor:
    return torch.exp2(torch.randint(-6, 7, (count,), generator=torch.Generator().manual_seed(seed)).float())


@pytest.mark.parametrize("features", [64, 77, 190])
def test_balance_is_part_of_the_product(features: int) -> None:
    weight, x, balance = random(0, 70, features), random(1, 9, features), powers_of_two(2, features)
    y = Linear(quantised(pack(weight), balance))(x)
    assert torch.equal(y, product(weight / balance)(x * balance))


def test_balance_lets_an_outlier_with_small_weights_cost_less() -> None:
    weight, x, balance = random(0, 96, 256), random(1, 40, 256), torch.ones(256)
    weight[:, 77] /= 256
    x[:, 77] *= 256
    balance[77] = 1 / 256
    exact = x.double() @ weight.double().T
    errors = [(Linear(quantised(pack(weight), b))(x) - exact).std() for b in (None, balance)]
    assert errors[1] < 0.3 * errors[0]


@pytest.mark.parametrize("epilogue", [Epilogue.SILU, Epilogue.GELU_TANH], ids=["silu", "gelu_tanh"])
def test_balanced_weights_change_no_bit_in_float32(epilogue: Epilogue) -> None:
    x, before, behind = random(0, MANY, 140), powers_of_two(1, 140), powers_of_two(2, 50)
    weights = pack_gated(random(3, 50, 140), random(4, 50, 140), epilogue)
    y = Linear(scaled_gated(scaled(weights, 1 / before), behind))(x * before)
    assert torch.equal(y, Linear(weights)(x) * behind)


@pytest.mark.parametrize("features", [33, 576])
def test_a_row_has_the_same_bits_in_every_call(features: int) -> None:
    linear = product(random(0, 200, features), random(1, 200))
    x = random(2, MANY, features)
    torch.set_num_threads(1)
    whole = linear(x)
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        for rows in (*range(1, ROWS + 2), MANY):
            for first in {0, 1, MANY - rows}:
                assert torch.equal(linear(x[first : first + rows]), whole[first : first + rows])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), 3e38], ids=str)
@pytest.mark.parametrize("place", [0, 66, 99])
def test_what_is_not_finite_spoils_its_row_alone(bad: float, place: int) -> None:
    """So does what is no longer finite once it is turned."""
    linear, x = product(random(0, 70, 100), random(1, 70)), random(2, 9, 100)
    good = linear(x)
    x[4, place] = bad
    x[4, place // GROUP * GROUP + 1] = bad
    y = linear(x)
    assert not y[4].isfinite().any()
    others = torch.arange(9) != 4
    assert torch.equal(y[others], good[others])


def test_weights_that_are_not_finite_spoil_their_output_alone() -> None:
    weight, x = random(0, 70, 100), random(1, 9, 100)
    good = product(weight)(x)
    weight[3, 80] = float("nan")
    weight[69, 5] = float("inf")
    y = product(weight)(x)
    bad = torch.zeros(70, dtype=torch.bool)
    bad[[3, 69]] = True
    assert not y[:, bad].isfinite().any()
    assert torch.equal(y[:, ~bad], good[:, ~bad])


def test_rows_of_nothing_and_no_rows() -> None:
    bias = random(1, 70)
    linear = product(random(0, 70, 100), bias)
    x = random(2, 3, 100)
    x[1] = 0
    x[2] = TINY / 1000
    y = linear(x)
    assert torch.equal(y[1], bias)
    assert torch.equal(y[2], bias)
    assert linear(x[:0]).shape == (0, 70)
    assert torch.equal(product(torch.zeros(70, 100), bias)(x), bias.expand(3, 70))


def test_rows_that_lie_apart() -> None:
    weight, x = random(0, 40, 16), random(1, 5, 3, 32)
    linear = product(weight)
    assert torch.equal(linear(x[..., ::2]), linear(x[..., ::2].contiguous()))
    assert torch.equal(linear(x[:, 1, 16:]), linear(x[:, 1, 16:].contiguous()))
    assert linear(x[..., :16]).shape == (5, 3, 40)
