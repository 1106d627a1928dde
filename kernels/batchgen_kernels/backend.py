"""The protocol that the engine knows of attention, and the cache that a backend hands out."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch

from batchgen_kernels.metadata import AttentionMetadata
from batchgen_kernels.spec import AttentionSpec

PAGE_ALIGNMENT = 64
"""Bytes: a line of the processor's cache, and more than any element."""


@dataclass(frozen=True, slots=True, eq=False)
class KVCache:
    """Keys and values of one layer, in blocks. The first dimension of both tensors is the block id.

    The other dimensions are the backend's own and contiguous; only that backend reads or writes them. From
    block to block it may be further than that: other layers then lie between.
    """

    key: torch.Tensor
    value: torch.Tensor
    block_size: int

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, the null block 0 included."""
        return int(self.key.shape[0])


class AttentionBackend(Protocol):
    """Causal attention over a paged cache.

    In one step of a layer `write` comes first, with all rows of the step, then `attend`.
    """

    @property
    def name(self) -> str:
        """The name that `select` knows it by."""
        ...

    def supports(
        self, spec: AttentionSpec, device: torch.device, dtype: torch.dtype = torch.float32
    ) -> str | None:
        """Why this backend cannot run `spec` there, or None if it can."""
        ...

    def bytes_per_block(self, spec: AttentionSpec, block_size: int, dtype: torch.dtype) -> int:
        """Bytes that one block takes in one layer, keys and values, padding of the layout included."""
        ...

    def view(self, spec: AttentionSpec, pages: torch.Tensor, block_size: int, dtype: torch.dtype) -> KVCache:
        """Take memory as the cache of one layer; nothing is copied or written.

        Args:
            pages: uint8 [num_blocks, at least `bytes_per_block`], a page for each block, of zeros or of what
                another layer left. Pages start at multiples of `PAGE_ALIGNMENT` and need not be neighbours.

        Raises:
            ValueError: the block size, dtype or page does not fit this backend's layout.
        """
        ...

    def write(self, kv: KVCache, key: torch.Tensor, value: torch.Tensor, meta: AttentionMetadata) -> None:
        """Store key [T, num_kv_heads, head_size], value [T, num_kv_heads, v_head_size] at slot_mapping."""
        ...

    def attend(
        self,
        query: torch.Tensor,
        kv: KVCache,
        meta: AttentionMetadata,
        spec: AttentionSpec,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend query [T, num_heads, head_size]; returns [T, num_heads, v_head_size], padding rows zero.

        `sinks` [num_heads] are given if and only if `spec.has_sinks`.
        """
        ...


def check_sinks(spec: AttentionSpec, sinks: torch.Tensor | None) -> None:
    """Refuse a call whose sinks contradict the spec.

    Raises:
        ValueError: says which of the two is wrong.
    """
    if (sinks is not None) != spec.has_sinks:
        given = "given" if sinks is not None else "missing"
        raise ValueError(f"attention sinks are {given} but the layer's spec says has_sinks={spec.has_sinks}")
    if sinks is not None and tuple(sinks.shape) != (spec.num_heads,):
        raise ValueError(f"attention sinks have shape {tuple(sinks.shape)}; expected ({spec.num_heads},)")


def allocate(
    backend: AttentionBackend,
    spec: AttentionSpec,
    num_blocks: int,
    block_size: int,
    device: torch.device,
    dtype: torch.dtype,
) -> KVCache:
    """A zeroed cache for one layer, in memory of its own; raises as `AttentionBackend.view` does."""
    page = backend.bytes_per_block(spec, block_size, dtype)
    pages = torch.zeros(num_blocks, page, dtype=torch.uint8, device=device)
    return backend.view(spec, pages, block_size, dtype)


def divide_pages(
    pages: torch.Tensor, shapes: Iterable[tuple[int, ...]], dtype: torch.dtype
) -> list[torch.Tensor]:
    """Views [num_blocks, *shape] of `dtype`, one for each shape, end to end from the start of each page.

    Raises:
        ValueError: the shapes need more than a page.
    """
    views, start = [], 0
    for shape in shapes:
        end = start + math.prod(shape) * dtype.itemsize
        if end > pages.shape[1]:
            raise ValueError(f"pages of {pages.shape[1]} bytes are too small for a block of this layer")
        views.append(pages[:, start:end].view(dtype).view(-1, *shape))
        start = end
    return views
