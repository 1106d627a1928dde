"""`batchgen bench --kernels`: each kernel by itself, of what this very device can do."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from batchgen.bench.kernel_cases import (
    DEVICE_SIZES,
    HOST_SIZES,
    KernelCase,
    Layer,
    Sizes,
    attention_cases,
    layer_of,
    product_cases,
    sampling_cases,
    triton_layer_cases,
)
from batchgen.bench.stopwatch import Stopwatch, room
from batchgen_kernels import select

FORMAT = 1
_COPIED = {"cpu": 1 << 28, "cuda": 1 << 30}
_SIDE = {"cpu": 1024, "cuda": 8192}
_DEFAULTS = {"cpu": ("dummy:smollm2-135m", torch.float32), "cuda": ("dummy:llama-3.1-8b", torch.bfloat16)}


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What a device does at best: bytes a second, read and written, of a copy; operations a second of a
    product of square matrices of one dtype."""

    device: str
    dtype: str
    copy_bandwidth: float
    product_rate: float


@dataclass(frozen=True, slots=True)
class Measured:
    """A case with its median time and what that is of the ceilings.

    Args:
        seconds: of a call.
        bandwidth_share: bytes a second, of a copy's.
        product_share: operations a second, of a product's; 0 of a kernel whose operations are not counted.
        share: of the least time that either allows.
    """

    kernel: str
    shape: str
    dtype: str
    seconds: float
    bytes: int
    flop: int
    bandwidth_share: float
    product_share: float
    share: float


def measured_here(model: str | None, tell: Callable[[str], None]) -> dict[str, Any]:
    """The figures of this machine's GPU, if it has one, else of its processor.

    Args:
        model: whose shapes count, as `model.path` has it; None for a dummy that fits the device.
        tell: hears of each kernel as it is measured.

    Raises:
        UsageError: there is no such model.
    """
    from batchgen.models.loader import load_config
    from batchgen.models.source import find_model

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    name, dtype = _DEFAULTS[device.type]
    layer = layer_of(load_config(find_model(model or name).tokenizer_folder()))
    limits = ceilings(device, dtype)
    found = measure(
        cases_of(layer, device, dtype),
        limits,
        device,
        tell=lambda m: tell(f"{m.kernel}, {m.shape}: {m.seconds * 1e6:,.1f} us, {m.share:.0%}"),
    )
    return report(model or name, limits, found)


def ceilings(device: torch.device, dtype: torch.dtype, *, quick: bool = False) -> Ceilings:
    """Measure a device; `quick` sees only whether it runs."""
    watch = Stopwatch(device, quick=quick)
    copied = room(device, _COPIED[device.type])
    size, side = (1 << 16, 64) if quick else (copied, _SIDE[device.type])
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copying = watch.median(lambda: target.copy_(source))
    a, b = (torch.randn(side, side, dtype=dtype, device=device) for _ in range(2))
    multiplying = watch.median(lambda: a @ b)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "processor"
    return Ceilings(name, str(dtype).removeprefix("torch."), 2 * size / copying, 2 * side**3 / multiplying)


def cases_of(
    layer: Layer,
    device: torch.device,
    dtype: torch.dtype,
    sizes: Sizes | None = None,
    attention: str = "auto",
) -> Iterator[KernelCase]:
    """All kernels of an engine on a device.

    Args:
        layer: of the model.
        device: where they run.
        dtype: of the model.
        sizes: of the steps; None for those of this kind of device.
        attention: name of the attention backend.

    Raises:
        BackendError: no such backend runs here.
    """
    if sizes is None:
        sizes = HOST_SIZES if device.type == "cpu" else DEVICE_SIZES
    backend = select(attention, layer.attention, device, dtype).backend
    every: list[Iterable[KernelCase]] = [
        attention_cases(backend, layer, sizes, device, dtype),
        product_cases(layer, sizes, device, dtype, ours=backend.name == "cpu" and dtype == torch.float32),
    ]
    if backend.name == "triton" or device.type == "cuda":
        every.append(triton_layer_cases(layer, sizes, device, dtype))
        if layer.products:
            every.append(sampling_cases(layer.products[-1].out_features, sizes, device, dtype))
    return chain.from_iterable(every)


def measure(
    cases: Iterable[KernelCase],
    limits: Ceilings,
    device: torch.device,
    *,
    quick: bool = False,
    tell: Callable[[Measured], None] = lambda measured: None,
) -> list[Measured]:
    """Measure cases one after the other, so that the memory of one is free before the next is made."""
    watch = Stopwatch(device, quick=quick)
    found = []
    for case in cases:
        measured = of_ceilings(case, watch.median(case.run), limits)
        tell(measured)
        found.append(measured)
        del case
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return found


def of_ceilings(case: KernelCase, seconds: float, limits: Ceilings) -> Measured:
    """A case that took `seconds`."""
    copying, multiplying = case.bytes / limits.copy_bandwidth, case.flop / limits.product_rate
    return Measured(
        case.kernel,
        case.shape,
        case.dtype,
        seconds,
        case.bytes,
        case.flop,
        copying / seconds,
        multiplying / seconds,
        max(copying, multiplying) / seconds,
    )


def report(model: str, limits: Ceilings, found: Iterable[Measured]) -> dict[str, Any]:
    """For `--json`."""
    return {
        "format": FORMAT,
        "model": model,
        "ceilings": dataclasses.asdict(limits),
        "kernels": [dataclasses.asdict(measured) for measured in found],
    }


def lines(figures: Mapping[str, Any]) -> Iterator[str]:
    """The table of a report."""
    limits = figures["ceilings"]
    yield (
        f"kernels at the shapes of {figures['model']} on {limits['device']}: a copy moves "
        f"{limits['copy_bandwidth'] / 1e9:,.0f} GB/s, products in {limits['dtype']} reach "
        f"{limits['product_rate'] / 1e12:,.1f} TFLOP/s"
    )
    head = ("kernel", "shape", "dtype", "us", "GB", "GFLOP", "of copy", "of products", "of the limit")
    rows = [head, *(_row(kernel) for kernel in figures["kernels"])]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.ljust(width) if i < 3 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  " + "  ".join(cells).rstrip()


def _row(kernel: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        kernel["kernel"],
        kernel["shape"],
        kernel["dtype"],
        f"{kernel['seconds'] * 1e6:,.1f}",
        f"{kernel['bytes'] / 1e9:.3f}",
        f"{kernel['flop'] / 1e9:,.1f}" if kernel["flop"] else "-",
        f"{kernel['bandwidth_share']:.0%}",
        f"{kernel['product_share']:.0%}" if kernel["flop"] else "-",
        f"{kernel['share']:.0%}",
    )
