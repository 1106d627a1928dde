"""Steps of attention for the Triton backend and the reference, and how far their results may differ."""

from __future__ import annotations

import importlib.util
import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from batchgen_kernels import AttentionMetadata, AttentionSpec, KVCache
from batchgen_kernels.backend import allocate
from batchgen_kernels.reference import ReferenceBackend
from batchgen_kernels.shared_prefix import SharedGroup
from batchgen_kernels.triton_kernels import TritonBackend, backend
from batchgen_kernels.triton_kernels.tiles import INTERPRETER, Chip

assert os.environ.get("TRITON_INTERPRET") == "1", "run by tests/kernels/test_triton_interpreter.py"

CPU = torch.device("cpu")
EXAMPLES = int(os.environ.get("BATCHGEN_KERNELS", "10"))
"""Random shapes for each dtype of a test."""
LONG = "BATCHGEN_KERNELS" in os.environ
"""Larger shapes too: a run of its own, not one for each commit."""
FILLER = {"large": 6e4, "nan": float("nan")}
"""What memory holds that no row may see."""
FLOATS = (torch.float32, torch.float16)
_COUNT = itertools.count()
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3}


def quiet() -> np.errstate:
    """What the interpreter computes for absent rows, with numpy, is not a number now and then."""
    return np.errstate(all="ignore")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One step: `sequences` are (rows cached before, rows of this step).

    `splits` None leaves it to the formula; `fixed` is `fixed_split`; `chip` is the one that tiles are for.
    `groups` are sequences and how many blocks they begin with in common, `empty` further ones without any;
    None: these are not said to the kernel.
    """

    spec: AttentionSpec
    sequences: Sequence[tuple[int, int]]
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype = torch.float32
    block_size: int = 16
    splits: int | None = None
    fixed: int | None = None
    padding: int = 0
    spare_blocks: int = 0
    filler: str = "large"
    seed: int = 0
    sink: float = 0.0
    chip: Chip = INTERPRETER
    groups: Sequence[tuple[Sequence[int], int]] = ()
    empty: int | None = 0
    tables: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        g = torch.Generator().manual_seed(self.seed)
        counts = [-(-sum(n) // self.block_size) for n in self.sequences]
        free = (torch.randperm(sum(counts), generator=g) + 1).tolist()
        tables = [[free.pop() for _ in range(n)] + [0] * self.spare_blocks for n in counts]
        for members, blocks in self.groups:
            for s in members:
                tables[s][:blocks] = tables[members[0]][:blocks]
        object.__setattr__(self, "tables", tables)

    @property
    def metadata(self) -> AttentionMetadata:
        rows = [n for _, n in self.sequences]
        lens = [sum(n) for n in self.sequences]
        said: list[SharedGroup] = []
        if self.empty is not None:
            said = [SharedGroup(members, blocks * self.block_size) for members, blocks in self.groups]
            said[1:1] = [SharedGroup((), 0)] * self.empty
        return AttentionMetadata.build(
            rows, lens, self.tables, self.block_size, num_rows=sum(rows) + self.padding, groups=said
        )

    @property
    def sinks(self) -> torch.Tensor | None:
        if not self.spec.has_sinks:
            return None
        return torch.linspace(-2, 2, self.spec.num_heads).add(self.sink).to(self.dtype)

    def tensors(self) -> list[torch.Tensor]:
        """Query of the step, keys and values of whole sequences."""
        g = torch.Generator().manual_seed(self.seed)
        spec, total = self.spec, sum(map(sum, self.sequences))
        rows = sum(n for _, n in self.sequences) + self.padding
        sizes = [
            (rows, spec.num_heads, spec.head_size),
            (total, spec.num_kv_heads, spec.head_size),
            (total, spec.num_kv_heads, spec.v_head_size),
        ]
        query, key, value = (torch.randn(size, generator=g).to(self.dtype) for size in sizes)
        starts = list(itertools.accumulate(map(sum, self.sequences), initial=0))
        for (first, *others), blocks in self.groups:
            keys = blocks * self.block_size
            for vectors, s in itertools.product((key, value), others):
                vectors[starts[s] : starts[s] + keys] = vectors[starts[first] : starts[first] + keys]
        return [query, key, value]

    def cache(self, target: TritonBackend | ReferenceBackend) -> KVCache:
        """All sequences written, one of them after the other, among filler."""
        num_blocks = 1 + sum(map(len, self.tables))
        kv = allocate(target, self.spec, num_blocks, self.block_size, CPU, self.kv_dtype)
        for tensor in kv.tensors:
            number = FILLER[self.filler] if tensor.dtype in FLOATS else 77
            (tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor).fill_(number)
        lens = [sum(n) for n in self.sequences]
        meta = AttentionMetadata.build(lens, lens, self.tables, self.block_size)
        _, key, value = self.tensors()
        target.write(kv, key, value, meta)
        return kv

    def run(self, target: TritonBackend | ReferenceBackend) -> torch.Tensor:
        kv = self.cache(target)
        return target.attend(self.tensors()[0], kv, self.metadata, self.spec, self.sinks)

    def triton(self, monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
        if self.splits is not None:
            monkeypatch.setattr(backend, "choose_splits", lambda *_: self.splits)
        monkeypatch.setattr(backend, "_chip", lambda _: self.chip)
        with quiet():
            return self.run(TritonBackend(fixed_split=self.fixed))

    def check(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Compare with the reference."""
        got, want = self.triton(monkeypatch), self.run(ReferenceBackend())
        tolerance = TOLERANCE[self.dtype]
        assert got.dtype == self.dtype
        assert not got[self.metadata.num_tokens :].any()
        torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def mutated(module: ModuleType, old: str, new: str, folder: Path) -> Any:
    """A copy of a module of kernels with a mistake in it."""
    assert module.__file__ is not None
    source = Path(module.__file__).read_text()
    assert old in source, f"the kernels do not contain {old!r}"
    path = folder / f"mutated_{next(_COUNT)}.py"
    path.write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    copy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(copy)
    return copy


def layer(heads: int, kv_heads: int, width: int, v_width: int | None = None, **more: object) -> AttentionSpec:
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=width,
        v_head_size=v_width or width,
        scale=more.pop("scale", width**-0.5),  # type: ignore[arg-type]
        **more,  # type: ignore[arg-type]
    )
