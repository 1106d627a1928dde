"""Products of the deterministic mode: the bits of a row do not depend on how many rows there are.

The vendor's library takes another kernel for another number of rows, with other tiles or with the features
divided among processors, and so adds up in another order. Here the shape of a tile depends on the weights
alone, features are added up from the first to the last by one program, and rows that are missing from a tile
are zeros, which touch no other row. It costs speed where tiles are fewer than processors, or where larger
ones would read less.
"""

from __future__ import annotations

from typing import Any

import torch

from batchgen_kernels.triton_kernels.matmul_kernel import multiply_kernel
from batchgen_kernels.triton_kernels.tiles import power_of_two

ROWS = 64
"""Of a tile: what the tensor cores of 9.0 take at a time."""
WIDE = 8192
"""Outputs from which tiles of 128 of them are as many as a large chip's processors run at a time; else 64."""


def multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    out: torch.Tensor | None = None,
    factor: float | None = None,
) -> torch.Tensor:
    """x @ weight.T + bias, with sums in float32. Nothing waits for the device.

    Args:
        x: [T, K].
        weight: [N, K], of the same dtype.
        bias: [N], or None.
        out: [T, N] to write to, of the dtype of `x`; None: a new tensor.
        factor: add this times the result to what is in `out`; None replaces it.

    Raises:
        ValueError: a shape or a stride does not fit.
    """
    rows, width, outputs = *x.shape, len(weight)
    target = x.new_empty(rows, outputs) if out is None else out
    for name, tensor, shape in (
        ("x", x, (rows, width)),
        ("weight", weight, (outputs, width)),
        ("out", target, (rows, outputs)),
    ):
        if tuple(tensor.shape) != shape or tensor.stride(1) != 1 or tensor.dtype != x.dtype:
            got = f"{tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}"
            raise ValueError(
                f"a product takes {name} of {x.dtype} {shape} and neighbouring elements, not {got}"
            )
    if rows:
        constants = multiply_constants(width, outputs, x.dtype, bias=bias is not None, add=factor is not None)
        multiply_kernel[(-(-rows // ROWS), -(-outputs // constants["BLOCK_N"]))](
            target,
            x,
            weight,
            bias,
            rows,
            target.stride(0),
            x.stride(0),
            weight.stride(0),
            1.0 if factor is None else factor,
            **constants,
        )
    return target


def multiply_constants(
    width: int, outputs: int, dtype: torch.dtype, *, bias: bool, add: bool
) -> dict[str, Any]:
    """What `multiply_kernel` is compiled for, and triton's own options."""
    narrow = dtype.itemsize == 2
    return {
        "WIDTH": width,
        "OUT_WIDTH": outputs,
        "BIAS": bias,
        "ADD": add,
        "BLOCK_M": ROWS,
        "BLOCK_N": 128 if narrow and outputs >= WIDE else 64,
        "BLOCK_K": min(max(power_of_two(width), 16), 128 if narrow else 32),
        "num_warps": 4 if narrow else 8,
        "num_stages": 4 if narrow else 2,
        "enable_fp_fusion": True,
    }
