"""Launches of the kernels around attention: norms, gated activations, rotary positions with the write.

Each does what `layer_reference.py` and the backend's `write` do, in one pass over memory instead of several.
None of them waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from batchgen_kernels.backend import KVCache
from batchgen_kernels.layer_reference import ACTIVATIONS
from batchgen_kernels.metadata import AttentionMetadata
from batchgen_kernels.storage import LARGEST
from batchgen_kernels.triton_kernels.backend import bytes_of
from batchgen_kernels.triton_kernels.layer_kernel import (
    gated_kernel,
    rms_norm_kernel,
    rotate_and_write_kernel,
)
from batchgen_kernels.triton_kernels.tiles import SMALLEST_TILE, WRITE_ROWS, power_of_two

GATED_BLOCK = 1024
"""Elements of a program of `gated_kernel`."""


@dataclass(frozen=True, slots=True)
class HeadNorms:
    """Norms of each query head and of each key head, as `layer_reference.rms_norm` computes them.

    Args:
        query: weights of a query head, [head_size].
        key: of a key head, [head_size].
        eps: added to the mean squares.
        unit_offset: weights count from 1.
    """

    query: torch.Tensor
    key: torch.Tensor
    eps: float
    unit_offset: bool = False


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    residual: torch.Tensor | None = None,
    unit_offset: bool = False,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `layer_reference.rms_norm`; normalised rows go to `out`, contiguous and as `x`, if it is given.

    Raises:
        ValueError: a shape does not fit.
    """
    x = _rows("x", x, x.shape)
    width = int(x.shape[1])
    if tuple(weight.shape) != (width,):
        raise ValueError(f"the weight of a norm over {width} elements has shape {tuple(weight.shape)}")
    if residual is not None:
        residual = _rows("residual", residual, x.shape)
    out = _target(x, x.shape, out)
    total = x if residual is None else x.new_empty(x.shape)
    if len(x):
        rms_norm_kernel[(len(x),)](
            out,
            None if residual is None else total,
            x,
            residual,
            weight.contiguous(),
            x.stride(0),
            0 if residual is None else residual.stride(0),
            eps,
            **norm_constants(width, add=residual is not None, unit_offset=unit_offset),
        )
    return out, total


def gated(
    gate: torch.Tensor, up: torch.Tensor, activation: str, out: torch.Tensor | None = None
) -> torch.Tensor:
    """See `layer_reference.gated`; both may be halves of one packed product, `out` as of `rms_norm`.

    Raises:
        ValueError: a shape does not fit, or the activation is unknown.
    """
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation: {activation!r} is not allowed; use {' or '.join(ACTIVATIONS)}")
    gate = _rows("gate", gate, gate.shape)
    up = _rows("up", up, gate.shape)
    out = _target(gate, gate.shape, out)
    rows, width = gate.shape
    if rows:
        gated_kernel[(rows, -(-width // GATED_BLOCK))](
            out, gate, up, gate.stride(0), up.stride(0), **gated_constants(width, activation)
        )
    return out


def rotate_and_write(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    kv: KVCache,
    meta: AttentionMetadata,
    *,
    norms: HeadNorms | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Rotate queries and keys by their positions, and store keys and values.

    Args:
        query: [T, num_heads, head_size].
        key: [T, num_kv_heads, head_size], of the same dtype.
        value: [T, num_kv_heads, v_head_size].
        cos: [T, R], R even and at most head_size; see `layer_reference.rotate`.
        sin: the same.
        kv: a cache of `TritonBackend`.
        meta: of the step.
        norms: of heads, before they are rotated.
        out: where the queries go, contiguous; None for memory of their own.

    Returns:
        The rotated queries.

    Raises:
        ValueError: a shape does not fit.
    """
    heads, width = int(query.shape[1]), int(query.shape[2])
    kv_heads, v_width, turned = int(kv.key.shape[1]), int(kv.value.shape[3]), int(cos.shape[1])
    rows = meta.num_rows
    query = _rows("query", query, (rows, heads, int(kv.key.shape[3])))
    key = _rows("key", key, (rows, kv_heads, width))
    value = _rows("value", value, (rows, kv_heads, v_width))
    cos, sin = (_rows(name, x, (rows, turned)).contiguous() for name, x in (("cos", cos), ("sin", sin)))
    if turned % 2 or not 0 < turned <= width:
        raise ValueError(f"{turned} of {width} elements cannot be rotated in pairs")
    if norms is not None:
        _check_head_norms(norms, width)
    out = _target(query, query.shape, out)
    scale_pages = (0, 0)
    if kv.key_scale is not None and kv.value_scale is not None:
        scale_pages = (kv.key_scale.stride(0), kv.value_scale.stride(0))
    if rows:
        rotate_and_write_kernel[(-(-rows // WRITE_ROWS), heads + kv_heads)](
            out,
            query,
            key,
            value,
            None if norms is None else norms.query.contiguous(),
            None if norms is None else norms.key.contiguous(),
            cos,
            sin,
            bytes_of(kv.key),
            bytes_of(kv.value),
            kv.key_scale,
            kv.value_scale,
            meta.slot_mapping,
            rows,
            query.stride(0),
            query.stride(1),
            key.stride(0),
            key.stride(1),
            value.stride(0),
            value.stride(1),
            turned,
            kv.key.stride(0),
            kv.value.stride(0),
            *scale_pages,
            0.0 if norms is None else norms.eps,
            **rotate_constants(heads, width, turned, kv, norms),
        )
    return out


def norm_constants(width: int, *, add: bool, unit_offset: bool) -> dict[str, Any]:
    """What `rms_norm_kernel` is compiled for; a row is held in registers, 16 elements a thread."""
    block = power_of_two(width)
    return {
        "WIDTH": width,
        "BLOCK": block,
        "ADD": add,
        "UNIT_OFFSET": unit_offset,
        "num_warps": min(max(block // 512, 1), 16),
        "num_stages": 1,
        "enable_fp_fusion": True,
    }


def gated_constants(width: int, activation: str) -> dict[str, Any]:
    """The same for `gated_kernel`."""
    return {
        "WIDTH": width,
        "BLOCK": GATED_BLOCK,
        "GELU": activation == "gelu_tanh",
        "num_warps": 4,
        "num_stages": 1,
        "enable_fp_fusion": True,
    }


def rotate_constants(
    heads: int, width: int, turned: int, kv: KVCache, norms: HeadNorms | None = None
) -> dict[str, Any]:
    """The same for `rotate_and_write_kernel`."""
    v_width = int(kv.value.shape[3])
    return {
        "HEADS": heads,
        "HEAD_SIZE": width,
        "V_HEAD_SIZE": v_width,
        "HALF": turned // 2,
        "BLOCK_HALF": max(power_of_two(turned // 2), SMALLEST_TILE),
        "REST": width - turned,
        "BLOCK_REST": max(power_of_two(width - turned), SMALLEST_TILE),
        "BLOCK_V": max(power_of_two(v_width), SMALLEST_TILE),
        "BLOCK_SIZE": kv.block_size,
        "ROWS": WRITE_ROWS,
        "NORM": norms is not None,
        "UNIT_OFFSET": norms is not None and norms.unit_offset,
        "SCALED": kv.dtype in LARGEST,
        "FP8": kv.dtype == torch.float8_e4m3fn,
        "num_warps": 4,
        "num_stages": 1,
        "enable_fp_fusion": False,
    }


def _rows(name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """`tensor` with neighbouring elements, refused unless it has the right shape."""
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}, not {tuple(shape)}")
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _target(x: torch.Tensor, shape: tuple[int, ...], out: torch.Tensor | None) -> torch.Tensor:
    """`out`, refused unless it has the right shape and no gaps, or memory of its own."""
    if out is None:
        return x.new_empty(shape)
    if tuple(out.shape) != tuple(shape) or out.dtype != x.dtype or not out.is_contiguous():
        raise ValueError(f"out is {out.dtype} {tuple(out.shape)}, not a contiguous {x.dtype} {tuple(shape)}")
    return out


def _check_head_norms(norms: HeadNorms, width: int) -> None:
    for name, weight in (("query", norms.query), ("key", norms.key)):
        if tuple(weight.shape) != (width,):
            raise ValueError(f"the {name} norm of heads of {width} elements has shape {tuple(weight.shape)}")
