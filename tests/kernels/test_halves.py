"""float32 in 16 bits: the same bits as torch's conversion."""

from __future__ import annotations

import pytest

pytest.importorskip("numba")

import torch
from numba import njit

from batchgen_kernels.cpu.halves import narrow
from batchgen_kernels.cpu.kernel import STORAGE
from batchgen_kernels.storage import stored

DTYPES = [torch.float16, torch.bfloat16]


def narrowed(numbers: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    storage = STORAGE[dtype]

    @njit
    def run(address, count):  # type: ignore[no-untyped-def]
        narrow(address, count, storage)

    bits = numbers.clone()
    run(bits.data_ptr(), len(bits))
    return bits.view(dtype)[: len(numbers)]


def assert_same(got: torch.Tensor, want: torch.Tensor) -> None:
    assert torch.equal(got.isnan(), want.isnan())
    # Zeros have signs.
    assert torch.equal(got.view(torch.int16)[~want.isnan()], want.view(torch.int16)[~want.isnan()])


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_upper_half_with_lower_halves_about_the_middle(dtype: torch.dtype) -> None:
    """All exponents, all that is exact in bfloat16, what lies just beside a tie and at it."""
    upper = torch.arange(-(2**15), 2**15, dtype=torch.int32) << 16
    lower = torch.tensor(
        [0, 1, 0xFFF, 0x1000, 0x1001, 0x2FFF, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xF000, 0xFFFF]
    )
    numbers = (upper[:, None] | lower.int()).flatten().view(torch.float32)
    assert_same(narrowed(numbers, dtype), stored(numbers, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [*range(1, 34), 100_003])
def test_any_number_of_numbers(dtype: torch.dtype, count: int) -> None:
    bits = torch.randint(-(2**31), 2**31, (count,), generator=torch.Generator().manual_seed(count))
    numbers = bits.int().view(torch.float32)
    assert_same(narrowed(numbers, dtype), stored(numbers, dtype))


def test_what_lies_behind_is_left_alone() -> None:
    storage = STORAGE[torch.float16]

    @njit
    def run(address, count):  # type: ignore[no-untyped-def]
        narrow(address, count, storage)

    numbers = torch.ones(40)
    run(numbers.data_ptr(), 20)
    assert torch.equal(numbers[10:], torch.ones(30))
