"""The CPU backend: right against the reference, and the same bits whatever surrounds a row."""

from __future__ import annotations

import ctypes
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

from batchgen_kernels import AttentionMetadata, AttentionSpec, KVCache
from batchgen_kernels.backend import allocate
from batchgen_kernels.cpu import CpuBackend, threads
from batchgen_kernels.cpu import backend as cpu_backend
from batchgen_kernels.cpu.cache import cache_directory
from batchgen_kernels.reference import ReferenceBackend

CPU = torch.device("cpu")
KERNELS = Path(__file__).parents[2] / "kernels"
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
    def make(cls, backend, spec: AttentionSpec, block_size: int, num_blocks: int, seed: int = 0) -> Cache:
        kv = allocate(backend, spec, num_blocks, block_size, CPU, torch.float32)
        kv.key.fill_(float("nan"))
        kv.value.fill_(float("nan"))
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


def whole(backend, spec: AttentionSpec, h: History, block_size: int = 16, sinks=None, seed: int = 0):
    """All rows of one sequence in one step, alone."""
    cache = Cache.make(backend, spec, block_size, -(-len(h.key) // block_size) + 1, seed)
    return cache.step([(h, cache.table(len(h.key)), 0, len(h.key))], sinks)[0]


@st.composite
def specs(draw) -> AttentionSpec:
    kv_heads = draw(st.integers(1, 4))
    head_size = draw(st.sampled_from([16, 24, 64, 80, 96, 128]))
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


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(specs(), sequences(), st.sampled_from([16, 32, 48]), st.integers(0, 9))
def test_cpu_equals_reference(
    spec: AttentionSpec, lengths: list[tuple[int, int]], block_size: int, padding: int
) -> None:
    histories = [History.make(spec, computed + rows, seed) for seed, (computed, rows) in enumerate(lengths)]
    sinks = torch.linspace(-2, 2, spec.num_heads) if spec.has_sinks else None
    num_blocks = 1 + sum(-(-sum(n) // block_size) for n in lengths)
    results = []
    for backend in (CpuBackend(), ReferenceBackend()):
        cache = Cache.make(backend, spec, block_size, num_blocks)
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
@pytest.mark.parametrize("num_threads", [1, 2])
def test_bits_do_not_depend_on_company_chunks_or_blocks(spec: AttentionSpec, num_threads: int) -> None:
    backend = CpuBackend()
    lengths = [5, 64, 131, 200]
    sinks = torch.linspace(-1, 3, spec.num_heads) if spec.has_sinks else None
    histories = [History.make(spec, n, seed) for seed, n in enumerate(lengths)]
    torch.set_num_threads(1)
    alone = [whole(backend, spec, h, sinks=sinks) for h in histories]
    torch.set_num_threads(num_threads)
    for chunk in (1, 7, 50):
        cache = Cache.make(backend, spec, 16, 64, seed=chunk)
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
    monkeypatch.setattr(cpu_backend, "team", lambda: spy)
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


def test_nan_of_one_sequence_stays_there() -> None:
    backend = CpuBackend()
    sick, well = History.make(BASE, 70, 3), History.make(BASE, 70, 4)
    sick.value[11] = float("nan")
    sick.key[20] = float("inf")
    cache = Cache.make(backend, BASE, 16, 12)
    got = cache.step([(sick, cache.table(70), 0, 70), (well, cache.table(70), 0, 70)])
    assert torch.equal(got[1], whole(backend, BASE, well))
    assert got[0][:11].isfinite().all()
    assert not got[0][11:].isfinite().any()


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


@pytest.mark.parametrize("backend", [CpuBackend(), ReferenceBackend()], ids=lambda b: b.name)
def test_layers_side_by_side_in_one_memory_leave_each_other_alone(backend) -> None:
    """Blocks of a layer are a stride apart, and what lies between is another layer's."""
    narrow = replace(BASE, head_size=16, v_head_size=48)
    sizes = [backend.bytes_per_block(spec, 16, torch.float32) for spec in (BASE, narrow)]
    memory = torch.zeros(5, sum(sizes) + 64, dtype=torch.uint8)
    pages = memory[:, : sizes[0]], memory[:, sizes[0] : sum(sizes)]
    for spec, own, other, seed in ((BASE, *pages, 7), (narrow, *pages[::-1], 8)):
        h, untouched = History.make(spec, 40, seed), other.clone()
        kv = backend.view(spec, own, 16, torch.float32)
        cache = Cache(backend, spec, 16, kv, [])
        got = cache.step([(h, [4, 1, 2], 0, 40)])[0]
        assert torch.equal(got, whole(backend, spec, h))
        assert torch.equal(other, untouched)
        assert own[[4, 1, 2]].any()
    assert not memory[:, sum(sizes) :].any()
    assert not memory[[0, 3]].any()


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
    with pytest.raises(ValueError, match=r"float32, not in torch\.bfloat16"):
        allocate(backend, BASE, 2, 16, CPU, torch.bfloat16)
    with pytest.raises(ValueError, match="pages of 64 bytes are too small"):
        backend.view(BASE, torch.zeros(2, 64, dtype=torch.uint8), 16, torch.float32)
    cache = Cache.make(backend, BASE, 16, 3)
    meta = AttentionMetadata.build([2], [2], [[1]], 16)
    with pytest.raises(ValueError, match=r"takes a float32 query of shape \(2, 6, 32\)"):
        backend.attend(torch.zeros(2, 6, 32, dtype=torch.float64), cache.kv, meta, BASE)
    with pytest.raises(ValueError, match="width 64 do not fit"):
        backend.write(cache.kv, torch.zeros(2, 2, 32), torch.zeros(2, 2, 64), meta)


@pytest.mark.parametrize("backend", [CpuBackend(), ReferenceBackend()], ids=lambda b: b.name)
def test_bytes_per_block_is_what_is_allocated(backend) -> None:
    spec = replace(BASE, v_head_size=20)
    kv = allocate(backend, spec, 3, 32, CPU, torch.float32)
    assert kv.key.nbytes + kv.value.nbytes == 3 * backend.bytes_per_block(spec, 32, torch.float32)
    assert not kv.key.any()
    assert not kv.value.any()


def test_a_second_process_loads_the_compiled_kernels(tmp_path: Path) -> None:
    code = "import batchgen_kernels.cpu.kernel as k; print(k.attend.cache_hits)"
    env = os.environ | {"BATCHGEN_CACHE": str(tmp_path), "PYTHONPATH": str(KERNELS), "NUMBA_CACHE_DIR": ""}
    runs = [
        subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
        for _ in range(2)
    ]
    assert [run.stdout.strip() for run in runs] == ["0", "1"]


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
