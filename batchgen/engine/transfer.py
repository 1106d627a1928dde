"""Bring the numbers of a step, which the host makes, to where the step is computed. Called by
`ModelRunner`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from batchgen.engine.device import Device

ALIGNMENT = 256
"""Bytes between the beginnings of arrays in a copy: as torch's allocator gives out memory, so that kernels
that are compiled for aligned pointers take all of them."""
Array = npt.NDArray[np.generic]


class Transfer:
    """Makes tensors of arrays.

    On the processor a tensor is the array itself. To a GPU all go in one copy from pinned memory, which the
    host does not wait for; torch keeps such memory until the copy is done.

    Args:
        device: where the tensors are to be.
    """

    def __init__(self, device: Device) -> None:
        self.place = device.place
        self._together = device.is_gpu
        self._pinned = device.place.type == "cuda"

    def __call__(self, arrays: Sequence[Array], into: torch.Tensor | None = None) -> list[torch.Tensor]:
        """A tensor on the device for each array, of the same shape and dtype.

        Args:
            arrays: contiguous; they must not be changed afterwards. into: uint8 memory on the device, of
            `size(arrays)` bytes or more, that the tensors are to lie in, so
                that arrays of the same shapes always give tensors at the same addresses.
        """
        if not self._together and into is None:
            return [torch.from_numpy(array) for array in arrays]
        starts = _starts(arrays)
        host = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=self._pinned)
        flat = host.numpy()
        for array, start in zip(arrays, starts[:-1], strict=True):
            flat[start : start + array.nbytes] = array.reshape(-1).view(np.uint8)
        if into is None:
            there = host.to(self.place, non_blocking=True)
        else:
            there = into[: starts[-1]]
            there.copy_(host, non_blocking=True)
        return [_part(there, start, array) for array, start in zip(arrays, starts[:-1], strict=True)]

    def back(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Bring a tensor from the device, behind what it was told before; what comes after is not waited for.

        Returns:
            What waits for it, and gives it on the host.
        """
        if not self._pinned:
            return lambda: tensor
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record(torch.cuda.current_stream(self.place))

        def wait() -> torch.Tensor:
            arrived.synchronize()
            return host

        return wait


def size(arrays: Sequence[Array]) -> int:
    """Bytes that the arrays take on the device together."""
    return _starts(arrays)[-1]


def _starts(arrays: Sequence[Array]) -> list[int]:
    """Where each begins, and where the last one ends."""
    starts = [0]
    for array in arrays:
        starts.append(starts[-1] + -(-array.nbytes // ALIGNMENT) * ALIGNMENT)
    return starts


def _part(there: torch.Tensor, start: int, array: Array) -> torch.Tensor:
    dtype = torch.from_numpy(array[:0]).dtype
    return there[start : start + array.nbytes].view(dtype).view(array.shape)
