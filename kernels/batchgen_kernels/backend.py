"""The protocol that the engine knows of attention, and the cache that a backend hands out."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from batchgen_kernels.capability import CAPABILITIES
from batchgen_kernels.metadata import AttentionMetadata
from batchgen_kernels.shared_prefix import SharingCost
from batchgen_kernels.spec import AttentionSpec
from batchgen_kernels.storage import LARGEST

PAGE_ALIGNMENT = 64
"""Bytes: a line of the processor's cache, and more than any element."""
Part = tuple[torch.dtype, tuple[int, ...]]
"""The dtype and the shape of one tensor in a page."""
Shapes = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]


@dataclass(frozen=True, slots=True, eq=False)
class KVCache:
    """Keys and values of one layer, in blocks. The first dimension of every tensor is the block id.

    The other dimensions are the backend's own and contiguous; only that backend reads or writes them. From
    block to block it may be further than that, by the same number of bytes in every tensor: other layers then
    lie between.

    Args:
        key: as stored.
        value: as stored.
        block_size: positions in a block.
        key_scale: float32, what int8 and fp8 keys are multiplied by; None in other dtypes.
        value_scale: the same for values.
    """

    key: torch.Tensor
    value: torch.Tensor
    block_size: int
    key_scale: torch.Tensor | None = None
    value_scale: torch.Tensor | None = None

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, the null block 0 included."""
        return int(self.key.shape[0])

    @property
    def dtype(self) -> torch.dtype:
        """Of the stored elements."""
        return self.key.dtype

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All of them, scales included."""
        every = (self.key, self.value, self.key_scale, self.value_scale)
        return [tensor for tensor in every if tensor is not None]


class AttentionBackend(Protocol):
    """Causal attention over a paged cache.

    In one step of a layer `write` comes first, with all rows of the step, then `attend`, which reads the
    step's own keys and values back as they were stored, so that where a prompt is cut into steps changes
    nothing.
    """

    @property
    def name(self) -> str:
        """The name that `select` knows it by."""
        ...

    def supports(
        self,
        spec: AttentionSpec,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
    ) -> str | None:
        """Why this backend cannot run `spec` there, or None if it can.

        Args:
            spec: the layer.
            device: of queries, keys and values.
            dtype: of queries, keys and values.
            kv_dtype: what keys and values are stored as; None for `dtype`.
        """
        ...

    def bytes_per_block(self, spec: AttentionSpec, block_size: int, kv_dtype: torch.dtype) -> int:
        """Bytes of one block of one layer: keys, values, scales of int8 and fp8, and padding of the layout.

        A multiple of `PAGE_ALIGNMENT`.
        """
        ...

    def view(
        self, spec: AttentionSpec, pages: torch.Tensor, block_size: int, kv_dtype: torch.dtype
    ) -> KVCache:
        """Take memory as the cache of one layer; nothing is copied or written.

        Args:
            spec: the layer.
            pages: uint8 [num_blocks, at least `bytes_per_block`], a page for each block, of zeros or of what
                another layer left. Pages start at multiples of `PAGE_ALIGNMENT` and need not be neighbours.
            block_size: positions in a block.
            kv_dtype: what keys and values are stored as.

        Raises:
            ValueError: the block size, dtype or page does not fit this backend's layout.
        """
        ...

    def sharing(self, spec: AttentionSpec, dtype: torch.dtype, kv: KVCache) -> SharingCost | None:
        """When blocks that sequences have in common are to be described in `AttentionMetadata.shared`.

        None: never, as they are not attended to once in this layer, or are found in the metadata itself.

        Args:
            spec: the layer.
            dtype: of queries.
            kv: its cache.
        """
        ...

    def write(self, kv: KVCache, key: torch.Tensor, value: torch.Tensor, meta: AttentionMetadata) -> None:
        """Store key [T, num_kv_heads, head_size], value [T, num_kv_heads, v_head_size] at slot_mapping.

        What a token is stored as depends on that token alone. See `storage.stored` for the rounding; what is
        not finite after it is stored as NaN, so that it is seen in every row that attends to it.
        """
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


class PagedBackend(ABC):
    """What backends have in common: the table of `capability` says what they can do, and in a page come the
    scales of keys and of values, where there are any, then keys, then values."""

    name: str

    def supports(
        self,
        spec: AttentionSpec,
        device: torch.device,
        dtype: torch.dtype = torch.float32,
        kv_dtype: torch.dtype | None = None,
    ) -> str | None:
        """See `AttentionBackend`."""
        return CAPABILITIES[self.name].refusal(spec, device, dtype, kv_dtype)

    def bytes_per_block(self, spec: AttentionSpec, block_size: int, kv_dtype: torch.dtype) -> int:
        """See `AttentionBackend`."""
        return page_bytes(self._parts(spec, block_size, kv_dtype))

    def view(
        self, spec: AttentionSpec, pages: torch.Tensor, block_size: int, kv_dtype: torch.dtype
    ) -> KVCache:
        """See `AttentionBackend`."""
        refusal = CAPABILITIES[self.name].page_refusal(spec, block_size, kv_dtype)
        if refusal is not None:
            raise ValueError(refusal)
        *scales, key, value = divide_pages(pages, self._parts(spec, block_size, kv_dtype))
        return KVCache(key, value, block_size, *scales)

    def sharing(self, spec: AttentionSpec, dtype: torch.dtype, kv: KVCache) -> SharingCost | None:
        """See `AttentionBackend`; never."""
        return None

    @abstractmethod
    def shapes(self, spec: AttentionSpec, block_size: int) -> Shapes:
        """Of the scales, of the keys and of the values in a page."""

    def _parts(self, spec: AttentionSpec, block_size: int, kv_dtype: torch.dtype) -> list[Part]:
        scales, key, value = self.shapes(spec, block_size)
        scaled = [(torch.float32, scales)] * 2 if kv_dtype in LARGEST else []
        return [*scaled, (kv_dtype, key), (kv_dtype, value)]


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
    kv_dtype: torch.dtype,
) -> KVCache:
    """A zeroed cache for one layer, in memory of its own; raises as `AttentionBackend.view` does."""
    page = backend.bytes_per_block(spec, block_size, kv_dtype)
    pages = torch.zeros(num_blocks, page, dtype=torch.uint8, device=device)
    return backend.view(spec, pages, block_size, kv_dtype)


def page_bytes(parts: Sequence[Part]) -> int:
    """Bytes of a page that holds `parts` one after the other, rounded up to `PAGE_ALIGNMENT`."""
    return -(-sum(map(_part_bytes, parts)) // PAGE_ALIGNMENT) * PAGE_ALIGNMENT


def divide_pages(pages: torch.Tensor, parts: Sequence[Part]) -> list[torch.Tensor]:
    """A view [num_blocks, *shape] for each part, end to end from the start of each page.

    Parts of larger elements come first, so that each is aligned.

    Raises:
        ValueError: the parts need more than a page.
    """
    if page_bytes(parts) > pages.shape[1]:
        raise ValueError(f"pages of {pages.shape[1]} bytes are too small for a block of this layer")
    views, start = [], 0
    for part in parts:
        end = start + _part_bytes(part)
        dtype, shape = part
        views.append(pages[:, start:end].view(dtype).view(-1, *shape))
        start = end
    return views


def _part_bytes(part: Part) -> int:
    dtype, shape = part
    return math.prod(shape) * dtype.itemsize
