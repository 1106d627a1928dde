"""The adapters to flash-attn against the reference, through functions of its documented signatures."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from stand_in_flash import FLASH_ATTN, FLASH_ATTN_INTERFACE

from batchgen_kernels import CAPABILITIES, AttentionMetadata, AttentionSpec, BackendError, select
from batchgen_kernels.backend import allocate
from batchgen_kernels.flash_attention import FlashAttention2, FlashAttention3
from batchgen_kernels.reference import ReferenceBackend

CPU = torch.device("cpu")
HALVES = (torch.float16, torch.bfloat16)
BACKENDS = {
    "flash_attn": (lambda: FlashAttention2(FLASH_ATTN), (256, 512)),
    "flash_attn_3": (lambda: FlashAttention3(FLASH_ATTN_INTERFACE), (16, 48, 128)),
}
SEQUENCES = st.lists(st.tuples(st.integers(0, 300), st.integers(1, 5)), min_size=1, max_size=4)
ALONE = st.lists(st.tuples(st.integers(0, 300), st.just(1)), min_size=1, max_size=4)


def a_spec(heads: int, kv_heads: int, width: int, **more: Any) -> AttentionSpec:
    return AttentionSpec(
        num_heads=heads, num_kv_heads=kv_heads, head_size=width, v_head_size=width, scale=0.2, **more
    )


@pytest.mark.parametrize("name", BACKENDS)
@settings(max_examples=15, deadline=None)
@given(st.data())
def test_it_is_the_reference(name: str, data: st.DataObject) -> None:
    make, blocks = BACKENDS[name]
    backend, block = make(), data.draw(st.sampled_from(blocks))
    kv_heads = data.draw(st.integers(1, 2))
    spec = a_spec(
        kv_heads * data.draw(st.integers(1, 3)),
        kv_heads,
        data.draw(st.sampled_from([16, 40])),
        sliding_window=data.draw(st.sampled_from([None, 1, 37])),
        softcap=data.draw(st.sampled_from([None, 3.0])),
    )
    dtype = data.draw(st.sampled_from(HALVES))
    sequences = data.draw(SEQUENCES | ALONE)
    padding = data.draw(st.integers(0, 2))
    check(backend, spec, dtype, sequences, block, padding)


def check(
    backend: Any,
    spec: AttentionSpec,
    dtype: torch.dtype,
    sequences: list[tuple[int, int]],
    block: int,
    pad: int,
) -> None:
    g = torch.Generator().manual_seed(3)
    lens, rows = [sum(n) for n in sequences], [n for _, n in sequences]
    counts = [-(-n // block) for n in lens]
    free = (torch.randperm(sum(counts), generator=g) + 1).tolist()
    tables = [[free.pop() for _ in range(n)] for n in counts]

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g).to(dtype)

    query = draw(sum(rows) + pad, spec.num_heads, spec.head_size)
    key, value = (draw(sum(lens), spec.num_kv_heads, spec.head_size) for _ in range(2))
    whole = AttentionMetadata.build(lens, lens, tables, block)
    step = AttentionMetadata.build(rows, lens, tables, block, num_rows=sum(rows) + pad)
    results = []
    for target in (backend, ReferenceBackend()):
        kv = allocate(target, spec, sum(counts) + 1, block, CPU, dtype)
        target.write(kv, key, value, whole)
        results.append(target.attend(query, kv, step, spec))
    got, want = results
    assert got.dtype == dtype
    assert not got[sum(rows) :].any()
    torch.testing.assert_close(got, want, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("name", BACKENDS)
def test_what_is_written_is_what_the_reference_writes(name: str) -> None:
    make, (block, *_) = BACKENDS[name]
    spec, kept = a_spec(4, 2, 16), []
    key, value = torch.randn(5, 2, 16), torch.randn(5, 2, 16)
    key[1, 0, 3], value[2, 1, 0] = float("inf"), 1e9
    meta = AttentionMetadata.build([5], [5], [[2]], block)
    meta.slot_mapping[3] = -1
    for target in (make(), ReferenceBackend()):
        kv = allocate(target, spec, 3, block, CPU, torch.float16)
        target.write(kv, key.half(), value, meta)
        kept.append(kv)
    for got, want in zip(kept[0].tensors, kept[1].tensors, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("name", "more", "dtype", "kv_dtype", "said"),
    [
        ("flash_attn", {}, torch.float32, None, "computes in bfloat16 or float16, not in float32"),
        ("flash_attn", {"has_sinks": True}, torch.float16, None, "has no attention sinks"),
        ("flash_attn", {}, torch.float16, torch.int8, "stores keys and values as bfloat16 or float16"),
        (
            "flash_attn_3",
            {"head_size": 20},
            torch.bfloat16,
            None,
            "sizes that are multiples of 8, not 20",
        ),
        ("flash_attn_3", {"head_size": 264}, torch.bfloat16, None, "head sizes up to 256, not 264"),
        ("flash_attn", {"v_head_size": 8}, torch.bfloat16, None, "values as wide as keys, not 8 and 16"),
        ("flash_attn_3", {}, torch.bfloat16, None, None),
    ],
)
def test_what_is_refused(
    name: str,
    more: dict[str, Any],
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None,
    said: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda module: object())
    width = more.get("head_size", 16)
    sizes = {"head_size": width, "v_head_size": more.get("v_head_size", width)}
    spec = AttentionSpec(
        num_heads=2, num_kv_heads=1, scale=1.0, has_sinks=more.get("has_sinks", False), **sizes
    )
    reason = CAPABILITIES[name].refusal(spec, torch.device("cuda"), dtype, kv_dtype)
    assert (reason is None) if said is None else said in str(reason)


def test_a_package_that_is_not_there_is_named() -> None:
    for name, module in (("flash_attn", "flash_attn"), ("flash_attn_3", "flash_attn_interface")):
        with pytest.raises(BackendError, match=f"the {name} attention backend needs {module}, which is not"):
            select(name, a_spec(2, 1, 16), "cuda", torch.float16)


def test_a_package_that_is_there_is_imported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn_interface", FLASH_ATTN_INTERFACE)  # type: ignore[arg-type]
    check(FlashAttention3(), a_spec(2, 1, 16), torch.float16, [(3, 1)], 16, 0)


def test_blocks_are_those_of_flash_attn() -> None:
    with pytest.raises(ValueError, match="block sizes that are multiples of 256, not 16"):
        allocate(FlashAttention2(FLASH_ATTN), a_spec(2, 1, 16), 2, 16, CPU, torch.float16)
    with pytest.raises(ValueError, match="stores keys and values as bfloat16 or float16, not as int8"):
        allocate(FlashAttention3(FLASH_ATTN_INTERFACE), a_spec(2, 1, 16), 2, 16, CPU, torch.int8)
