"""The protocol that the engine knows of attention, and the cache that a backend hands out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from batchgen_kernels.metadata import AttentionMetadata
from batchgen_kernels.spec import AttentionSpec


@dataclass(frozen=True, slots=True, eq=False)
class KVCache:
    """Keys and values of one layer, in blocks. The first dimension of both tensors is the block id.

    The other dimensions are the backend's own; only that backend reads or writes them.
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

    In one step of a layer `copy_blocks` comes first, then `write` with all rows of the step, then `attend`.
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

    def allocate(
        self, spec: AttentionSpec, num_blocks: int, block_size: int, device: torch.device, dtype: torch.dtype
    ) -> KVCache:
        """A zeroed cache for one layer.

        Raises:
            ValueError: the block size or dtype does not fit this backend's layout.
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

    def copy_blocks(self, kv: KVCache, src: Sequence[int], dst: Sequence[int]) -> None:
        """Copy block src[i] over block dst[i] for every i; all are read before any is written."""
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


def copy_blocks(kv: KVCache, src: Sequence[int], dst: Sequence[int]) -> None:
    """`AttentionBackend.copy_blocks` for any layout whose first dimension is the block id."""
    if src:
        source = torch.tensor(src, dtype=torch.int64, device=kv.key.device)
        target = torch.tensor(dst, dtype=torch.int64, device=kv.key.device)
        kv.key.index_copy_(0, target, kv.key.index_select(0, source))
        kv.value.index_copy_(0, target, kv.value.index_select(0, source))
