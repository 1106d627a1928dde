"""The CPU backend: right against the reference, and the same bits whatever surrounds a row."""

from __future__ import annotations

import ctypes
import errno
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numba import njit
from numba.core.caching import IndexDataCacheFile

from batchgen_kernels import AttentionMetadata, AttentionSpec, KVCache
from batchgen_kernels.backend import allocate
from batchgen_kernels.cpu import CpuBackend, program, threads
from batchgen_kernels.cpu.cache import cache_directory, numba_cache
from batchgen_kernels.reference import ReferenceBackend

CPU = torch.device("cpu")
KERNELS = Path(__file__).parents[2] / "kernels"
KV_DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8]
BASE = AttentionSpec(num_heads=6, num_kv_heads=2, head_size=32, v_head_size=32, scale=0.2)


@pytest.fixture(autouse=True)
def _threads():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@dataclass
class History:
    """Everything one sequence ever feeds to a layer."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor

    @classmethod
    def make(cls, spec: AttentionSpec, length: int, seed: int) -> History:
        g = torch.Generator().manual_seed(seed)
        sizes = (
            (spec.num_heads, spec.head_size),
            (spec.num_kv_heads, spec.head_size),
            (spec.num_kv_heads, spec.v_head_size),
        )
        return cls(*(torch.randn(length, *size, generator=g) for size in sizes))


@dataclass
class Cache:
    """A pool that hands out blocks in an order of its own; unused memory is NaN."""

    backend: CpuBackend | ReferenceBackend
    spec: AttentionSpec
    block_size: int
    kv: KVCache
    free: list[int]

    @classmethod
    def make(
        cls,
        backend,
        spec: AttentionSpec,
        block_size: int,
        num_blocks: int,
        seed: int = 0,
        kv_dtype: torch.dtype = torch.float32,
    ) -> Cache:
        kv = allocate(backend, spec, num_blocks, block_size, CPU, kv_dtype)
        for tensor in kv.tensors:
            tensor.fill_(float("nan") if tensor.is_floating_point() else 77)
        g = torch.Generator().manual_seed(seed)
        return cls(backend, spec, block_size, kv, (torch.randperm(num_blocks - 1, generator=g) + 1).tolist())

    def table(self, length: int) -> list[int]:
        return [self.free.pop() for _ in range(-(-length // self.block_size))]

    def step(self, parts, sinks=None, num_rows: int | None = None) -> list[torch.Tensor]:
        """Run one step; parts are (history, table, start, end). Returns the output rows of each part."""
        meta = AttentionMetadata.build(
            [end - start for _, _, start, end in parts],
            [end for *_, end in parts],
            [table for _, table, _, _ in parts],
            self.block_size,
            num_rows=num_rows,
        )
        packed = []
        for name in ("query", "key", "value"):
            rows = torch.cat([getattr(h, name)[start:end] for h, _, start, end in parts])
            padding = rows.new_full((meta.num_rows - len(rows), *rows.shape[1:]), float("nan"))
            packed.append(torch.cat([rows, padding]))
        self.backend.write(self.kv, packed[1], packed[2], meta)
        out = self.backend.attend(packed[0], self.kv, meta, self.spec, sinks)
        assert out.shape == (meta.num_rows, self.spec.num_heads, self.spec.v_head_size)
        assert not out[meta.num_tokens :].any()
        return list(out[: meta.num_tokens].split([end - start for _, _, start, end in parts]))


def whole(backend, spec: AttentionSpec, h: History, block_size: int = 16, sinks=None, kv_dtype=torch.float32):
    """All rows of one sequence in one step, alone."""
    num_blocks = -(-len(h.key) // block_size) + 1
    cache = Cache.make(backend, spec, block_size, num_blocks, kv_dtype=kv_dtype)
    return cache.step([(h, cache.table(len(h.key)), 0, len(h.key))], sinks)[0]


@st.composite
def specs(draw) -> AttentionSpec:
    kv_heads = draw(st.integers(1, 4))
    head_size = draw(st.sampled_from([16, 24, 64, 80, 96, 128, 256]))
    return AttentionSpec(
        num_heads=kv_heads * draw(st.integers(1, 16 // kv_heads)),
        num_kv_heads=kv_heads,
        head_size=head_size,
        v_head_size=draw(st.sampled_from([head_size, 16, 20, 128])),
        scale=draw(st.sampled_from([head_size**-0.5, 0.5])),
        sliding_window=draw(st.none() | st.integers(1, 90)),
        softcap=draw(st.none() | st.sampled_from([0.5, 5.0, 50.0])),
        has_sinks=draw(st.booleans()),
    )


@st.composite
def sequences(draw) -> list[tuple[int, int]]:
    """(rows already cached, rows of this step) of each sequence."""
    computed = st.sampled_from([0, 1, 15, 16, 63, 64, 65]) | st.integers(0, 150)
    rows = st.just(1) | st.sampled_from([2, 16, 17, 64]) | st.integers(1, 70)
    return draw(st.lists(st.tuples(computed, rows), min_size=1, max_size=5))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(specs(), sequences(), st.sampled_from([16, 32, 48]), st.integers(0, 9), st.sampled_from(KV_DTYPES))
def test_cpu_equals_reference(
    spec: AttentionSpec,
    lengths: list[tuple[int, int]],
    block_size: int,
    padding: int,
    kv_dtype: torch.dtype,
) -> None:
    histories = [History.make(spec, computed + rows, seed) for seed, (computed, rows) in enumerate(lengths)]
    sinks = torch.linspace(-2, 2, spec.num_heads) if spec.has_sinks else None
    num_blocks = 1 + sum(-(-sum(n) // block_size) for n in lengths)
    results = []
    for backend in (CpuBackend(), ReferenceBackend()):
        cache = Cache.make(backend, spec, block_size, num_blocks, kv_dtype=kv_dtype)
        tables = [cache.table(sum(n)) for n in lengths]
        earlier = [
            (h, table, 0, computed)
            for h, table, (computed, _) in zip(histories, tables, lengths, strict=True)
            if computed
        ]
        if earlier:
            cache.step(earlier, sinks)
        now = [(h, table, n[0], sum(n)) for h, table, n in zip(histories, tables, lengths, strict=True)]
        results.append(torch.cat(cache.step(now, sinks, sum(n for _, n in lengths) + padding)))
    torch.testing.assert_close(results[0], results[1], rtol=2e-5, atol=2e-5)


VARIANTS = [
    BASE,
    replace(BASE, num_heads=4, num_kv_heads=4, head_size=80, v_head_size=40),
    replace(BASE, num_heads=16, sliding_window=37),
    replace(BASE, num_heads=14, softcap=4.0, has_sinks=True, sliding_window=100),
]


@pytest.mark.parametrize("spec", VARIANTS)
@pytest.mark.parametrize(
    ("num_threads", "kv_dtype"), [(1, torch.float32), *((2, dtype) for dtype in KV_DTYPES)]
)
def test_bits_do_not_depend_on_company_chunks_or_blocks(
    spec: AttentionSpec, num_threads: int, kv_dtype: torch.dtype
) -> None:
    backend = CpuBackend()
    lengths = [5, 64, 131, 200]
    sinks = torch.linspace(-1, 3, spec.num_heads) if spec.has_sinks else None
    histories = [History.make(spec, n, seed) for seed, n in enumerate(lengths)]
    torch.set_num_threads(1)
    alone = [whole(backend, spec, h, sinks=sinks, kv_dtype=kv_dtype) for h in histories]
    torch.set_num_threads(num_threads)
    for chunk in (1, 7, 50):
        cache = Cache.make(backend, spec, 16, 64, seed=chunk, kv_dtype=kv_dtype)
        tables = [cache.table(n) for n in lengths]
        outputs: list[list[torch.Tensor]] = [[] for _ in lengths]
        for start in range(0, max(lengths), chunk):
            active = [i for i, n in enumerate(lengths) if start < n]
            parts = [(histories[i], tables[i], start, min(start + chunk, lengths[i])) for i in active]
            for i, rows in zip(active, cache.step(parts, sinks, num_rows=256), strict=True):
                outputs[i].append(rows)
        for got, want in zip(outputs, alone, strict=True):
            assert torch.equal(torch.cat(got), want)


@pytest.mark.parametrize("make_team", [threads._openmp_team, threads._python_team])
def test_bits_do_not_depend_on_who_runs_the_threads(
    make_team: Callable[[], threads.Run | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_team()
    assert run is not None
    used: list[int] = []

    def spy(function: int, argument: ctypes.Structure, count: int) -> None:
        used.append(count)
        run(function, argument, count)

    h = History.make(BASE, 200, 9)
    torch.set_num_threads(1)
    want = whole(CpuBackend(), BASE, h)
    monkeypatch.setattr(program, "team", lambda: spy)
    torch.set_num_threads(3)
    assert torch.equal(whole(CpuBackend(), BASE, h), want)
    assert used == [3]


def test_bits_do_not_depend_on_block_size() -> None:
    h = History.make(BASE, 150, 1)
    backend = CpuBackend()
    assert torch.equal(whole(backend, BASE, h, 16), whole(backend, BASE, h, 48))


def test_bits_do_not_depend_on_what_lies_below_the_window() -> None:
    """Blocks below the window are replaced by the null block, here full of NaN."""
    spec = replace(BASE, sliding_window=20)
    h = History.make(spec, 100, 2)
    backend = CpuBackend()
    cache = Cache.make(backend, spec, 16, 9)
    table = cache.table(100)
    cache.step([(h, table, 0, 99)])
    first_visible = (99 - 20 + 1) // 16
    nulled = [0] * first_visible + table[first_visible:]
    got = cache.step([(h, nulled, 99, 100)])[0]
    assert torch.equal(got, whole(backend, spec, h)[99:])


SICK = {"nan": float("nan"), "inf": float("inf"), "negative inf": float("-inf"), "float16 overflow": 65520.0}


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("where", ["key", "value"])
@pytest.mark.parametrize("what", SICK)
@pytest.mark.parametrize("backend", [CpuBackend(), ReferenceBackend()], ids=lambda b: b.name)
def test_what_is_not_finite_stays_in_its_sequence(
    backend, kv_dtype: torch.dtype, where: str, what: str
) -> None:
    """One bad element is seen by every later row of its sequence, and by no other sequence."""
    sick, well = History.make(BASE, 70, 3), History.make(BASE, 70, 4)
    getattr(sick, where)[11, :, 5] = SICK[what]
    cache = Cache.make(backend, BASE, 16, 12, kv_dtype=kv_dtype)
    got = cache.step([(sick, cache.table(70), 0, 70), (well, cache.table(70), 0, 70)])
    torch.testing.assert_close(got[1], whole(backend, BASE, well, kv_dtype=kv_dtype), rtol=1e-6, atol=1e-6)
    # The reference multiplies what a row may not see by 0, which only matters inside this sequence.
    assert backend.name == "reference" or got[0][:11].isfinite().all()
    if what != "float16 overflow" or kv_dtype == torch.float16:
        seen = got[0][11:] if where == "key" else got[0][11:, :, 5]
        assert not seen.isfinite().any()
    else:
        assert got[0].isfinite().all()


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from([torch.bfloat16, torch.float16, torch.int8]),
    st.sampled_from([16, 20, 80]),
    st.sampled_from([0.0, 1e-45, 1e-41, 1e-30, 1e-6, 1.0, 1e4, 3e38]),
    st.integers(0, 1000),
)
def test_what_is_stored_is_what_the_reference_stores(
    kv_dtype: torch.dtype, width: int, size: float, seed: int
) -> None:
    """To the bit, from vectors of zeros to those that overflow."""
    spec = replace(BASE, head_size=width, v_head_size=width)
    h = History.make(spec, 20, seed)
    h.key.clamp_(-1, 1).mul_(size)
    h.value[3] = 0
    h.value[4, 1, 2] = float("nan")
    kept = []
    for backend in (CpuBackend(), ReferenceBackend()):
        kv = allocate(backend, spec, 3, 16, CPU, kv_dtype)
        meta = AttentionMetadata.build([20], [20], [[1, 2]], 16)
        backend.write(kv, h.key, h.value, meta)
        kept.append([tensor[1:] for tensor in kv.tensors])
    cpu, reference = kept
    cpu[0] = cpu[0].permute(0, 3, 1, 2)
    cpu[1:] = [tensor.transpose(1, 2) for tensor in cpu[1:]]
    cpu[1] = cpu[1][..., :width]
    for got, want in zip(cpu, reference, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("kv_dtype", [torch.bfloat16, torch.float16])
def test_every_number_of_16_bits_is_read_exactly(kv_dtype: torch.dtype) -> None:
    """One key that takes all the weight, whose value is the number."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(kv_dtype)
    rows = numbers.view(-1, 1, 64)
    spec = AttentionSpec(num_heads=1, num_kv_heads=1, head_size=16, v_head_size=64, scale=1.0)
    alone = replace(spec, sliding_window=1)
    h = History(torch.zeros(len(rows), 1, 16), torch.zeros(len(rows), 1, 16), rows.float())
    got = whole(CpuBackend(), alone, h, kv_dtype=kv_dtype).flatten()
    want = numbers.float().masked_fill(~numbers.isfinite(), float("nan"))
    torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)


def test_a_wrong_scale_is_noticed() -> None:
    """What the comparison with the reference rests on."""
    h = History.make(BASE, 40, 8)
    for name in ("key_scale", "value_scale"):
        cache = Cache.make(CpuBackend(), BASE, 16, 4, kv_dtype=torch.int8)
        table = cache.table(40)
        cache.step([(h, table, 0, 40)])
        scale = getattr(cache.kv, name)
        scale[table[0], 0] = scale[table[0], 0].roll(1)
        meta = AttentionMetadata.build([40], [40], [table], 16)
        got = cache.backend.attend(h.query, cache.kv, meta, BASE)
        want = whole(CpuBackend(), BASE, h, kv_dtype=torch.int8)
        assert (got - want)[:, :3].abs().amax() > 1e-3
        assert torch.equal(got[:, 3:], want[:, 3:])


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_models_compute_in_float32(dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    kv_dtype = dtype if kv_dtype.is_floating_point else kv_dtype
    h = History.make(BASE, 50, 2)
    narrow = History(*(x.to(dtype) for x in (h.query, h.key, h.value)))
    wide = History(*(x.float() for x in (narrow.query, narrow.key, narrow.value)))
    got = whole(CpuBackend(), BASE, narrow, kv_dtype=kv_dtype)
    assert got.dtype == dtype
    assert torch.equal(got, whole(CpuBackend(), BASE, wide, kv_dtype=kv_dtype).to(dtype))


def test_large_scores_stay_exact() -> None:
    """A key that dwarfs the others, early or late, takes all the weight; nothing overflows."""
    spec = replace(BASE, num_heads=2, scale=1.0)
    h = History.make(spec, 140, 5)
    for hot in (3, 70, 139):
        key = h.key.clone()
        key[hot] = h.query[139] * 50
        got = whole(CpuBackend(), spec, History(h.query, key, h.value))[139]
        torch.testing.assert_close(got, h.value[hot], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_softmax_is_as_precise_as_float32_allows(softcap: float | None) -> None:
    """Two keys, of which the second scores -x and alone has a value: each head is one x."""
    x = torch.cat([torch.linspace(0, 1, 1000), torch.logspace(-6, 1.3, 1000)])
    spec = AttentionSpec(
        num_heads=len(x), num_kv_heads=1, head_size=1, v_head_size=1, scale=1.0, softcap=softcap
    )
    h = History(
        x.repeat(2, 1).unsqueeze(2),
        torch.tensor([0.0, -1.0]).view(2, 1, 1),
        torch.tensor([0.0, 1.0]).view(2, 1, 1),
    )
    got = whole(CpuBackend(), spec, h)[1].flatten().double()
    s = -x.double()
    weight = (s if softcap is None else softcap * torch.tanh(s / softcap)).exp()
    error = (got / (weight / (1 + weight)) - 1).abs()
    # Rounding a score of size x costs x roundings of the weight, however good the exponential is.
    assert (error < 6e-8 * (4 + 2 * x)).all()


def test_strided_inputs_are_read_in_place() -> None:
    h = History.make(BASE, 40, 6)
    fused = torch.cat([h.query, h.key, h.value], dim=1)
    q, k, v = fused.split([6, 2, 2], dim=1)
    turned = q.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    want = whole(CpuBackend(), BASE, h)
    assert torch.equal(whole(CpuBackend(), BASE, History(q, k, v)), want)
    cache = Cache.make(CpuBackend(), BASE, 16, 4)
    table = cache.table(40)
    meta = AttentionMetadata.build([40], [40], [table], 16)
    cache.backend.write(cache.kv, k, v, meta)
    assert torch.equal(cache.backend.attend(q, cache.kv, meta, BASE), want)
    assert torch.equal(cache.backend.attend(turned, cache.kv, meta, BASE), want)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("backend", [CpuBackend(), ReferenceBackend()], ids=lambda b: b.name)
def test_layers_side_by_side_in_one_memory_leave_each_other_alone(backend, kv_dtype: torch.dtype) -> None:
    """Blocks of a layer are a stride apart, and what lies between is another layer's."""
    narrow = replace(BASE, head_size=16, v_head_size=48)
    sizes = [backend.bytes_per_block(spec, 16, kv_dtype) for spec in (BASE, narrow)]
    memory = torch.zeros(5, sum(sizes) + 64, dtype=torch.uint8)
    pages = memory[:, : sizes[0]], memory[:, sizes[0] : sum(sizes)]
    for spec, own, other, seed in ((BASE, *pages, 7), (narrow, *pages[::-1], 8)):
        h, untouched = History.make(spec, 40, seed), other.clone()
        kv = backend.view(spec, own, 16, kv_dtype)
        cache = Cache(backend, spec, 16, kv, [])
        got = cache.step([(h, [4, 1, 2], 0, 40)])[0]
        assert torch.equal(got, whole(backend, spec, h, kv_dtype=kv_dtype))
        assert torch.equal(other, untouched)
        assert own[[4, 1, 2]].any()
    assert not memory[:, sum(sizes) :].any()
    assert not memory[[0, 3]].any()


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("backend", [CpuBackend(), ReferenceBackend()], ids=lambda b: b.name)
def test_a_copied_page_is_the_whole_block(backend, kv_dtype: torch.dtype) -> None:
    """The engine copies blocks as pages of bytes, scales with them."""
    h = History.make(BASE, 30, 7)
    pages = torch.zeros(5, backend.bytes_per_block(BASE, 16, kv_dtype), dtype=torch.uint8)
    cache = Cache(backend, BASE, 16, backend.view(BASE, pages, 16, kv_dtype), [])
    cache.step([(h, [1, 2], 0, 30)])
    before, after = (AttentionMetadata.build([1], [30], [table], 16) for table in ([1, 2], [3, 4]))
    want = backend.attend(h.query[29:], cache.kv, before, BASE)
    pages[[3, 4]] = pages[[1, 2]]
    pages[[1, 2]] = 0
    assert torch.equal(backend.attend(h.query[29:], cache.kv, after, BASE), want)


def test_writes_of_a_step_are_seen_by_all_its_rows() -> None:
    """A second sequence shares, in the same step, the block that the first is only now computing."""
    backend = CpuBackend()
    h = History.make(BASE, 40, 8)
    cache = Cache.make(backend, BASE, 16, 9)
    owner, sharer = cache.table(40), cache.table(40)
    sharer[0] = owner[0]
    got = cache.step([(h, sharer, 16, 40), (h, owner, 0, 40)])
    want = whole(backend, BASE, h)
    assert torch.equal(got[0], want[16:])
    assert torch.equal(got[1], want)


def test_a_step_without_sequences() -> None:
    cache = Cache.make(CpuBackend(), BASE, 16, 2)
    meta = AttentionMetadata.build([], [], [], 16, num_rows=4)
    cache.backend.write(cache.kv, torch.ones(4, 2, 32), torch.ones(4, 2, 32), meta)
    assert not cache.backend.attend(torch.ones(4, 6, 32), cache.kv, meta, BASE).any()
    assert cache.kv.key.isnan().all()


@pytest.mark.parametrize("backend", [CpuBackend(), ReferenceBackend()], ids=lambda b: b.name)
def test_what_would_leave_the_cache_is_refused(backend) -> None:
    cache = Cache.make(backend, BASE, 16, 4)
    q, kv = torch.zeros(20, 6, 32), torch.zeros(20, 2, 32)
    good = {"query_lens": [20], "seq_lens": [20], "block_tables": [[1, 2]], "block_size": 16}
    cases = {
        "block_table holds 1..4": {"block_tables": [[1, 4]]},
        "block_table holds -1..1": {"block_tables": [[-1, 1]]},
    }
    for message, change in cases.items():
        meta = AttentionMetadata.build(**(good | change))
        with pytest.raises(ValueError, match=message):
            backend.write(cache.kv, kv, kv, meta)
        with pytest.raises(ValueError, match=message):
            backend.attend(q, cache.kv, meta, BASE)
    meta = AttentionMetadata.build(**good)
    beyond = replace(meta, seq_lens=torch.tensor([33], dtype=torch.int32))
    with pytest.raises(ValueError, match="exceeds the block table's 32"):
        backend.attend(q, cache.kv, beyond, BASE)
    with pytest.raises(ValueError, match="sinks are given"):
        backend.attend(q, cache.kv, meta, BASE, torch.zeros(6))


def test_layout_and_dtype_are_refused_with_the_reason() -> None:
    backend = CpuBackend()
    with pytest.raises(ValueError, match="multiples of 16, not 8"):
        allocate(backend, BASE, 2, 8, CPU, torch.float32)
    with pytest.raises(ValueError, match="or int8, not as float64"):
        allocate(backend, BASE, 2, 16, CPU, torch.float64)
    with pytest.raises(ValueError, match="pages of 64 bytes are too small"):
        backend.view(BASE, torch.zeros(2, 64, dtype=torch.uint8), 16, torch.float32)
    cache = Cache.make(backend, BASE, 16, 3)
    meta = AttentionMetadata.build([2], [2], [[1]], 16)
    with pytest.raises(ValueError, match=r"takes a float query of shape \(2, 6, 32\)"):
        backend.attend(torch.zeros(2, 6, 32, dtype=torch.float64), cache.kv, meta, BASE)
    with pytest.raises(ValueError, match="width 64 do not fit"):
        backend.write(cache.kv, torch.zeros(2, 2, 32), torch.zeros(2, 2, 64), meta)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("backend", [CpuBackend(), ReferenceBackend()], ids=lambda b: b.name)
def test_bytes_per_block_is_what_is_allocated(backend, kv_dtype: torch.dtype) -> None:
    spec = replace(BASE, v_head_size=20)
    kv = allocate(backend, spec, 3, 32, CPU, kv_dtype)
    size = backend.bytes_per_block(spec, 32, kv_dtype)
    assert sum(tensor.nbytes for tensor in kv.tensors) == 3 * size
    assert {tensor.untyped_storage().nbytes() for tensor in kv.tensors} == {3 * size}
    assert not any(tensor.any() for tensor in kv.tensors)


@pytest.mark.slow
def test_of_processes_that_start_together_one_compiles_the_kernels(tmp_path: Path) -> None:
    code = "import torch, batchgen_kernels.cpu.program as p; print(p.compiled(torch.int8).cache_hits)"
    env = os.environ | {"BATCHGEN_CACHE": str(tmp_path), "PYTHONPATH": str(KERNELS), "NUMBA_CACHE_DIR": ""}
    runs = [subprocess.Popen([sys.executable, "-c", code], env=env, stdout=-1, text=True) for _ in range(3)]
    assert sorted(run.communicate()[0].strip() for run in runs) == ["0", "1", "1"]


def test_where_compiled_kernels_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.delenv("BATCHGEN_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = cache_directory()
    assert folder is not None
    assert folder.parent == tmp_path / "batchgen" / "numba"
    (tmp_path / "file").touch()
    monkeypatch.setenv("BATCHGEN_CACHE", str(tmp_path / "file"))
    assert cache_directory() is None
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "named"))
    assert cache_directory() == tmp_path / "named" / folder.name


def test_kernels_are_kept_where_there_can_be_no_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    folder = cache_directory()
    assert folder is not None
    (folder / "lock").mkdir()
    with numba_cache() as cached:
        assert cached


def test_kernels_are_compiled_where_they_cannot_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(program, "_run", njit(lambda header, source_type, storage, products: None))
    monkeypatch.setattr(IndexDataCacheFile, "save", full)
    assert program.compiled.__wrapped__(torch.float32).address
