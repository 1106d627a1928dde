"""The kernel that stores keys and values, interpreted: to the bit what the reference stores."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_cases import CPU, EXAMPLES, layer, mutated, quiet

from batchgen_kernels import AttentionMetadata
from batchgen_kernels.backend import allocate
from batchgen_kernels.reference import ReferenceBackend
from batchgen_kernels.triton_kernels import TritonBackend, backend, write_kernel
from batchgen_kernels.triton_kernels.backend import bytes_of

PAIRS = [
    (torch.float32, torch.float32),
    (torch.float32, torch.float16),
    (torch.float32, torch.int8),
    (torch.float32, torch.float8_e4m3fn),
    (torch.float16, torch.float16),
    (torch.float16, torch.int8),
    (torch.float16, torch.float8_e4m3fn),
]


@settings(max_examples=EXAMPLES * 2)
@given(
    st.sampled_from(PAIRS),
    st.sampled_from([(16, 16), (80, 20), (24, 96), (192, 128), (256, 256)]),
    st.integers(1, 3),
    st.sampled_from([16, 32, 64, 128]),
    st.integers(1, 40),
    st.sampled_from([0.0, 1e-45, 1e-41, 1e-30, 1e-6, 1.0, 1e4, 3e38]),
    st.integers(0, 1000),
)
def test_what_is_stored_is_what_the_reference_stores(
    dtypes: tuple[torch.dtype, torch.dtype],
    widths: tuple[int, int],
    heads: int,
    block_size: int,
    rows: int,
    size: float,
    seed: int,
) -> None:
    """From vectors of zeros to those that overflow, rows without a place among them."""
    dtype, kv_dtype = dtypes
    g = torch.Generator().manual_seed(seed)
    key = (torch.randn(rows, heads, widths[0], generator=g).clamp(-1, 1) * size).to(dtype)
    value = torch.randn(rows, heads, widths[1], generator=g).to(dtype)
    value[rows // 2] = 0
    value[rows // 3, 0, 2] = float("nan")
    value[rows // 4, 0, 1] = float("-inf")
    num_blocks = 2 + -(-rows // block_size)
    slots = torch.randperm(num_blocks * block_size, generator=g)[:rows]
    slots[torch.rand(rows, generator=g) < 0.2] = -1
    meta = AttentionMetadata(
        query_start_loc=torch.zeros(1, dtype=torch.int32),
        seq_lens=torch.zeros(0, dtype=torch.int32),
        block_table=torch.zeros(0, 0, dtype=torch.int32),
        slot_mapping=slots,
        num_tokens=0,
        block_size=block_size,
        max_query_len=0,
        max_seq_len=0,
    )
    spec = layer(heads, heads, *widths)
    kept = []
    for target in (TritonBackend(), ReferenceBackend()):
        kv = allocate(target, spec, num_blocks, block_size, CPU, kv_dtype)
        for tensor in kv.tensors:
            tensor.fill_(7)
        with quiet():
            target.write(kv, key, value, meta)
        kept.append([bytes_of(tensor) for tensor in kv.tensors])
    for got, want in zip(*kept, strict=True):
        torch.testing.assert_close(got.transpose(1, 2), want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kv_dtype", [torch.float16, torch.float32])
def test_every_number_of_16_bits_is_stored_exactly(kv_dtype: torch.dtype) -> None:
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.float16).view(-1, 1, 256)
    spec = layer(1, 1, 256)
    kv = allocate(TritonBackend(), spec, 17, 16, CPU, kv_dtype)
    meta = AttentionMetadata.build([256], [256], [list(range(1, 17))], 16)
    with quiet():
        TritonBackend().write(kv, numbers, numbers, meta)
    want = numbers.masked_fill(~numbers.isfinite(), float("nan")).to(kv_dtype)
    got = kv.key[1:, 0].reshape(-1, 1, 256)
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_every_float32_between_is_rounded_as_torch_rounds_it() -> None:
    """Of fp8: its numbers, what lies halfway between two, and the next floats around."""
    numbers = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = numbers[numbers.isfinite()].unique()
    halves = (numbers[1:] + numbers[:-1]) / 2
    nearby = [torch.nextafter(halves, torch.tensor(end)) for end in (-torch.inf, torch.inf)]
    every = torch.cat([numbers, halves, *nearby, torch.zeros(1024)])[:1024].view(-1, 1, 16)
    every[:, :, -1] = 448
    rows = len(every)
    kv = allocate(TritonBackend(), layer(1, 1, 16), 1 + rows // 16, 16, CPU, torch.float8_e4m3fn)
    meta = AttentionMetadata.build([rows], [rows], [list(range(1, 1 + rows // 16))], 16)
    TritonBackend().write(kv, every, every, meta)
    want = every.to(torch.float8_e4m3fn).view(torch.uint8)
    assert torch.equal(bytes_of(kv.key[1:]).reshape(-1, 1, 16), want)


def test_halves_are_rounded_to_even() -> None:
    row = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, 126.5, 63.49, 63.51] + [0.0] * 7)
    kv = allocate(TritonBackend(), layer(1, 1, 16), 2, 16, CPU, torch.int8)
    meta = AttentionMetadata.build([1], [1], [[1]], 16)
    TritonBackend().write(kv, row.view(1, 1, 16), row.view(1, 1, 16), meta)
    assert kv.key[1, 0, 0, :9].tolist() == [127, 0, 2, 2, 0, -2, 126, 63, 64]


MUTATIONS = {
    "steps are cut off": ("(steps + 12582912.0) - 12582912.0", "steps"),
    "halves of fp8 are rounded up": ("0x7FFFF + ((bits >> 20) & 1)", "0x80000"),
    "small fp8 is cut off": ("(size * 512.0 + 12582912.0) - 12582912.0", "size * 512.0"),
    "fp8 has no sign": ("normal) | sign", "normal)"),
    "the largest step is 128": ("else 127.0", "else 128.0"),
    "what overflows is kept as infinite": ('tl.where(finite, rounded, float("nan"))', "rounded"),
    "a vector with a NaN is stored without": ('float("nan"), tl.max(size, 1))', "0.0, tl.max(size, 1))"),
    "keys of the first head alone": ("row * key_token_stride + head", "row * key_token_stride + 0 * head"),
    "the first block for all": ("block = slot // BLOCK_SIZE", "block = slot // BLOCK_SIZE * 0"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mistake_is_noticed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = mutated(write_kernel, *MUTATIONS[name], tmp_path)
    monkeypatch.setattr(backend, "write_kernel", module.write_kernel)
    with quiet(), pytest.raises(AssertionError):
        _write_once()


def _write_once() -> None:
    check = test_what_is_stored_is_what_the_reference_stores.hypothesis.inner_test
    for pair in PAIRS[1:4]:
        check(pair, (24, 96), 2, 16, 20, 1.0, 1)
    test_every_float32_between_is_rounded_as_torch_rounds_it()


def test_the_kernel_itself_passes() -> None:
    _write_once()
