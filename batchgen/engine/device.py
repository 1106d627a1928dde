"""The device that an engine computes on. Decided once, by `find_device`; whatever differs between devices
asks it.

A GPU has memory of its own (`DeviceMemory`), bfloat16 as its dtype, and Triton's kernels; what only makes
processors fast (programs of our own products, packed weights that are kept) is not for it.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from batchgen.devices import CPU, CUDA
from batchgen.engine.capture import Capture, CudaCapture
from batchgen.types import UsageError

LEAST_CAPABILITY = (8, 0)
"""Of a GPU: the first with bfloat16, and the least that our kernels are compiled for."""
_DRIVER = Path("/proc/driver/nvidia/version")


class DeviceMemory(Protocol):
    """The memory of a GPU, in bytes."""

    @property
    def total(self) -> int:
        """All that the chip has."""
        ...

    def free(self) -> int:
        """What can be had now, what this process keeps without using it included."""
        ...

    def held(self) -> int:
        """What this process keeps, used or not, as far as it knows."""
        ...

    def peak_of(self, run: Callable[[], object]) -> int:
        """Most that `run` takes at a time beside what is taken already; its result is dropped.

        What is allocated once for all, as libraries do in their first call, has to be there before.
        """
        ...

    def give_back(self) -> None:
        """Return to the device what is kept for later use."""
        ...

    def check(self) -> None:
        """Raise the error after which nothing can be computed on the device any more, if there was one."""
        ...


class CudaMemory:
    """See `DeviceMemory`: as torch's allocator and the driver count it."""

    def __init__(self, place: torch.device) -> None:
        self._place = place

    @property
    def total(self) -> int:
        return int(torch.cuda.get_device_properties(self._place).total_memory)

    def free(self) -> int:
        self.give_back()
        return int(torch.cuda.mem_get_info(self._place)[0])

    def held(self) -> int:
        return int(torch.cuda.memory_reserved(self._place))

    def peak_of(self, run: Callable[[], object]) -> int:
        self.give_back()
        torch.cuda.synchronize(self._place)
        before = torch.cuda.memory_reserved(self._place)
        torch.cuda.reset_peak_memory_stats(self._place)
        run()
        torch.cuda.synchronize(self._place)
        # With what the allocator takes in whole pieces of a few MiB, and loses between them.
        return int(torch.cuda.max_memory_reserved(self._place)) - before

    def give_back(self) -> None:
        torch.cuda.empty_cache()

    def check(self) -> None:
        # An illegal access, for one, is raised by whatever waits next, and by everything from then on.
        torch.cuda.synchronize(self._place)


@dataclass(frozen=True, slots=True)
class Device:
    """Where an engine computes.

    Args:
        kind: `cpu` or `cuda`, which decides what is chosen: dtype, sizes of steps, kernels, promises.
        place: where its tensors are, with its number.
        memory: of a GPU; None: it computes in the memory of the host.
        facts: what an attempt records of a GPU: its name, compute capability, driver.
        note: a sentence for the user; None where there is nothing to say.
        capture: makes what records launches; None where there is nothing to record.
    """

    kind: str
    place: torch.device
    memory: DeviceMemory | None = None
    facts: tuple[tuple[str, Any], ...] = ()
    note: str | None = None
    capture: Callable[[], Capture] | None = None

    @property
    def is_gpu(self) -> bool:
        """Whether it is chosen for as a GPU."""
        return self.kind == CUDA

    def give_back(self) -> None:
        """Return to a GPU what nobody uses any more."""
        if self.memory is not None:
            # A model is full of cycles.
            gc.collect()
            self.memory.give_back()

    def check(self) -> None:
        """Raise what a GPU cannot go on from, where something is wrong with it."""
        if self.memory is not None:
            self.memory.check()


HOST = Device(CPU, torch.device(CPU))


def find_device(asked: str) -> Device:
    """The device that `engine.device` means: `auto` is the first GPU that torch may use, else the processor.

    Raises:
        UsageError: `cuda` cannot be had here, says why; or there is no such device.
    """
    if asked == CPU:
        return HOST
    if asked not in ("auto", CUDA):
        raise UsageError(f"engine.device: {asked!r} is not allowed; use auto, cpu or cuda")
    lacking = _lacking()
    if lacking is None:
        return _gpu(torch.device(CUDA, torch.cuda.current_device()))
    if asked == CUDA:
        raise UsageError(f"engine.device: cuda cannot be had here: {lacking}, or use engine.device: auto")
    # A GPU that is there and not used is worth a word.
    seen = torch.version.cuda is not None and torch.cuda.is_available()
    return Device(CPU, torch.device(CPU), note=f"device: cpu: {lacking}" if seen else None)


def check_graphs(asked: str | bool, device: Device) -> None:
    """Whether steps can be captured there, where `engine.cuda_graphs` asks for it.

    Raises:
        UsageError: they cannot, or it asks for something else.
    """
    if asked not in ("auto", True, False):
        raise UsageError(f"engine.cuda_graphs: {asked!r} is not allowed; use auto, true or false")
    if asked is True and device.capture is None:
        raise UsageError(
            f"engine.cuda_graphs: true asks that steps are captured, and on {device.kind} none are; "
            "use auto, or a GPU with engine.device: cuda"
        )


def _lacking() -> str | None:
    """Why there is no GPU to use, and what to do about it; None if there is one."""
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA; install a build with it"
    if not torch.cuda.is_available():
        return (
            "torch finds no NVIDIA GPU; see whether nvidia-smi shows one, whether its driver is new "
            f"enough for CUDA {torch.version.cuda}, and whether CUDA_VISIBLE_DEVICES hides it"
        )
    capability = torch.cuda.get_device_capability()
    if capability < LEAST_CAPABILITY:
        return (
            f"{torch.cuda.get_device_name()} has compute capability {_dotted(capability)}, and "
            f"{_dotted(LEAST_CAPABILITY)} or more is needed; take a newer GPU"
        )
    return None


def _gpu(place: torch.device) -> Device:
    # The environment of some containers turns TF32 on, which has 10 of the 23 bits of float32.
    torch.set_float32_matmul_precision("highest")
    memory = CudaMemory(place)
    name, capability = torch.cuda.get_device_name(place), _dotted(torch.cuda.get_device_capability(place))
    facts = {
        "gpu": name,
        "gpu_capability": capability,
        "gpu_memory": memory.total,
        "gpu_driver": _driver(),
        "cuda": torch.version.cuda,
    }
    note = f"device: {name}, {memory.total / 2**30:,.0f} GiB, compute capability {capability}"
    return Device(CUDA, place, memory, tuple(facts.items()), note, lambda: CudaCapture(place))


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def _driver() -> str | None:
    """The driver's version: the first number with dots in what it says of itself."""
    try:
        words = _DRIVER.read_text(encoding="ascii", errors="replace").splitlines()[0].split()
    except (OSError, IndexError):
        return None
    return next((word for word in words if word[:1].isdigit() and "." in word), None)
