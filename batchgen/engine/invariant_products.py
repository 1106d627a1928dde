"""Products whose rows keep their bits however many there are, on a GPU, whose own library promises no such
thing."""

from __future__ import annotations

import functools
import importlib.util

import torch


def make_products_rowwise(model: torch.nn.Module) -> None:
    """Let linear layers on an NVIDIA GPU multiply by the kernel of `triton_kernels.matmul`; others stay."""
    for layer in model.modules():
        if isinstance(layer, torch.nn.Linear) and _has_kernel(layer.weight.device):
            vars(layer)["forward"] = functools.partial(_multiply, layer)


def _has_kernel(device: torch.device) -> bool:
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def _multiply(layer: torch.nn.Linear, x: torch.Tensor) -> torch.Tensor:
    from batchgen_kernels.triton_kernels.matmul import multiply

    rows = x.reshape(-1, x.shape[-1])
    return multiply(rows, layer.weight, layer.bias).view(*x.shape[:-1], -1)
