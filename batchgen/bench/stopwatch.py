"""Seconds of one call on a processor or a GPU, with caches that hold nothing of it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

_SECONDS = 0.12
"""Of measured calls together, about."""
_LEAST, _MOST = 5, 200
_HOST_CACHE = 64 << 20
_DEVICE_CACHE = 1 << 30
"""Bytes that are written between two calls. A GPU takes about 0.3 ms for that, in which the host queues the
call behind it, so that the clock on the GPU sees no host."""


class Stopwatch:
    """Takes the median of calls on one device.

    Args:
        device: where the calls compute.
        quick: take two calls, to see whether everything runs.
    """

    def __init__(self, device: torch.device, *, quick: bool = False) -> None:
        self._device = device
        self._quick = quick
        size = 1 << 16 if quick else _HOST_CACHE if device.type == "cpu" else room(device, _DEVICE_CACHE)
        self._other = torch.zeros(size, dtype=torch.uint8, device=device)

    def median(self, run: Callable[[], object]) -> float:
        """Seconds of a call, compilation and a warm-up left out."""
        with torch.inference_mode():
            run()
            calls = 2 if self._quick else self._calls(run)
            return statistics.median(self._once(run) for _ in range(calls))

    def _calls(self, run: Callable[[], object]) -> int:
        seconds = min(self._once(run) for _ in range(2))
        return min(max(round(_SECONDS / max(seconds, 1e-7)), _LEAST), _MOST)

    def _once(self, run: Callable[[], object]) -> float:
        if self._device.type == "cpu":
            self._other.add_(1)
            began = time.perf_counter()
            run()
            return time.perf_counter() - began
        start, end = (_event() for _ in range(2))
        self._other.zero_()
        start.record()
        run()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1000


def room(device: torch.device, wanted: int) -> int:
    """Bytes to measure with: what is wanted, and on a GPU, where an engine may have left little, at most an
    eighth of what is free."""
    if device.type == "cpu":
        return wanted
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    return min(wanted, free // 8)


def _event() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
