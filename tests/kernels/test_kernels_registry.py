"""Choosing a backend: by name, by itself, and what is said when it cannot be done."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from batchgen_kernels import CAPABILITIES, AttentionSpec, BackendError, select
from batchgen_kernels.registry import check_machine

FLOAT = torch.float32
KERNELS = Path(__file__).parents[2] / "kernels"
SPEC = AttentionSpec(num_heads=2, num_kv_heads=1, head_size=8, v_head_size=8, scale=1.0)


def test_auto_takes_the_first_that_can() -> None:
    assert select("auto", SPEC, "cpu").backend.name == "cpu"
    assert select("auto", SPEC, "cpu", torch.bfloat16, torch.int8).backend.name == "cpu"
    chosen = select("auto", [SPEC, SPEC], "cpu", torch.float64)
    assert chosen.backend.name == "reference"
    reason = "the cpu attention backend computes in bfloat16 or float16 or float32, not in float64"
    assert reason in chosen.reason


def test_a_name_is_obeyed_or_refused() -> None:
    assert select("reference", SPEC, "cpu").backend.name == "reference"
    with pytest.raises(
        BackendError,
        match="'fast' does not exist; use one of auto, cpu, triton, flash_attn, flash_attn_3, reference",
    ):
        select("fast", SPEC, "cpu")
    with pytest.raises(BackendError, match="not in float64; use 'auto'"):
        select("cpu", SPEC, "cpu", torch.float64)
    with pytest.raises(
        BackendError, match="of a bfloat16 model are stored as bfloat16 or fp8 or int8, not as float16"
    ):
        select("reference", SPEC, "cpu", torch.bfloat16, torch.float16)


def test_a_backend_of_another_device_says_so() -> None:
    reason = "the triton attention backend runs on cuda, not on cpu"
    with pytest.raises(BackendError, match=f"{reason}; use 'auto' or another backend"):
        select("triton", SPEC, "cpu")
    with pytest.raises(BackendError, match=reason):
        check_machine("triton", "cpu", FLOAT, FLOAT)
    with pytest.raises(BackendError, match="'fast' does not exist"):
        check_machine("fast", "cpu", FLOAT, FLOAT)
    check_machine("triton", "cuda", FLOAT, FLOAT)
    check_machine("auto", "cpu", FLOAT, FLOAT)
    with pytest.raises(BackendError, match=r"stores keys and values as .*, not as fp8; use 'auto'"):
        check_machine("cpu", "cpu", FLOAT, torch.float8_e4m3fn)


def test_a_backend_whose_package_is_missing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(BackendError, match="the triton attention backend needs triton, which is not inst"):
        check_machine("triton", "cuda", FLOAT, FLOAT)
    assert select("auto", SPEC, "cpu").backend.name == "reference"


def test_every_backend_agrees_with_the_table() -> None:
    for name, capability in CAPABILITIES.items():
        if "cpu" not in capability.devices:
            continue
        backend = select(name, SPEC, "cpu").backend
        assert backend.name == name
        for dtype in (torch.float32, torch.float16, torch.int8):
            for kv_dtype in (None, torch.float32, torch.float16, torch.int8):
                case = (SPEC, torch.device("cpu"), dtype, kv_dtype)
                assert backend.supports(*case) == capability.refusal(*case)


def test_the_table_of_what_keys_and_values_are_stored_as() -> None:
    """Every combination of model dtype, stored dtype, backend and device, written out."""
    names = {name: getattr(torch, name) for name in ("float32", "bfloat16", "float16", "int8")}
    names["fp8"] = torch.float8_e4m3fn
    narrow = ("int8", "fp8")
    allowed = {
        (backend, device, dtype, kv_dtype)
        for backend, device, dtype, kv_dtype in itertools.product(
            CAPABILITIES, ("cpu", "cuda"), ("float32", "bfloat16", "float16"), names
        )
        if CAPABILITIES[backend].refusal(SPEC, torch.device(device), names[dtype], names[kv_dtype]) is None
    }
    pairs = {
        *(("float32", kv_dtype) for kv_dtype in names),
        *(("bfloat16", kv_dtype) for kv_dtype in ("bfloat16", *narrow)),
        *(("float16", kv_dtype) for kv_dtype in ("float16", *narrow)),
    }
    places = {("cpu", "cpu"), ("triton", "cuda"), ("reference", "cpu"), ("reference", "cuda")}
    every = {(*place, *pair) for place in places for pair in pairs}
    assert allowed == {found for found in every if (found[0], found[3]) != ("cpu", "fp8")}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_heads": 3, "num_kv_heads": 2}, r"num_heads: 3 .* multiple of num_kv_heads \(2\)"),
        ({"head_size": 0}, "head_size: 0"),
        ({"scale": float("nan")}, "scale: nan"),
        ({"sliding_window": 0}, "sliding_window: 0"),
        ({"softcap": -1.0}, "softcap: -1.0"),
    ],
)
def test_a_spec_names_what_is_wrong(change: dict[str, float], message: str) -> None:
    fields = {"num_heads": 2, "num_kv_heads": 1, "head_size": 8, "v_head_size": 8, "scale": 1.0}
    with pytest.raises(ValueError, match=message):
        AttentionSpec(**(fields | change))


def test_importing_loads_no_compiler() -> None:
    code = "import sys, batchgen_kernels; print(sorted({'numba', 'triton', 'llvmlite'} & set(sys.modules)))"
    env = os.environ | {"PYTHONPATH": str(KERNELS)}
    run = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_the_source_root_is_no_package() -> None:
    """transformers imports the PyPI package named kernels; ours must never be found by that name."""
    assert not (KERNELS / "__init__.py").exists()
