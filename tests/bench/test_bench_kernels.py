"""Kernels by themselves: what is counted, that every case computes, and the table and file of the verb."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from batchgen.bench import kernel_cases, kernels
from batchgen.bench.kernel_cases import TINY_SIZES, KernelCase, Layer, attention_cases, layer_of
from batchgen.bench.kernels import Ceilings, of_ceilings
from batchgen.bench.stopwatch import Stopwatch
from batchgen.cli.main import main
from batchgen.models.dummy import folder
from batchgen.models.loader import load_config
from batchgen_kernels import AttentionSpec
from batchgen_kernels.reference import ReferenceBackend

Captured = pytest.CaptureFixture[str]
CPU = torch.device("cpu")
TINY = (
    "dummy:llama-3.1-8b?num_hidden_layers=1&hidden_size=64&intermediate_size=96&num_attention_heads=4"
    "&num_key_value_heads=2&head_dim=16&vocab_size=300"
)
SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_size=16, v_head_size=16, scale=0.25)


def test_a_layer_is_that_of_the_configuration() -> None:
    layer = layer_of(load_config(folder("dummy:llama-3.1-8b")))
    assert (layer.attention.num_heads, layer.attention.num_kv_heads, layer.attention.head_size) == (
        32,
        8,
        128,
    )
    assert (layer.hidden, layer.intermediate) == (4096, 14336)
    shapes = {(p.kind, p.in_features, p.out_features) for p in layer.products}
    assert shapes == {
        *(("qkv", 4096, 6144), ("output", 4096, 4096), ("gate_up", 4096, 28672)),
        *(("down", 14336, 4096), ("lm_head", 4096, 128256)),
    }
    # Experts are not counted, everything else of the model is.
    assert layer_of(load_config(folder("dummy:mixtral-8x7b"))).products == ()
    assert layer_of(load_config(folder("dummy:gemma3-27b"))).attention.num_kv_heads == 16


def test_bytes_and_operations_of_attention() -> None:
    cases = list(attention_cases(ReferenceBackend(), Layer(SPEC, 64, 96), TINY_SIZES, CPU, torch.float32))
    found = {(case.kernel, case.shape): case for case in cases}
    prompts = found["attend prompts", "2 x 9"]
    # 45 visible pairs each, two products of 16 for each of 4 heads; queries and outputs, keys and values.
    assert prompts.flop == 2 * 45 * 4 * 2 * 2 * 16
    assert prompts.bytes == 4 * (2 * 18 * 4 * 16 + 2 * 18 * 2 * 16)
    chunk = found["attend a chunk", "1 x 8 after 24"]
    assert chunk.flop == sum(range(25, 33)) * 4 * 2 * 2 * 16
    decoding = found["attend decoding", "3 x 1 after 40"]
    assert decoding.flop == 3 * 41 * 4 * 2 * 2 * 16
    assert decoding.bytes == 4 * (2 * 3 * 41 * 2 * 16 + 2 * 3 * 4 * 16)
    # A byte for each number and a scale for each token and head.
    eighth = found["attend decoding, int8 cache", "3 x 1 after 40"]
    assert eighth.bytes == 3 * 41 * 2 * (2 * 16 + 8) + 4 * 2 * 3 * 4 * 16
    assert found["write", "5 tokens"].bytes == 2 * 4 * 2 * 5 * 2 * 16
    for case in cases:
        out = case.run()
        assert out is None or bool(torch.as_tensor(out).isfinite().all()), case.kernel


def test_shares_of_the_ceilings() -> None:
    case = KernelCase("k", "s", "float32", lambda: None, bytes=100, flop=3000)
    found = of_ceilings(case, 4.0, Ceilings("d", "float32", copy_bandwidth=50.0, product_rate=1000.0))
    assert (found.bandwidth_share, found.product_share, found.share) == (0.5, 0.75, 0.75)


def test_calls_are_repeated_until_they_say_something() -> None:
    calls: list[int] = []
    assert Stopwatch(CPU).median(lambda: calls.append(1)) < 1
    assert len(calls) > 50
    calls.clear()
    Stopwatch(CPU, quick=True).median(lambda: calls.append(1))
    assert len(calls) == 3


def test_the_verb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels, "HOST_SIZES", TINY_SIZES)
    monkeypatch.setattr(kernels, "Stopwatch", lambda device, quick=False: Stopwatch(device, quick=True))
    monkeypatch.setattr(kernels, "_SIDE", {"cpu": 64})
    monkeypatch.setattr(kernels, "_COPIED", {"cpu": 1 << 16})
    file = tmp_path / "kernels.json"
    assert main(["bench", "--kernels", "--model", TINY, "--json", str(file)]) == 0
    figures = json.loads(file.read_text())
    assert figures["model"] == TINY
    assert figures["ceilings"]["copy_bandwidth"] > 0
    assert figures["machine"]["cores"] >= 1
    names = [kernel["kernel"] for kernel in figures["kernels"]]
    assert {"attend prompts", "attend decoding", "write", "qkv (ours)", "down (torch)"} <= set(names)
    assert all(kernel["seconds"] > 0 and kernel["share"] > 0 for kernel in figures["kernels"])
    said = capsys.readouterr()
    assert "of the limit" in said.out
    assert "lm_head (ours)" in said.out
    assert "attend decoding, 3 x 1 after 40: " in said.err


@pytest.mark.slow
def test_kernels_of_a_gpu_in_the_interpreter() -> None:
    """Every case of a GPU runs: shapes and arguments are right, times mean nothing."""
    code = f"""
import numpy as np, torch
np.seterr(all="ignore")
from batchgen.bench.kernels import cases_of, ceilings, lines, measure, report
from batchgen.bench.kernel_cases import TINY_SIZES, layer_of
from batchgen.models.dummy import folder
from batchgen.models.loader import load_config
cpu, layer = torch.device("cpu"), layer_of(load_config(folder({TINY!r})))
limits = ceilings(cpu, torch.float32, quick=True)
cases = cases_of(layer, cpu, torch.float32, TINY_SIZES, "triton")
print("\\n".join(lines(report("tiny", limits, measure(cases, limits, cpu, quick=True)))))
"""
    environment = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    for kernel in (
        "attend decoding, int8 cache",
        "rotate and write",
        "draw tokens",
        "gated activation",
        "norm with residual",
    ):
        assert kernel in done.stdout


def test_sizes_fit_a_gpu() -> None:
    layer = layer_of(load_config(folder("dummy:llama-3.1-8b")))
    bytes_of_token = 2 * 2 * layer.attention.num_kv_heads * layer.attention.head_size
    for count, before in kernel_cases.DEVICE_SIZES.decoding:
        assert count * before * bytes_of_token < 16 << 30
