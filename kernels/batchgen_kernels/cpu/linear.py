"""Weights packed for `matmul.py`, and products with them one at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from batchgen_kernels.cpu.matmul import ALIGNMENT, PANEL, ROWS, Epilogue, Matmul
from batchgen_kernels.cpu.program import CHUNKS, CODE, FIELDS, Code, Program
from batchgen_kernels.cpu.records import Quantise, record_bytes

ROWS_PER_CHUNK = 16
"""Of what is done to each row by itself."""
_CHUNKS_PER_THREAD = 8
"""Enough that threads end together though some are interrupted."""
_LEAST_WORK = 1 << 15
"""Multiply-adds below which handing a chunk to another thread costs more than it saves."""


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """Weights of one product, or of two whose results are combined.

    Args:
        panels: `(P, in_features, PANEL)` float32.
        bias: `(P * PANEL,)` float32, or None.
        out_features: of the result.
        epilogue: what becomes of the sums.
    """

    panels: torch.Tensor
    bias: torch.Tensor | None
    out_features: int
    epilogue: Epilogue = Epilogue.STORE

    @property
    def in_features(self) -> int:
        """Of the input."""
        return int(self.panels.shape[1])

    @property
    def quantised(self) -> bool:
        """Whether the product takes records instead of rows (see `records.py`)."""
        return False

    def tensors(self) -> list[torch.Tensor]:
        """All that is kept."""
        return [self.panels, *([] if self.bias is None else [self.bias])]

    def balanced(self, rows: torch.Tensor) -> torch.Tensor:
        """What is multiplied in the place of `(R, in_features)` rows."""
        return rows

    def describe(self, operation: npt.NDArray[np.int64]) -> None:
        """Fill in what does not change between calls."""
        operation[CODE] = Code.MATMUL
        operation[Matmul.WEIGHTS] = self.panels.data_ptr()
        operation[Matmul.BIAS] = 0 if self.bias is None else self.bias.data_ptr()
        operation[Matmul.FEATURES] = self.in_features
        operation[Matmul.PANELS] = len(self.panels)
        operation[Matmul.OUT_STRIDE] = self.out_stride
        operation[Matmul.EPILOGUE] = self.epilogue

    @property
    def out_stride(self) -> int:
        """Floats between two rows of the result."""
        return round_up(self.out_features, ALIGNMENT)


def round_up(value: int, multiple: int) -> int:
    """The least multiple that is not below `value`."""
    return -(-value // multiple) * multiple


def pack(weight: torch.Tensor, bias: torch.Tensor | None = None) -> PackedWeights:
    """Pack `(out_features, in_features)` float32 weights; the bias is `(out_features,)`."""
    out_features = int(weight.shape[0])
    padding = round_up(out_features, ALIGNMENT) - out_features
    padded = F.pad(weight, (0, 0, 0, padding))
    return PackedWeights(
        _panels(padded), None if bias is None else F.pad(bias, (0, padding)).contiguous(), out_features
    )


def pack_gated(gate: torch.Tensor, up: torch.Tensor, activation: Epilogue) -> PackedWeights:
    """Pack two weights of a gated unit: the product gives activation(x @ gate.T) * (x @ up.T)."""
    out_features, half = int(gate.shape[0]), PANEL // 2
    padding = round_up(out_features, ALIGNMENT) - out_features
    halves = [F.pad(w, (0, 0, 0, padding)).view(-1, half, w.shape[1]) for w in (gate, up)]
    return PackedWeights(_panels(torch.cat(halves, dim=1).flatten(0, 1)), None, out_features, activation)


def scaled(weights: PackedWeights, factors: torch.Tensor) -> PackedWeights:
    """A product whose weights of each input feature are multiplied by something, `(in_features,)` float32."""
    return replace(weights, panels=weights.panels * factors[:, None])


def scaled_gated(weights: PackedWeights, factors: torch.Tensor) -> PackedWeights:
    """A gated unit that gives results multiplied by something, `(out_features,)` float32."""
    gate, up = weights.panels.chunk(2, dim=2)
    padded = F.pad(factors, (0, weights.out_stride - weights.out_features), value=1.0)
    return replace(weights, panels=torch.cat([gate, up * padded.view(-1, 1, PANEL // 2)], dim=2))


def feature_sizes(weights: PackedWeights) -> torch.Tensor:
    """Root mean square of the weights of each input feature, `(in_features,)`."""
    return weights.panels.square().mean(dim=(0, 2)).sqrt()


def _panels(weight: torch.Tensor) -> torch.Tensor:
    return weight.view(-1, PANEL, weight.shape[1]).transpose(1, 2).contiguous()


def cut(weights: PackedWeights, rows: int, threads: int) -> tuple[int, int, int]:
    """How a product of so many rows is shared out: panels and rows of a chunk, and the number of chunks."""
    panels = len(weights.panels)
    wanted = max(1, min(threads * _CHUNKS_PER_THREAD, rows * weights.panels.numel() // _LEAST_WORK))
    if threads == 1:
        return panels, rows, 1
    panels_per_chunk = max(1, panels // wanted)
    groups = -(-panels // panels_per_chunk)
    segments = min(-(-wanted // groups), -(-rows // ROWS))
    rows_per_chunk = round_up(-(-rows // segments), ROWS)
    return panels_per_chunk, rows_per_chunk, groups * -(-rows // rows_per_chunk)


class Linear:
    """y = x @ weight.T + bias in float32 on `(..., in_features)`; one caller at a time."""

    def __init__(self, weights: PackedWeights) -> None:
        self.weights = weights
        self._operations = np.zeros((2 if weights.quantised else 1, FIELDS), dtype=np.int64)
        self._program = Program(self._operations, quantised=weights.quantised)
        weights.describe(self._operations[-1])

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply.

        Raises:
            ValueError: x is not float32, or of another width.
        """
        weights = self.weights
        if x.dtype != torch.float32 or x.shape[-1] != weights.in_features:
            raise ValueError(
                f"a product with {weights.in_features} input features takes float32, "
                f"not {x.dtype} {tuple(x.shape)}"
            )
        rows = weights.balanced(x.reshape(-1, weights.in_features))
        if rows.stride(1) != 1:
            rows = rows.contiguous()
        out = torch.empty(len(rows), weights.out_stride)
        threads = torch.get_num_threads()
        product = self._operations[-1]
        panels, per_chunk, chunks = cut(weights, max(1, len(rows)), threads)
        product[CHUNKS] = chunks
        product[Matmul.PANELS_PER_CHUNK] = panels
        product[Matmul.ROWS_PER_CHUNK] = per_chunk
        product[Matmul.X], product[Matmul.X_STRIDE] = rows.data_ptr(), rows.stride(0)
        product[Matmul.OUT] = out.data_ptr()
        product[Matmul.NUM_ROWS] = len(rows)
        if weights.quantised:
            records = torch.empty(len(rows), record_bytes(weights.in_features), dtype=torch.uint8)
            quantise(self._operations[0], rows, records)
            product[Matmul.X], product[Matmul.X_STRIDE] = records.data_ptr(), records.stride(0)
        self._program.run(threads if chunks > 1 else 1)
        return out[:, : weights.out_features].view(*x.shape[:-1], weights.out_features)


def quantise(operation: npt.NDArray[np.int64], rows: torch.Tensor, records: torch.Tensor) -> None:
    """Describe an operation that makes records of all of `(R, width)` float32 rows."""
    operation[CODE] = Code.QUANTISE
    operation[Quantise.X], operation[Quantise.X_STRIDE] = rows.data_ptr(), rows.stride(0)
    operation[Quantise.OUT], operation[Quantise.OUT_STRIDE] = records.data_ptr(), records.stride(0)
    operation[Quantise.NUM_ROWS], operation[Quantise.WIDTH] = rows.shape
    operation[Quantise.ROWS_PER_CHUNK] = ROWS_PER_CHUNK
    operation[CHUNKS] = -(-len(rows) // ROWS_PER_CHUNK)
