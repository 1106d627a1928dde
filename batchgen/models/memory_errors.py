"""Which errors say that there was no memory."""

from __future__ import annotations

import torch


def out_of_memory(error: BaseException) -> bool:
    """Whether torch or Python could not get memory; torch's CPU allocator has no exception of its own."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
    )
