"""What a GPU is told to do, recorded, so that it can be told again at once. Used by `graphs.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

Launch = Callable[[], None]


class Capture(Protocol):
    """Records what is launched on a device."""

    def __call__(self, run: Launch) -> Launch:
        """Call `run`, and return what does the same again, with the same memory.

        `run` may be forgotten then: what it reads has to be kept by whoever made it.
        """
        ...


class CudaCapture:
    """See `Capture`; all that it records shares one pool of memory.

    Args:
        place: the GPU.
    """

    def __init__(self, place: torch.device) -> None:
        self._place = place
        self._stream: Any = torch.cuda.Stream(place)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, run: Launch) -> Launch:
        # Kernels are compiled, and libraries allocate, in their first call; neither can be captured.
        usual = torch.cuda.current_stream(self._place)
        self._stream.wait_stream(usual)
        with torch.cuda.stream(self._stream):
            run()
        usual.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # torch itself stays on the other stream where a capture fails.
        with (
            torch.cuda.stream(usual),
            torch.cuda.device(self._place),
            torch.cuda.graph(graph, self._pool, self._stream, capture_error_mode="thread_local"),
        ):
            run()
        replay: Launch = graph.replay
        return replay
