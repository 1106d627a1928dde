"""Results have the same bits on a processor with narrower vectors; everything is compiled anew for it."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm
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
QUANTISED = """
import hashlib, json, torch
from batchgen_kernels.cpu.linear import Linear, pack, pack_gated
from batchgen_kernels.cpu.matmul import Epilogue, V
from batchgen_kernels.cpu.quantised_weights import quantised
from batchgen_kernels.cpu.records import HAS_DOT
torch.manual_seed(0)
x, w, v, bias = torch.randn(29, 150), torch.randn(50, 150), torch.randn(50, 150), torch.randn(50)
results = [
    Linear(quantised(pack(w, bias)))(x),
    Linear(quantised(pack_gated(w, v, Epilogue.SILU)))(x),
    Linear(quantised(pack(w, bias)))(1e30 * x),
]
digests = [hashlib.sha256(r.contiguous().numpy().tobytes()).hexdigest() for r in results]
print(json.dumps([[V.lanes, HAS_DOT], digests]))
"""
AVX_512 = "+avx2,+fma,+f16c,+avx512f,+avx512bw,+avx512vl,+avx512dq,+avx512cd"
INT8_PROCESSORS = [
    ("AVX2", "haswell", "+avx2,+fma,+f16c", (8, False), "avx2"),
    ("dot products of 256 bits", "haswell", "+avx2,+fma,+avx512vl,+avx512vnni", (8, True), "avx512vnni"),
    ("AVX-512 without dot products", "skylake-avx512", AVX_512, (16, False), "avx512bw"),
    ("no instructions for it", "x86-64", "+fma,+avx", (8, False), "fma"),
]
NARROW = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c"}
WITHOUT_F16C = {"NUMBA_CPU_NAME": "haswell", "NUMBA_CPU_FEATURES": "+avx2,+fma,-f16c"}


def digests(cache: Path, processor: dict[str, str], code: str = CODE) -> tuple[Any, list[str]]:
    path = os.pathsep.join(map(str, (ROOT, ROOT / "kernels", ROOT / "tests", HERE)))
    env = os.environ | processor | {"PYTHONPATH": path, "NUMBA_CACHE_DIR": str(cache)}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    rows, found = json.loads(run.stdout.splitlines()[-1])
    return rows, found


@pytest.mark.slow
def test_narrower_vectors_give_the_same_bits(tmp_path: Path) -> None:
    rows, here = digests(tmp_path / "a", {})
    assert rows in (6, 14)
    assert digests(tmp_path / "b", NARROW) == (6, here)
    assert digests(tmp_path / "c", WITHOUT_F16C) == (6, here)


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="these are x86's")
def test_every_kind_of_int8_instructions_gives_the_same_bits(tmp_path: Path) -> None:
    _, here = digests(tmp_path / "here", {}, QUANTISED)
    has = llvm.get_host_cpu_features()
    for name, processor, features, kind, needed in INT8_PROCESSORS:
        if has.get(needed):
            settings = {"NUMBA_CPU_NAME": processor, "NUMBA_CPU_FEATURES": features}
            assert digests(tmp_path / name, settings, QUANTISED) == (list(kind), here), name
