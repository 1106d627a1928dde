"""A GPU that is none: everything is chosen as on one, and computed on the processor.

With `TRITON_INTERPRET=1` in the environment the kernels are Triton's own, interpreted.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from batchgen.devices import CPU, CUDA
from batchgen.engine import build
from batchgen.engine.capture import Launch
from batchgen.engine.device import HOST, Device
from batchgen.engine.step_memory import PeakBytes

FREE = 2**30


class StandInMemory:
    """See `DeviceMemory`: a GiB of which everything is always free.

    Attributes:
        given_back: how often what is kept was given back.
        broken: what it cannot go on from, if it is to be so.
    """

    total = FREE

    def __init__(self) -> None:
        self.given_back = 0
        self.broken: Exception | None = None

    def free(self) -> int:
        self.give_back()
        return FREE

    def held(self) -> int:
        return 0

    def peak_of(self, run: Callable[[], object]) -> int:
        watch = PeakBytes()
        with watch:
            run()
        return watch.peak

    def give_back(self) -> None:
        self.given_back += 1

    def check(self) -> None:
        if self.broken is not None:
            raise self.broken


class StandInCapture:
    """See `Capture`: does again what it was told, on whatever lies in the same memory then.

    Attributes:
        captured: how often something was recorded.
        launched: how often any of it was launched again.
    """

    def __init__(self) -> None:
        self.captured = self.launched = 0

    def __call__(self, run: Launch) -> Launch:
        run()
        self.captured += 1

        def launch() -> None:
            self.launched += 1
            run()

        return launch


def stand_in_gpu(
    monkeypatch: pytest.MonkeyPatch, capture: Callable[[Launch], Launch] | None = None
) -> StandInMemory:
    """Let engines that are built from now on find a stand-in, unless they ask for the processor.

    Args:
        monkeypatch: takes it away again.
        capture: of launches; None: nothing can be captured.
    """
    memory = StandInMemory()
    facts = (("gpu", "stand-in"), ("gpu_capability", "9.0"))
    device = Device(
        CUDA, torch.device("cpu"), memory, facts, "device: stand-in", capture and (lambda: capture)
    )
    monkeypatch.setattr(build, "find_device", lambda asked: HOST if asked == CPU else device)
    return memory
