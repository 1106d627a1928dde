"""Results have the same bits on a processor with narrower vectors; everything is compiled anew for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CODE = """
import hashlib, json, torch
from dataclasses import replace
from test_kernels_cpu import BASE, History, whole
from batchgen_kernels.cpu.backend import CpuBackend
from batchgen_kernels.cpu.linear import Linear, pack, pack_gated
from batchgen_kernels.cpu.matmul import Epilogue, ROWS
from batchgen_kernels.cpu.rows import LANES
torch.manual_seed(0)
x, w, v, bias = torch.randn(29, 77), torch.randn(50, 77), torch.randn(50, 77), torch.randn(50)
results = [
    Linear(pack(w, bias))(x),
    Linear(pack_gated(w, v, Epilogue.SILU))(x),
    Linear(pack_gated(w, v, Epilogue.GELU_TANH))(x),
    whole(CpuBackend(), BASE, History.make(BASE, 150, 1)),
    whole(CpuBackend(), replace(BASE, softcap=5.0), History.make(BASE, 150, 1)),
    whole(CpuBackend(), BASE, History.make(BASE, 150, 1), kv_dtype=torch.float16),
]
digests = [hashlib.sha256(r.contiguous().numpy().tobytes()).hexdigest() for r in results]
print(json.dumps([ROWS, digests]))
"""
NARROW = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c"}
WITHOUT_F16C = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma,-f16c"}


def digests(cache: Path, processor: dict[str, str]) -> tuple[int, list[str]]:
    path = os.pathsep.join(map(str, (ROOT, ROOT / "kernels", ROOT / "tests", HERE)))
    env = os.environ | processor | {"PYTHONPATH": path, "NUMBA_CACHE_DIR": str(cache)}
    run = subprocess.run([sys.executable, "-c", CODE], env=env, capture_output=True, text=True, check=True)
    rows, found = json.loads(run.stdout.splitlines()[-1])
    return rows, found


@pytest.mark.slow
def test_narrower_vectors_give_the_same_bits(tmp_path: Path) -> None:
    rows, here = digests(tmp_path / "a", {})
    assert rows in (6, 14)
    assert digests(tmp_path / "b", NARROW) == (6, here)
    assert digests(tmp_path / "c", WITHOUT_F16C) == (6, here)
