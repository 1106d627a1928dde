"""Weights as int8, packed for `quantised.py`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from batchgen_kernels.cpu.linear import PackedWeights, quantise, scaled
from batchgen_kernels.cpu.matmul import PANEL, Matmul
from batchgen_kernels.cpu.program import CODE, FIELDS, Code, Program
from batchgen_kernels.cpu.quantised import STEP
from batchgen_kernels.cpu.records import GROUP, ITEM, OFFSET, ORDER, record_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedWeights(PackedWeights):
    """Weights of one product, or of two whose results are combined.

    Args:
        panels: `(P, groups, GROUP / STEP, PANEL, STEP)` uint8.
        scales: `(P, groups, PANEL)` float32.
        features: of the input.
        balance: `(features,)` float32 that inputs are multiplied by first, or None.
    """

    scales: torch.Tensor
    features: int
    balance: torch.Tensor | None = None

    @property
    def in_features(self) -> int:
        """Of the input."""
        return self.features

    @property
    def quantised(self) -> bool:
        """The product takes records."""
        return True

    def tensors(self) -> list[torch.Tensor]:
        """All that is kept."""
        # Without arguments, super() does not know a class that has slots.
        balance = [] if self.balance is None else [self.balance]
        return [*PackedWeights.tensors(self), self.scales, *balance]

    def balanced(self, rows: torch.Tensor) -> torch.Tensor:
        """What is multiplied in the place of `(R, in_features)` rows."""
        if self.balance is None:
            return rows
        # torch would wake its other threads for this.
        return torch.from_numpy(rows.detach().numpy() * self.balance.numpy())

    def describe(self, operation: npt.NDArray[np.int64]) -> None:
        """Fill in what does not change between calls."""
        PackedWeights.describe(self, operation)
        operation[CODE] = Code.QUANTISED_MATMUL
        operation[Matmul.SCALES] = self.scales.data_ptr()


def quantise_weights(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Turn and quantise weights as rows of activations are.

    Args:
        weight: `(out_features, in_features)` float32.

    Returns:
        `(out_features, groups, GROUP)` int8 and `(out_features, groups)` float32 scales, which hold the
        factor of 1 / GROUP that turning weights and activations takes. A group with a weight that is not
        finite has such a scale.
    """
    weight = weight.contiguous()
    rows, groups = len(weight), -(-weight.shape[1] // GROUP)
    records = torch.empty(rows, record_bytes(weight.shape[1]), dtype=torch.uint8)
    operations = np.zeros((1, FIELDS), dtype=np.int64)
    quantise(operations[0], weight, records)
    Program(operations, quantised=True).run(torch.get_num_threads())
    size = groups * GROUP * ITEM
    numbers = records[:, :size].contiguous().view(torch.int8 if ITEM == 1 else torch.int16)
    ordered = numbers.view(rows, -1, len(ORDER))[:, :, list(ORDER)]
    scales = records[:, size : size + 4 * groups].contiguous().view(torch.float32)
    return ordered.to(torch.int8).view(rows, groups, GROUP), scales / GROUP


def quantised(weights: PackedWeights, balance: torch.Tensor | None = None) -> QuantisedWeights:
    """The same product with weights in int8.

    Args:
        weights: in float32.
        balance: `(in_features,)` float32 that inputs are to be multiplied by, and weights are divided by.
    """
    if balance is not None:
        weights = scaled(weights, 1 / balance)
    q, scales = quantise_weights(weights.panels.transpose(1, 2).flatten(0, 1))
    groups = q.shape[1]
    steps = (q.view(torch.uint8) ^ OFFSET).view(-1, PANEL, groups, GROUP // STEP, STEP)
    return QuantisedWeights(
        panels=steps.permute(0, 2, 3, 1, 4).contiguous(),
        bias=weights.bias,
        out_features=weights.out_features,
        epilogue=weights.epilogue,
        scales=scales.view(-1, PANEL, groups).transpose(1, 2).contiguous(),
        features=weights.in_features,
        balance=balance,
    )
