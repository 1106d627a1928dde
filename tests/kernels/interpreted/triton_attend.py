"""The attention kernel, interpreted, against the reference: random shapes, then named edges."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_cases import CPU, EXAMPLES, LONG, Case, layer, quiet

from batchgen_kernels import CAPABILITIES, AttentionMetadata, AttentionSpec, BackendError, select
from batchgen_kernels.backend import allocate
from batchgen_kernels.reference import ReferenceBackend
from batchgen_kernels.triton_kernels import TritonBackend, backend
from batchgen_kernels.triton_kernels.tiles import (
    A100,
    B200,
    H100,
    INTERPRETER,
    Chip,
    Tile,
    choose_splits,
    choose_tile,
    parts,
    shared_bytes,
)

KV_DTYPES = {
    torch.float32: [torch.float32, torch.float16, torch.int8, torch.float8_e4m3fn],
    torch.float16: [torch.float16, torch.int8, torch.float8_e4m3fn],
}


@st.composite
def specs(draw: st.DrawFn) -> AttentionSpec:
    kv_heads = draw(st.integers(1, 4 if LONG else 2))
    width = draw(st.sampled_from([16, 24, 64, 80, 96, 128, 192, 256]))
    return layer(
        kv_heads * draw(st.integers(1, 5)),
        kv_heads,
        width,
        draw(st.sampled_from([width, width, 16, 20, 128])),
        scale=draw(st.sampled_from([width**-0.5, 0.3])),
        sliding_window=draw(st.none() | st.integers(1, 90)),
        softcap=draw(st.none() | st.sampled_from([0.5, 5.0, 50.0])),
        has_sinks=draw(st.booleans()),
    )


@st.composite
def cases(draw: st.DrawFn, dtype: torch.dtype) -> Case:
    computed = st.sampled_from([0, 1, 15, 16, 31, 32, 63, 64, 65]) | st.integers(0, 200 if LONG else 110)
    rows = st.just(1) | st.integers(1, 60 if LONG else 30)
    fixed = draw(st.sampled_from([None, None, 64, 128]))
    return Case(
        spec=draw(specs()),
        sequences=draw(st.lists(st.tuples(computed, rows), min_size=1, max_size=5 if LONG else 3)),
        dtype=dtype,
        kv_dtype=draw(st.sampled_from(KV_DTYPES[dtype])),
        block_size=draw(st.sampled_from([16, 32, 64, 128])),
        splits=None if fixed else draw(st.sampled_from([None, 2, 3, 7])),
        fixed=fixed,
        padding=draw(st.integers(0, 5)),
        spare_blocks=draw(st.integers(0, 2)),
        chip=draw(st.sampled_from([INTERPRETER, A100])),
        filler=draw(st.sampled_from(["large", "nan"])),
        seed=draw(st.integers(0, 99)),
    )


@settings(max_examples=EXAMPLES)
@given(cases(torch.float32))
def test_float32_equals_the_reference(case: Case) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        case.check(monkeypatch)


@settings(max_examples=EXAMPLES)
@given(cases(torch.float16))
def test_float16_equals_the_reference(case: Case) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        case.check(monkeypatch)


PLAIN = layer(4, 2, 16)
EDGES = {
    "an empty tail block": Case(spec=PLAIN, sequences=[(31, 1), (0, 16)], spare_blocks=2),
    "a window inside a block": Case(spec=replace(PLAIN, sliding_window=5), sequences=[(40, 4), (8, 3)]),
    "a window of one": Case(spec=replace(PLAIN, sliding_window=1), sequences=[(40, 4), (0, 3)]),
    "a window as long as the sequence": Case(spec=replace(PLAIN, sliding_window=44), sequences=[(40, 4)]),
    "rows of one token": Case(spec=PLAIN, sequences=[(n, 1) for n in (0, 1, 15, 16, 17, 70)]),
    "one head": Case(spec=layer(1, 1, 16), sequences=[(10, 3), (0, 1)]),
    "128 heads": Case(spec=layer(128, 128, 16), sequences=[(2, 1)]),
    "128 heads on one": Case(spec=layer(128, 1, 16), sequences=[(20, 2), (3, 1)]),
    "a group that fills no tile": Case(spec=layer(21, 1, 16), sequences=[(20, 9)]),
    "sequences without rows": Case(spec=PLAIN, sequences=[(9, 0), (4, 2), (7, 0), (3, 0), (0, 1), (5, 0)]),
    "a sink that takes nearly all": Case(spec=replace(PLAIN, has_sinks=True), sequences=[(9, 2)], sink=30.0),
    "a sink that takes nearly nothing": Case(
        spec=replace(PLAIN, has_sinks=True), sequences=[(9, 2)], sink=-60.0, splits=2
    ),
    "more splits than keys": Case(spec=replace(PLAIN, has_sinks=True), sequences=[(3, 1)], splits=9),
    "a fixed split below the window": Case(
        spec=replace(PLAIN, sliding_window=9, has_sinks=True), sequences=[(140, 2)], fixed=64
    ),
    "a block of 128 and keys up to its middle": Case(spec=PLAIN, sequences=[(63, 1)], block_size=128),
    "scores beyond 1,000": Case(spec=replace(PLAIN, scale=300.0), sequences=[(40, 8)], splits=2),
}


@pytest.mark.parametrize("name", EDGES)
def test_edges(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    EDGES[name].check(monkeypatch)


def test_blocks_below_the_window_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their entries are the null block, here full of NaN."""
    case = Case(spec=replace(PLAIN, sliding_window=20), sequences=[(99, 1)], filler="nan")
    kv = case.cache(TritonBackend())
    case.tables[0][:5] = [0] * 5
    got = TritonBackend().attend(case.tensors()[0], kv, case.metadata, case.spec)
    torch.testing.assert_close(got, case.run(ReferenceBackend()), rtol=2e-5, atol=2e-5, equal_nan=False)


def test_with_fixed_splits_bits_do_not_depend_on_company_or_chunks() -> None:
    spec = layer(3, 1, 16, sliding_window=70, has_sinks=True)
    lengths = [5, 90]
    target = TritonBackend(fixed_split=64)
    whole = Case(spec=spec, sequences=[(0, n) for n in lengths], kv_dtype=torch.int8)
    query, *_ = whole.tensors()
    kv, sinks = whole.cache(target), whole.sinks

    def step(ranges: list[tuple[int, int, int]]) -> list[torch.Tensor]:
        meta = AttentionMetadata.build(
            [end - start for _, start, end in ranges],
            [end for *_, end in ranges],
            [whole.tables[s] for s, *_ in ranges],
            16,
        )
        firsts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
        rows = torch.cat([query[firsts[s] + start : firsts[s] + end] for s, start, end in ranges])
        return list(target.attend(rows, kv, meta, spec, sinks).split([b - a for _, a, b in ranges]))

    together = step([(s, 0, n) for s, n in enumerate(lengths)])
    for s, n in enumerate(lengths):
        chunks = [step([(s, a, min(a + 50, n))])[0] for a in range(0, n, 50)]
        assert torch.equal(torch.cat(chunks), together[s])
    last = step([(1, 89, 90), (0, 2, 5)])
    assert all(torch.equal(rows, together[s][-len(rows) :]) for s, rows in zip((1, 0), last, strict=True))


SICK = {"nan": float("nan"), "infinite": float("inf"), "beyond float16": 65520.0}


@pytest.mark.parametrize("kv_dtype", KV_DTYPES[torch.float32])
@pytest.mark.parametrize("where", [0, 1])
@pytest.mark.parametrize("what", SICK)
def test_what_is_not_finite_stays_in_its_sequence(kv_dtype: torch.dtype, where: int, what: str) -> None:
    case = Case(spec=PLAIN, sequences=[(40, 1), (40, 1)], kv_dtype=kv_dtype)
    query, *rows = case.tensors()
    target = TritonBackend()
    kv = case.cache(target)
    want = target.attend(query, kv, case.metadata, case.spec)
    rows[where][11, :, 5] = SICK[what]
    lens = [sum(n) for n in case.sequences]
    with quiet():
        target.write(kv, *rows, AttentionMetadata.build(lens, lens, case.tables, 16))
        got = target.attend(query, kv, case.metadata, case.spec)
    assert torch.equal(got[1], want[1])
    overflows = what != "beyond float16" or kv_dtype == torch.float16
    assert got[0].isfinite().all() != overflows


def test_strided_inputs_are_read_in_place() -> None:
    case = Case(spec=PLAIN, sequences=[(0, 20)])
    query, key, value = case.tensors()
    fused = torch.cat([query, key, value], dim=1)
    q, k, v = fused.split([4, 2, 2], dim=1)
    target = TritonBackend()
    want = case.run(target)
    kv = allocate(target, PLAIN, 3, 16, CPU, torch.float32)
    target.write(kv, k, v, case.metadata)
    assert torch.equal(target.attend(q, kv, case.metadata, PLAIN), want)
    turned = q.permute(1, 2, 0).contiguous().permute(2, 0, 1)
    assert torch.equal(target.attend(turned, kv, case.metadata, PLAIN), want)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES[torch.float32])
def test_layers_side_by_side_in_one_memory_leave_each_other_alone(kv_dtype: torch.dtype) -> None:
    target, wide = TritonBackend(), layer(4, 2, 16, 48)
    sizes = [target.bytes_per_block(spec, 16, kv_dtype) for spec in (PLAIN, wide)]
    memory = torch.zeros(4, sum(sizes) + 64, dtype=torch.uint8)
    pages = memory[:, : sizes[0]], memory[:, sizes[0] : sum(sizes)]
    for spec, own, other in ((PLAIN, *pages), (wide, *pages[::-1])):
        case, untouched = Case(spec=spec, sequences=[(0, 40)], kv_dtype=kv_dtype), other.clone()
        query, key, value = case.tensors()
        kv = target.view(spec, own, 16, kv_dtype)
        target.write(kv, key, value, case.metadata)
        assert torch.equal(target.attend(query, kv, case.metadata, spec), case.run(target))
        assert torch.equal(other, untouched)
    assert not memory[:, sum(sizes) :].any()
    assert not memory[0].any()


def test_a_step_without_rows_or_sequences() -> None:
    target = TritonBackend()
    kv = allocate(target, PLAIN, 2, 16, CPU, torch.float32)
    for meta in (
        AttentionMetadata.build([], [], [], 16, num_rows=3),
        AttentionMetadata.build([], [], [], 16),
        AttentionMetadata.build([0], [5], [[1]], 16, num_rows=3),
    ):
        rows = meta.num_rows
        target.write(kv, torch.ones(rows, 2, 16), torch.ones(rows, 2, 16), meta)
        assert not target.attend(torch.ones(rows, 4, 16), kv, meta, PLAIN).any()
    assert not kv.key.any()


def test_what_does_not_fit_is_refused() -> None:
    target = TritonBackend()
    case = Case(spec=PLAIN, sequences=[(0, 5)])
    query, key, value = case.tensors()
    kv, meta = case.cache(target), case.metadata
    with pytest.raises(ValueError, match="multiples of 16, not 8"):
        allocate(target, PLAIN, 2, 8, CPU, torch.float32)
    with pytest.raises(ValueError, match="float16 or float32 or fp8 or int8, not as bfloat16"):
        allocate(target, PLAIN, 2, 16, CPU, torch.bfloat16)
    with pytest.raises(ValueError, match="pages of 64 bytes are too small"):
        target.view(PLAIN, torch.zeros(2, 64, dtype=torch.uint8), 16, torch.float32)
    with pytest.raises(ValueError, match=r"takes a float query of shape \(5, 4, 16\) on cpu"):
        target.attend(query.double(), kv, meta, PLAIN)
    with pytest.raises(ValueError, match=r"takes a float value of shape \(5, 2, 16\)"):
        target.write(kv, key, value[..., :8], meta)
    with pytest.raises(ValueError, match="sinks are given"):
        target.attend(query, kv, meta, PLAIN, torch.zeros(4))
    with pytest.raises(ValueError, match="blocks of 16, the step's metadata of 32"):
        target.attend(query, kv, replace(meta, block_size=32), PLAIN)
    with pytest.raises(ValueError, match=r"block_table holds 0\.\.9"):
        target.write(kv, key, value, AttentionMetadata.build([5], [5], [[9, 0]], 16))
    with pytest.raises(ValueError, match="fixed_split: 96 is not a positive multiple of 64"):
        TritonBackend(fixed_split=96)


def test_what_the_interpreter_computes_wrong_is_refused() -> None:
    assert CAPABILITIES["triton"].devices == {"cpu", "cuda"}
    assert select("triton", PLAIN, "cpu", torch.float16, torch.int8).backend.name == "triton"
    assert select("auto", PLAIN, "cpu").backend.name == "cpu"
    with pytest.raises(BackendError, match="computes in float16 or float32, not in bfloat16"):
        select("triton", PLAIN, "cpu", torch.bfloat16)
    with pytest.raises(BackendError, match="takes head sizes up to 256, not 257"):
        select("triton", layer(1, 1, 257), "cpu")


def test_splits_are_chosen_by_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """One long sequence is split where there are processors to spare, many are not."""
    chosen: list[int] = []
    monkeypatch.setattr(backend, "_chip", lambda _: H100)

    def spy(*arguments: object) -> int:
        chosen.append(choose_splits(*arguments))  # type: ignore[arg-type]
        return chosen[-1]

    monkeypatch.setattr(backend, "choose_splits", spy)
    long = layer(1, 1, 16)
    case = Case(spec=long, sequences=[(1400, 1)])
    torch.testing.assert_close(case.run(TritonBackend()), case.run(ReferenceBackend()), rtol=2e-5, atol=2e-5)
    tile = Tile(rows=16, tokens=4, heads=4, keys=64, warps=4, stages=5)
    assert chosen == [2]
    assert choose_splits(8, tile, 100_000, H100) == 33
    assert choose_splits(200, tile, 100_000, H100) == 1
    assert choose_splits(8, tile, 500, H100) == 1


@pytest.mark.parametrize(
    ("width", "cut"),
    [
        (1, (16, 0)),
        (16, (16, 0)),
        (24, (32, 0)),
        (64, (64, 0)),
        (80, (64, 32)),
        (96, (64, 32)),
        (112, (128, 0)),
        (128, (128, 0)),
        (192, (128, 64)),
        (256, (256, 0)),
    ],
)
def test_widths_are_cut_into_two_powers_of_two(width: int, cut: tuple[int, int]) -> None:
    assert parts(width) == cut


@pytest.mark.parametrize("chip", [A100, H100, B200], ids=lambda chip: str(chip.capability))
@pytest.mark.parametrize("width", [16, 64, 80, 96, 128, 192, 256])
def test_every_tile_fits_its_chip(chip: Chip, width: int) -> None:
    """The formula is checked against compiled kernels by `make kernels-aot`."""
    spec = layer(8, 2, width)
    for dtype, kv_dtypes in KV_DTYPES.items():
        for kv_dtype, rows in itertools.product(kv_dtypes, (1, 9, 512)):
            tile = choose_tile(spec, dtype, kv_dtype, rows, chip)
            assert tile.tokens * tile.heads <= tile.rows
            used = shared_bytes(spec, dtype, kv_dtype, tile.rows, tile.keys, tile.stages)
            assert used <= chip.shared_memory


def test_tiles_hold_as_many_rows_as_the_mean_sequence() -> None:
    spec = layer(32, 8, 128)
    rows = [choose_tile(spec, torch.bfloat16, torch.bfloat16, n, H100).rows for n in (1, 4, 5, 16, 32, 999)]
    assert rows == [16, 16, 32, 64, 128, 128]
