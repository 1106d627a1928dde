"""What the comparison with the reference is worth: each mistake in the kernels must be seen by it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from triton_cases import Case, layer, mutated

from batchgen_kernels.triton_kernels import attend_kernel as original
from batchgen_kernels.triton_kernels import backend
from batchgen_kernels.triton_kernels.tiles import A100

FULL = Case(
    spec=layer(6, 2, 80, sliding_window=37, softcap=2.0, has_sinks=True),
    sequences=[(60, 5), (3, 1)],
    kv_dtype=torch.int8,
)
SPLIT = Case(spec=layer(6, 2, 24, sliding_window=50, has_sinks=True), sequences=[(90, 2), (3, 1)], splits=3)
FP8 = Case(
    spec=layer(3, 1, 80), sequences=[(30, 2)], dtype=torch.float16, kv_dtype=torch.float8_e4m3fn, chip=A100
)
DIAGONAL = Case(spec=layer(4, 2, 16), sequences=[(94, 3)])
SINGLE = Case(spec=layer(4, 2, 16), sequences=[(20, 1), (3, 1), (50, 1)])
BLOCKS = Case(spec=layer(2, 2, 16), sequences=[(70, 6)], block_size=64)

MUTATIONS = {
    "a key of its own place is hidden": (FULL, "[None, :] <= position", "[None, :] < position"),
    "a row sees the next key": (FULL, "<= position[:, None])", "<= position[:, None] + 1)"),
    "the window is one longer": (FULL, "> position[:, None] - WINDOW", ">= position[:, None] - WINDOW"),
    "the window is one shorter": (FULL, "> position[:, None] - WINDOW", "> position[:, None] - WINDOW + 1"),
    "the first key of the window is not read": (FULL, "first - WINDOW + 1, 0)", "first - WINDOW + 2, 0)"),
    "the wrong KV head": (FULL, "place = kv_head * BLOCK_SIZE + place", "place = place + 0"),
    "the wrong query head": (FULL, "head = kv_head * GROUP + group_head", "head = group_head"),
    "the last key tile is left out": (
        BLOCKS,
        "high = (end + BLOCK_N - 1) // BLOCK_N",
        "high = end // BLOCK_N",
    ),
    "no sinks": (FULL, "weight = weight * fade + tl.exp2(sink - larger)", "weight = weight * fade"),
    "no softcap": (
        FULL,
        "scores = cap * (1 - 2 / (1 + tl.exp2(scores * factor)))",
        "scores = scores * factor",
    ),
    "a row is another sequence's": (SINGLE, "        seq = tile\n", "        seq = num_seqs - 1 - tile\n"),
    "a row is in another's place": (
        SINGLE,
        "        start = tile\n",
        "        start = num_seqs - 1 - tile\n",
    ),
    "a tile is taken for whole": (
        DIAGONAL,
        "seen_by_all = history + first + 1",
        "seen_by_all = history + first + 2",
    ),
    "whole tiles are left out": (DIAGONAL, "whole if rest else low", "whole if rest else whole"),
    "the scale is left out": (DIAGONAL, "unit = 1.0 if SOFTCAP else factor", "unit = 1.0"),
    "no key scale": (FULL, "scores = scores * key_scale[None, :]", "pass"),
    "no value scale": (FULL, "probability = probability * value_scale[None, :]", "pass"),
    "the second part of the keys is left out": (FULL, "tl.dot(query2, ", "tl.dot(query2 * 0, "),
    "the second part of the values is left out": (FULL, "sum2 = sum2 / weight[:, None]", "sum2 = sum2 * 0"),
    "sums do not fade": (FULL, "sum1 * fade[:, None], input", "sum1, input"),
    "the weight does not fade": (FULL, "weight * fade + tl.sum", "weight + tl.sum"),
    "a place in the wrong half of its block": (BLOCKS, "n * BLOCK_N % BLOCK_SIZE + column", "column"),
    "rows of a chunk are placed as the first": (
        FULL,
        "history = history - num_rows",
        "history = history * 0",
    ),
    "no value scale in float16": (FP8, "tl.float32, FP8) * value_scale[:, None]", "tl.float32, FP8)"),
    "the exponent of fp8 is one off": (FP8, "bitcast=True) * 256.0", "bitcast=True) * 128.0"),
    "fp8 has no sign": (FP8, "((bits & 0x80) << 8) | ", ""),
    "splits overlap": (SPLIT, "low = low + split * share", "low = low + split * (share - 1)"),
    "splits are not weighed": (SPLIT, "total += partial * factor[:, None]", "total += partial"),
    "no sinks where there are splits": (SPLIT, "weight = tl.exp2(sink - largest)", "pass"),
}


@pytest.mark.parametrize("case", [FULL, SPLIT, FP8, DIAGONAL, SINGLE, BLOCKS])
def test_the_kernel_itself_passes(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    case.check(monkeypatch)


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mistake_is_noticed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    case, old, new = MUTATIONS[name]
    module = mutated(original, old, new, tmp_path)
    for kernel in ("attend_kernel", "merge_kernel"):
        monkeypatch.setattr(backend, kernel, getattr(module, kernel))
    with pytest.raises(AssertionError, match="not close"):
        case.check(monkeypatch)
