"""Keys that sequences have in common, attended to once by interpreted kernels, against the reference."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from triton_cases import EXAMPLES, Case, layer, mutated, quiet

from batchgen_kernels import AttentionSpec, shared_prefix
from batchgen_kernels.triton_kernels import TritonBackend, attend_kernel, backend
from batchgen_kernels.triton_kernels.tiles import A100, H100, INTERPRETER, sharing_cost

KV_DTYPES = {
    torch.float32: [torch.float32, torch.float16, torch.int8, torch.float8_e4m3fn],
    torch.float16: [torch.float16, torch.int8, torch.float8_e4m3fn],
}


@st.composite
def specs(draw: st.DrawFn) -> AttentionSpec:
    kv_heads = draw(st.integers(1, 2))
    width = draw(st.sampled_from([16, 24, 64, 80, 128, 192]))
    return layer(
        kv_heads * draw(st.sampled_from([1, 2, 3, 4, 7, 70])),
        kv_heads,
        width,
        draw(st.sampled_from([width, width, 16, 20])),
        scale=draw(st.sampled_from([width**-0.5, 0.3])),
        # Layers with a window attend as if nothing was said of groups.
        sliding_window=draw(st.sampled_from([None, None, None, 40])),
        softcap=draw(st.sampled_from([None, 5.0])),
        has_sinks=draw(st.booleans()),
    )


@st.composite
def cases(draw: st.DrawFn, dtype: torch.dtype) -> Case:
    block_size = draw(st.sampled_from([16, 32, 64]))
    sequences: list[tuple[int, int]] = []
    groups: list[tuple[list[int], int]] = []
    for _ in range(draw(st.integers(0, 3))):
        blocks, first = draw(st.integers(1, 176 // block_size)), len(sequences)
        own = draw(st.lists(st.integers(0, 70), min_size=1, max_size=5))
        sequences += [(blocks * block_size + n, 1) for n in own]
        groups.append((draw(st.permutations(range(first, len(sequences)))), blocks))
    others = st.tuples(st.integers(0, 90), st.just(1) | st.integers(2, 9))
    sequences += draw(st.lists(others, min_size=0 if sequences else 1, max_size=2))
    return Case(
        spec=draw(specs()),
        sequences=sequences,
        dtype=dtype,
        kv_dtype=draw(st.sampled_from(KV_DTYPES[dtype])),
        block_size=block_size,
        splits=draw(st.sampled_from([None, 2, 3])),
        fixed=draw(st.sampled_from([None, None, None, 64])),
        padding=draw(st.integers(0, 5)),
        chip=draw(st.sampled_from([INTERPRETER, A100, H100])),
        filler=draw(st.sampled_from(["large", "nan"])),
        groups=groups,
        empty=draw(st.integers(0, 2)),
        seed=draw(st.integers(0, 99)),
    )


def check(case: Case, least_keys: int = 32) -> None:
    """Compare with the reference; keys of groups are divided further than they would be.

    Sums that nobody has left are NaN, as they may be on a GPU.
    """
    allocate = backend._sums

    def never_written(*given: Any) -> Any:
        return tuple(tensor.fill_(float("nan")) for tensor in allocate(*given))

    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(backend, "_sums", never_written)
        for module in (backend, shared_prefix):
            monkeypatch.setattr(module, "LEAST_KEYS", least_keys)
        case.check(monkeypatch)


@settings(max_examples=EXAMPLES)
@given(cases(torch.float32))
def test_float32_equals_the_reference(case: Case) -> None:
    check(case)


@settings(max_examples=EXAMPLES)
@given(cases(torch.float16))
def test_float16_equals_the_reference(case: Case) -> None:
    check(case)


PLAIN = layer(4, 2, 16)
TWO = Case(spec=PLAIN, sequences=[(48, 1), (60, 1), (70, 1), (100, 1)], groups=[((0, 1), 3), ((3, 2), 4)])
WHOLE = replace(
    TWO,
    spec=layer(6, 2, 24, 80, softcap=2.0, has_sinks=True),
    sequences=[(5, 1), (48, 1), (180, 1), (2, 4), (176, 1), (60, 1)],
    groups=[((5, 1), 3), ((2, 4), 11)],
    kv_dtype=torch.int8,
    chip=H100,
)
EDGES = {
    "an own part of one key": replace(TWO, sequences=[(48, 1), (48, 1)], groups=[((0, 1), 3)]),
    "groups of one": replace(TWO, groups=[((0,), 2), ((3,), 1)]),
    "no group at all": replace(TWO, groups=[], empty=3),
    "a tile for one sequence": replace(TWO, spec=layer(70, 1, 16)),
    "more members than a tile has": Case(
        spec=layer(32, 1, 16), sequences=[(40 + i, 1) for i in range(5)], groups=[((4, 2, 0, 1, 3), 2)]
    ),
    "among prompts": replace(WHOLE, empty=2),
    "own keys divided too": replace(WHOLE, splits=3),
    "a window": replace(TWO, spec=replace(PLAIN, sliding_window=20)),
}


@pytest.mark.parametrize("name", EDGES)
def test_edges(name: str) -> None:
    check(EDGES[name])


def test_shared_keys_are_read_by_way_of_one_member_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the others' tables say of them is not looked at, so that it may be the null block, full of NaN."""
    case = replace(TWO, groups=[((0, 1), 3)], sequences=[(48, 1), (60, 1)], filler="nan")
    target = TritonBackend()
    kv, meta, query = case.cache(target), case.metadata, case.tensors()[0]
    want = target.attend(query, kv, meta, PLAIN)
    meta.block_table[1, :3] = 0
    monkeypatch.setattr(type(meta), "check", lambda *_: None)
    assert torch.equal(target.attend(query, kv, meta, PLAIN), want)
    with quiet():
        assert not target.attend(query, kv, replace(case, empty=None).metadata, PLAIN)[1].isnan().any()


def test_with_fixed_splits_and_windows_groups_change_no_bit() -> None:
    for target, spec in (
        (TritonBackend(fixed_split=64), PLAIN),
        (TritonBackend(), replace(PLAIN, sliding_window=20)),
    ):
        case = replace(TWO, spec=spec)
        assert torch.equal(case.run(target), replace(case, empty=None).run(target))
        assert target.sharing(spec, torch.float32, case.cache(target)) is None
    assert not torch.equal(TWO.run(TritonBackend()), replace(TWO, empty=None).run(TritonBackend()))


def test_what_is_not_finite_reaches_members_only() -> None:
    case = replace(TWO, groups=[((0, 1), 3)])
    target = TritonBackend()
    kv = case.cache(target)
    kv.key[case.tables[0][1], 0, 3] = float("nan")
    with quiet():
        got = target.attend(case.tensors()[0], kv, case.metadata, PLAIN)
    assert got.isnan().flatten(1).any(1).tolist() == [True, True, False, False]


def test_what_sharing_costs() -> None:
    """Of what is said of a layer and a chip in `test_shared_prefix.py`."""
    llama = layer(32, 8, 128)
    cost = shared_prefix.SharingCost(
        tile=16, key_bytes=4096, sum_bytes=8 * 32 * 128, columns=8, processors=132, bandwidth=3.35e12
    )
    assert sharing_cost(llama, torch.bfloat16, torch.bfloat16, H100) == cost
    eighth = replace(cost, key_bytes=8 * (256 + 8))
    assert sharing_cost(llama, torch.bfloat16, torch.int8, H100) == eighth
    # Of 70 heads that share keys a tile holds one sequence's: nothing would be saved.
    assert sharing_cost(layer(70, 1, 64), torch.bfloat16, torch.bfloat16, H100).tile == 1


MUTATIONS = {
    "the members' rows in the order of the step": (
        "step_row = tl.load(rows_ptr + member, mask=valid, other=0).to(tl.int64)",
        "step_row = (start + token).to(tl.int64)",
    ),
    "sums in the order of members": (
        "out_row = member.to(tl.int64) * HEADS + head",
        "out_row = (start + token).to(tl.int64) * HEADS + head",
    ),
    "the table of the first sequence": ("owner = tl.load(members_ptr + start)", "owner = 0 * seq"),
    "shared keys are seen twice": ("history = history - skipped", "history = history - 0 * skipped"),
    "own keys begin a block too early": ("table_row + skipped // BLOCK_SIZE", "table_row"),
    "a block of own keys is left out": (
        "table_row + skipped // BLOCK_SIZE",
        "table_row + skipped // BLOCK_SIZE + (skipped > 0)",
    ),
    "the last group is not looked for": ("tl.load(count_ptr)", "tl.load(count_ptr) - 1"),
    "a tile of shared keys is taken for whole": ("seen_by_all // BLOCK_N", "(seen_by_all + 63) // BLOCK_N"),
    "the last block of what is shared is left out": (
        "    end = history\n",
        "    end = history - (16 if SHARED else 0)\n",
    ),
    "sums are not picked up": ("for s in range(count):", "for s in range(count * 0):"),
    "the first of the sums alone is picked up": ("for s in range(count):", "for s in range(count // count):"),
    "the last of the sums is not picked up": ("(skipped + LEAST_KEYS - 1) //", "skipped //"),
    "every split picks them up": ("tl.where(split == 0, count, 0)", "count"),
    "those in no group pick sums up too": ("(skipped + LEAST_KEYS - 1) //", "(skipped + LEAST_KEYS) //"),
    "sums of another sequence": ("first_sum = seq.to(tl.int64) *", "first_sum = 0 * seq.to(tl.int64) *"),
    "sums are not weighed": ("part * gain[:, None]", "part"),
    "weights are not weighed": ("its_weight * gain", "its_weight"),
    "the second part of the sums is left out": (
        "sum2 = sum2 * fade[:, None] + part",
        "sum2 = sum2 + 0 * part",
    ),
    "splits overlap": ("low = low + split * share", "low = low + split * (share - 1)"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mistake_is_noticed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = mutated(attend_kernel, *MUTATIONS[name], tmp_path)
    for kernel in ("attend_kernel", "merge_kernel"):
        monkeypatch.setattr(backend, kernel, getattr(module, kernel))
    with pytest.raises(AssertionError, match=r"not close"):
        check(replace(WHOLE, splits=2))
