"""Make products in int8, each compared with the same arithmetic written down in torch before it is used.

That int8 changes a model's output hides whether it is packed and multiplied as it should be: a share of the
weights may be wrong before the output differs by more than rounding lets it. Of a product by itself both
arithmetics give the same numbers, but for sums in another order.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F

from batchgen.types import UsageError
from batchgen_kernels.cpu.linear import Linear, PackedWeights, scaled
from batchgen_kernels.cpu.matmul import PANEL, Epilogue
from batchgen_kernels.cpu.quantised_weights import QuantisedWeights, quantised
from batchgen_kernels.cpu.records import GROUP, LARGEST

ALLOWED = 1e-5
"""Root mean square of the difference over that of the product."""
_ROWS, _PANELS = 3, 16
"""Of a product, what is looked at: the first and the last panel, and some between."""


def quantised_product(weights: PackedWeights, balance: torch.Tensor | None = None) -> QuantisedWeights:
    """A product with weights in int8.

    Args:
        weights: in float32.
        balance: `(in_features,)` float32 that inputs are to be multiplied by, and weights are divided by.

    Raises:
        UsageError: it computes something else than the arithmetic says.
    """
    product = quantised(weights, balance)
    difference = _difference(product, weights if balance is None else scaled(weights, 1 / balance))
    if difference > ALLOWED:
        raise UsageError(
            f"model.quantization: products in int8 differ by {difference:.2g} of their size from what they "
            f"should be, and {ALLOWED} is allowed; leave model.quantization out"
        )
    return product


@torch.inference_mode()
def _difference(product: QuantisedWeights, weights: PackedWeights) -> float:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_ROWS, weights.in_features, generator=generator)
    outputs = len(product.panels) * PANEL
    plain = replace(product, bias=None, balance=None, epilogue=Epilogue.STORE, out_features=outputs)
    some = torch.linspace(0, len(product.panels) - 1, min(_PANELS, len(product.panels))).long()
    ours = Linear(plain)(x).view(_ROWS, -1, PANEL)[:, some].flatten(1)
    theirs = _rounded(x) @ (_rounded(weights.panels[some].transpose(1, 2).flatten(0, 1)) / GROUP).T
    known = theirs.isfinite()
    if not known.any():
        return 0.0
    return float((ours - theirs)[known].square().mean().sqrt() / theirs[known].square().mean().sqrt())


def _rounded(rows: torch.Tensor) -> torch.Tensor:
    """`(R, features)` turned and rounded, in float32, filled up to whole groups."""
    groups = _turned(F.pad(rows, (0, -rows.shape[1] % GROUP)).view(len(rows), -1, GROUP))
    largest = groups.abs().amax(dim=-1, keepdim=True)
    # A number over a tensor would be a reciprocal times that number, which rounds twice.
    factor = largest.new_tensor(LARGEST) / largest
    numbers = (groups.double() * factor.double()).round().float() * (largest / LARGEST)
    return torch.where(largest > 0, numbers, 0.0).flatten(1)


def _turned(groups: torch.Tensor) -> torch.Tensor:
    """A Hadamard matrix times each group; sums and differences as a record has them, bit for bit."""
    distance = GROUP // 2
    while distance:
        first, second = groups.view(*groups.shape[:2], -1, 2, distance).unbind(-2)
        groups = torch.stack([first + second, first - second], dim=-2).flatten(-3)
        distance //= 2
    return groups
