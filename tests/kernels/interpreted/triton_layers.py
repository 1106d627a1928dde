"""Norms, gated activations and rotary positions, interpreted, against plain torch and transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.activations import ACT2FN
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from triton_cases import CPU, EXAMPLES, TOLERANCE, layer, mutated, quiet

from batchgen_kernels import AttentionMetadata
from batchgen_kernels import layer_reference as reference
from batchgen_kernels.backend import allocate
from batchgen_kernels.triton_kernels import TritonBackend, layer_kernel, layers

DTYPES = [torch.float32, torch.float16]
STEP = {torch.float8_e4m3fn: 0.125}


def draw(seed: int, *sizes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=g).to(dtype) for size in sizes]


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    assert got.dtype == want.dtype
    tolerance = TOLERANCE[got.dtype]
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


@settings(max_examples=EXAMPLES * len(DTYPES))
@given(
    st.integers(0, 5),
    st.integers(1, 300),
    st.sampled_from(DTYPES),
    st.booleans(),
    st.booleans(),
    st.integers(0, 99),
)
def test_norms(rows: int, width: int, dtype: torch.dtype, add: bool, unit_offset: bool, seed: int) -> None:
    x, residual, packed = draw(seed, (rows, width), (rows, width), (rows, 2 * width), dtype=dtype)
    (weight,) = draw(seed + 1, (width,), dtype=dtype)
    x = x if seed % 2 else packed[:, width:]
    given_residual = residual if add else None
    got = layers.rms_norm(x, weight, 1e-5, residual=given_residual, unit_offset=unit_offset)
    want = reference.rms_norm(x, weight, 1e-5, residual=given_residual, unit_offset=unit_offset)
    close(got[0], want[0])
    assert torch.equal(got[1], want[1])


@settings(max_examples=EXAMPLES * len(DTYPES))
@given(
    st.integers(0, 4),
    st.sampled_from([1, 24, 1023, 1024, 1025, 2100]),
    st.sampled_from(DTYPES),
    st.sampled_from(reference.ACTIVATIONS),
    st.sampled_from([1.0, 30.0, 200.0]),
    st.integers(0, 99),
)
def test_gated_activations(
    rows: int, width: int, dtype: torch.dtype, activation: str, size: float, seed: int
) -> None:
    (packed,) = draw(seed, (rows, 2 * width), dtype=dtype)
    gate, up = (packed * size).chunk(2, -1)
    with quiet():
        got = layers.gated(gate, up / size, activation)
    close(got, reference.gated(gate, up / size, activation))


@settings(max_examples=EXAMPLES * len(DTYPES))
@given(
    st.integers(1, 20),
    st.sampled_from([(16, 16, 16), (80, 80, 20), (80, 32, 80), (24, 12, 24), (128, 128, 64)]),
    st.sampled_from([(1, 1), (3, 1), (4, 2)]),
    st.sampled_from([(a, b) for a in DTYPES for b in (a, torch.float16, torch.int8, torch.float8_e4m3fn)]),
    st.integers(0, 99),
)
def test_rotated_keys_are_what_two_steps_store(
    rows: int,
    widths: tuple[int, int, int],
    heads: tuple[int, int],
    dtypes: tuple[torch.dtype, torch.dtype],
    seed: int,
) -> None:
    (width, turned, v_width), (dtype, kv_dtype) = widths, dtypes
    spec, backend = layer(*heads, width, v_width), TritonBackend()
    query, key, value = draw(
        seed, (rows, heads[0], width), (rows, heads[1], width), (rows, heads[1], v_width), dtype=dtype
    )
    angles = torch.arange(rows).unsqueeze(1) * torch.linspace(0.1, 1, turned)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    if seed % 5 == 0:
        key[rows // 2, 0, seed % width] = float("nan")
    meta = AttentionMetadata.build([rows], [rows], [[3, 1, 2]], 16)
    meta.slot_mapping[rows // 3] = -1
    fused, apart = (allocate(backend, spec, 4, 16, CPU, kv_dtype) for _ in range(2))
    with quiet():
        got = layers.rotate_and_write(query, key, value, cos, sin, fused, meta)
        backend.write(apart, reference.rotate(key, cos, sin), value, meta)
    close(got, reference.rotate(query, cos, sin))
    for a, b in zip(fused.tensors, apart.tensors, strict=True):
        # A product and a sum of the rotation may be one rounding or two: then a step may be another.
        torch.testing.assert_close(
            a.float(),
            b.float(),
            rtol=STEP.get(a.dtype, 2e-3),
            atol=1.0 if a.dtype == torch.int8 else 2e-3,
            equal_nan=True,
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_reference_is_transformers(dtype: torch.dtype) -> None:
    x, weight, residual = draw(0, (5, 48), (48,), (5, 48), dtype=dtype)
    for norm, unit_offset in ((LlamaRMSNorm(48, 1e-5), False), (Gemma2RMSNorm(48, 1e-5), True)):
        norm.weight.data = weight
        got, total = reference.rms_norm(x, weight, 1e-5, residual=residual, unit_offset=unit_offset)
        assert torch.equal(total, x + residual)
        close(got, norm(total))
    for name, theirs in (("silu", "silu"), ("gelu_tanh", "gelu_pytorch_tanh")):
        close(reference.gated(x, residual, name), ACT2FN[theirs](x) * residual)
    query, angle = draw(1, (5, 3, 48), (5, 24), dtype=dtype)
    angle = torch.cat([angle, angle], -1)
    cos, sin = angle.cos(), angle.sin()
    want, _ = apply_rotary_pos_emb(
        query.transpose(0, 1)[None], query.transpose(0, 1)[None], cos[None], sin[None]
    )
    close(reference.rotate(query, cos, sin), want[0].transpose(0, 1))


@settings(max_examples=EXAMPLES * len(DTYPES))
@given(
    st.integers(1, 20),
    st.sampled_from([(16, 16), (80, 20), (24, 12), (128, 128)]),
    st.sampled_from([(1, 1), (3, 1), (4, 2)]),
    st.sampled_from(DTYPES),
    st.booleans(),
    st.integers(0, 99),
)
def test_heads_are_normalised_before_they_are_rotated(
    rows: int,
    widths: tuple[int, int],
    heads: tuple[int, int],
    dtype: torch.dtype,
    unit_offset: bool,
    seed: int,
) -> None:
    (width, turned), backend = widths, TritonBackend()
    spec = layer(*heads, width)
    packed, *weights = draw(seed, (rows, (heads[0] + 2 * heads[1]) * width), (width,), (width,), dtype=dtype)
    norms = layers.HeadNorms(*weights, 1e-5, unit_offset)
    query, key, value = packed.view(rows, -1, width).split([heads[0], heads[1], heads[1]], 1)
    angles = torch.arange(rows).unsqueeze(1) * torch.linspace(0.1, 1, turned)
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    meta = AttentionMetadata.build([rows], [rows], [[3, 1]], 16)
    fused, apart = (allocate(backend, spec, 4, 16, CPU, dtype) for _ in range(2))
    out = torch.full((rows, heads[0], width), 7, dtype=dtype)
    with quiet():
        got = layers.rotate_and_write(query, key, value, cos, sin, fused, meta, norms=norms, out=out)
    assert got.data_ptr() == out.data_ptr()

    def apply(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        normed, _ = reference.rms_norm(x.flatten(0, 1), weight, 1e-5, unit_offset=unit_offset)
        return reference.rotate(normed.view(x.shape), cos, sin)

    backend.write(apart, apply(key, weights[1]), value, meta)
    close(got, apply(query, weights[0]))
    for a, b in zip(fused.tensors, apart.tensors, strict=True):
        close(a, b)


def test_what_does_not_fit_is_refused() -> None:
    x = torch.ones(3, 8)
    with pytest.raises(ValueError, match=r"over 8 elements has shape \(7,\)"):
        layers.rms_norm(x, torch.ones(7), 1e-5)
    with pytest.raises(ValueError, match=r"residual has shape \(3, 7\), not \(3, 8\)"):
        layers.rms_norm(x, torch.ones(8), 1e-5, residual=x[:, :7])
    with pytest.raises(ValueError, match="'relu' is not allowed; use silu or gelu_tanh"):
        layers.gated(x, x, "relu")
    kv = allocate(TritonBackend(), layer(1, 1, 16), 2, 16, CPU, torch.float32)
    meta = AttentionMetadata.build([3], [3], [[1]], 16)
    rows, angles = torch.ones(3, 1, 16), torch.ones(3, 7)
    with pytest.raises(ValueError, match="7 of 16 elements cannot be rotated in pairs"):
        layers.rotate_and_write(rows, rows, rows, angles, angles, kv, meta)
    norms = layers.HeadNorms(torch.ones(16), torch.ones(8), 1e-5)
    with pytest.raises(ValueError, match=r"key norm of heads of 16 elements has shape \(8,\)"):
        layers.rotate_and_write(rows, rows, rows, angles[:, :6], angles[:, :6], kv, meta, norms=norms)
    with pytest.raises(ValueError, match=r"out is torch.float32 \(3, 9\), not a contiguous torch.float32"):
        layers.gated(x, x, "silu", out=torch.ones(3, 9))


MUTATIONS = {
    "the mean is of the padded row": ("tl.sum(x * x, 0) / WIDTH", "tl.sum(x * x, 0) / BLOCK"),
    "the residual is left out": ("x = (x.to(tl.float32) + residual.to(tl.float32)).to(dtype)", "pass"),
    "the weight has no 1 added": ("x = x * (1 + weight)", "x = x * weight"),
    "silu without its gate": ("inside = x\n", "inside = 0 * x\n"),
    "gelu is silu": ("inside = 1.5957691216057308 * (x + 0.044715 * x * x * x)", "inside = x"),
    "keys turn the other way": ("x1 * cos1 - x2 * sin1", "x1 * cos1 + x2 * sin1"),
    "what is not turned is lost": (
        "2 * HALF, REST, BLOCK_REST)\n    if NORM",
        "0, REST, BLOCK_REST)\n    if NORM",
    ),
    "heads are divided by another mean": ("squares / HEAD_SIZE", "squares / HALF"),
    "what is not turned is not normalised": (
        "2 * HALF, REST, BLOCK_REST).to(dtype)",
        "2 * HALF, 0, BLOCK_REST).to(dtype)",
    ),
    "keys are normalised as queries": ("norm_ptr = key_norm_ptr", "norm_ptr = query_norm_ptr"),
    "values of another head": ("+ head * value_head_stride", "+ 0 * value_head_stride"),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_mistake_is_noticed(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = MUTATIONS[name]
    module = mutated(layer_kernel, old, new, tmp_path)
    for kernel in ("rms_norm_kernel", "gated_kernel", "rotate_and_write_kernel"):
        monkeypatch.setattr(layers, kernel, getattr(module, kernel))
    with quiet(), pytest.raises(AssertionError):
        _all_once()


def _all_once() -> None:
    test_norms.hypothesis.inner_test(3, 40, torch.float32, True, True, 1)
    for activation in reference.ACTIVATIONS:
        test_gated_activations.hypothesis.inner_test(2, 24, torch.float32, activation, 1.0, 0)
    test_rotated_keys_are_what_two_steps_store.hypothesis.inner_test(
        5, (80, 32, 80), (4, 2), (torch.float32, torch.float32), 1
    )
    for unit_offset in (False, True):
        test_heads_are_normalised_before_they_are_rotated.hypothesis.inner_test(
            3, (80, 20), (4, 2), torch.float32, unit_offset, 0
        )


def test_the_kernels_themselves_pass() -> None:
    _all_once()
