"""What the machine can do: products at a model's own shapes, and reading memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from batchgen.bench.kernels import ceilings
from batchgen.bench.shapes import Product
from batchgen.bench.stopwatch import Stopwatch

_HOST = torch.device("cpu")
_PASSES = 5
_SECONDS = 0.08
"""Of a pass, at least."""
_READ_BYTES = 1 << 29


@dataclass(frozen=True, slots=True)
class ProductRate:
    """GFLOP/s of a product at a number of rows: ours, where there is one, and torch's `linear`."""

    product: Product
    rows: int
    ours: float | None
    torch: float

    @property
    def best(self) -> float:
        """Of the two."""
        return max(self.ours or 0.0, self.torch)


@torch.inference_mode()
def product_rates(
    products: Iterable[tuple[Product, int]],
    device: torch.device = _HOST,
    dtype: torch.dtype = torch.float32,
) -> list[ProductRate]:
    """Measure products, each with its number of rows.

    On a processor they are in float32, on all threads of torch, and the best of interleaved passes counts: it
    is what the machine can do. On a GPU they are in `dtype`, and the median counts.
    """
    if device.type != "cpu":
        return [_on_device(product, rows, device, dtype) for product, rows in products]
    rates = []
    for product, rows in products:
        weight = torch.randn(product.out_features, product.in_features) * product.in_features**-0.5
        x = torch.randn(rows, product.in_features)
        functions: dict[str, Callable[[], torch.Tensor]] = {"torch": partial(F.linear, x, weight)}
        if (ours := _ours(weight)) is not None:
            functions["ours"] = partial(ours, x)
        seconds = _best(functions)
        gflop = product.flop * rows / 1e9
        found = {name: gflop / s for name, s in seconds.items()}
        rates.append(ProductRate(product, rows, found.get("ours"), found["torch"]))
    return rates


def _on_device(product: Product, rows: int, device: torch.device, dtype: torch.dtype) -> ProductRate:
    weight = torch.randn(product.out_features, product.in_features, dtype=dtype, device=device)
    x = torch.randn(rows, product.in_features, dtype=dtype, device=device)
    seconds = Stopwatch(device).median(lambda: F.linear(x, weight))
    return ProductRate(product, rows, None, product.flop * rows / 1e9 / seconds)


@torch.inference_mode()
def read_bandwidth(device: torch.device = _HOST) -> float:
    """Bytes per second that all threads of torch read of memory; the best of two ways to read.

    On a GPU bytes that a copy reads and writes.
    """
    if device.type != "cpu":
        return ceilings(device, torch.bfloat16).copy_bandwidth
    size = min(_READ_BYTES, _available() // 4)
    numbers = torch.ones(max(1 << 20, size // 4))
    matrix = numbers[: len(numbers) // 4096 * 4096].view(-1, 4096)
    vector = torch.ones(4096)
    seconds = _best({"sum": lambda: numbers.sum(), "mv": lambda: torch.mv(matrix, vector)})
    return max(numbers.nbytes / seconds["sum"], matrix.nbytes / seconds["mv"])


def _ours(weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor] | None:
    try:
        from batchgen_kernels.cpu.linear import Linear, pack
    except ImportError:
        # Numba does not work here, and products are torch's.
        return None
    return Linear(pack(weight))


def _best(functions: dict[str, Callable[[], torch.Tensor]]) -> dict[str, float]:
    """Seconds of one call of each function, the least of several interleaved passes."""
    calls = {name: _calls(function) for name, function in functions.items()}
    best = dict.fromkeys(functions, float("inf"))
    for _ in range(_PASSES):
        for name, function in functions.items():
            best[name] = min(best[name], _time(function, calls[name]) / calls[name])
    return best


def _calls(function: Callable[[], torch.Tensor]) -> int:
    """How many calls a pass needs, found while warming up."""
    function()
    calls = 1
    while (seconds := _time(function, calls)) < _SECONDS / 2:
        calls *= 2
    return max(1, round(calls * _SECONDS / seconds))


def _time(function: Callable[[], torch.Tensor], calls: int) -> float:
    began = time.perf_counter()
    for _ in range(calls):
        function()
    return time.perf_counter() - began


def _available() -> int:
    from batchgen.engine.memory import available_memory

    return available_memory()
