"""Products in int8 are compared with their arithmetic when they are made, so that faults are noticed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from batchgen.models import quantised_products
from batchgen.models.quantised_products import ALLOWED, quantised_product
from batchgen.types import UsageError
from batchgen_kernels.cpu.linear import PackedWeights, pack, pack_gated
from batchgen_kernels.cpu.matmul import Epilogue
from batchgen_kernels.cpu.quantised_weights import QuantisedWeights, quantised


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def products() -> dict[str, PackedWeights]:
    return {
        "plain": pack(random(0, 200, 190), random(1, 200)),
        "adding": replace(pack(random(0, 70, 576)), epilogue=Epilogue.ADD),
        "gated": pack_gated(random(0, 50, 140), random(1, 50, 140), Epilogue.SILU),
        "small": pack(1e-3 * random(0, 40, 64)),
    }


@pytest.mark.parametrize("name", products())
def test_good_products_differ_by_far_less_than_is_allowed(name: str) -> None:
    weights = products()[name]
    balance = torch.exp2(random(2, weights.in_features).round())
    for factors in (None, balance):
        product = quantised_product(weights, factors)
        assert product.epilogue == weights.epilogue
        original = weights if factors is None else quantised_products.scaled(weights, 1 / factors)
        assert quantised_products._difference(product, original) < ALLOWED / 10


def test_weights_that_are_zero_or_not_finite_are_no_fault() -> None:
    weight = random(0, 70, 100)
    weight[3, 80] = float("nan")
    quantised_product(pack(weight))
    quantised_product(pack(torch.zeros(70, 100)))
    quantised_product(pack(torch.full((70, 100), float("nan"))))


def swapped(product: QuantisedWeights) -> QuantisedWeights:
    panels = product.panels.clone()
    panels[-1, -1, 0, 0], panels[-1, -1, 0, 1] = product.panels[-1, -1, 0, 1], product.panels[-1, -1, 0, 0]
    return replace(product, panels=panels)


def moved(product: QuantisedWeights) -> QuantisedWeights:
    return replace(product, scales=product.scales.roll(1, dims=2))


def coarse(product: QuantisedWeights) -> QuantisedWeights:
    return replace(product, panels=product.panels & 0xFE)


def shifted(product: QuantisedWeights) -> QuantisedWeights:
    return replace(product, panels=product.panels - 1)


@pytest.mark.parametrize("fault", [swapped, moved, coarse, shifted], ids=lambda fault: fault.__name__)
def test_faults_are_noticed(
    fault: Callable[[QuantisedWeights], QuantisedWeights], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantised_products, "quantised", lambda *given: fault(quantised(*given)))
    with pytest.raises(
        UsageError, match=r"model\.quantization: products in int8 differ by .* from what they should be, and "
    ):
        quantised_product(pack(random(0, 200, 190)))
