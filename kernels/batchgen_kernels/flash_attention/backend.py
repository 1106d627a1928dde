"""Attention by flash-attn's own kernels over pages in its layout. See the package's docstring."""

from __future__ import annotations

import importlib
from abc import abstractmethod
from typing import Any

import torch

from batchgen_kernels import backend as common
from batchgen_kernels.backend import KVCache, PagedBackend, Shapes
from batchgen_kernels.metadata import AttentionMetadata
from batchgen_kernels.spec import AttentionSpec
from batchgen_kernels.storage import stored


class _FlashAttention(PagedBackend):
    """What both versions share; neither `write` nor `attend` waits for the device.

    Args:
        functions: a module with the functions of flash-attn; None imports the installed one.
    """

    name: str
    module: str

    def __init__(self, functions: Any = None) -> None:
        self._functions = functions if functions is not None else importlib.import_module(self.module)

    def shapes(self, spec: AttentionSpec, block_size: int) -> Shapes:
        vectors = (block_size, spec.num_kv_heads)
        return vectors, (*vectors, spec.head_size), (*vectors, spec.v_head_size)

    def write(self, kv: KVCache, key: torch.Tensor, value: torch.Tensor, meta: AttentionMetadata) -> None:
        # Rows without a place put back what the null block has there, so that none has to be counted.
        placed = (meta.slot_mapping >= 0).view(-1, 1, 1)
        slots = meta.slot_mapping.clamp(min=0)
        place = (slots // kv.block_size, slots % kv.block_size)
        for vectors, target in ((key, kv.key), (value, kv.value)):
            target[place] = torch.where(placed, stored(vectors, target.dtype), target[0, 0])

    def attend(
        self,
        query: torch.Tensor,
        kv: KVCache,
        meta: AttentionMetadata,
        spec: AttentionSpec,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        common.check_sinks(spec, sinks)
        if spec.has_sinks:
            raise ValueError(f"the {self.name} attention backend has no attention sinks")
        out = query.new_empty(meta.num_rows, spec.num_heads, spec.v_head_size)
        if meta.num_tokens < meta.num_rows:
            out[meta.num_tokens :] = 0
        if meta.num_tokens:
            out[: meta.num_tokens] = self._attend(query[: meta.num_tokens], kv, meta, _options(spec))
        return out

    @abstractmethod
    def _attend(
        self, query: torch.Tensor, kv: KVCache, meta: AttentionMetadata, options: dict[str, Any]
    ) -> torch.Tensor:
        """Attend all rows of the step that are not padding."""


class FlashAttention2(_FlashAttention):
    """See `AttentionBackend`."""

    name = "flash_attn"
    module = "flash_attn"

    def _attend(
        self, query: torch.Tensor, kv: KVCache, meta: AttentionMetadata, options: dict[str, Any]
    ) -> torch.Tensor:
        if meta.num_tokens == len(meta.seq_lens):
            one: torch.Tensor = self._functions.flash_attn_with_kvcache(
                query.unsqueeze(1),
                kv.key,
                kv.value,
                cache_seqlens=meta.seq_lens,
                block_table=meta.block_table,
                **options,
            )
            return one.squeeze(1)
        starts = torch.nn.functional.pad(meta.seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
        some: torch.Tensor = self._functions.flash_attn_varlen_func(
            query,
            kv.key,
            kv.value,
            cu_seqlens_q=meta.query_start_loc,
            cu_seqlens_k=starts,
            max_seqlen_q=meta.max_query_len,
            max_seqlen_k=meta.max_seq_len,
            block_table=meta.block_table,
            **options,
        )
        return some


class FlashAttention3(_FlashAttention):
    """See `AttentionBackend`."""

    name = "flash_attn_3"
    module = "flash_attn_interface"

    def _attend(
        self, query: torch.Tensor, kv: KVCache, meta: AttentionMetadata, options: dict[str, Any]
    ) -> torch.Tensor:
        out: torch.Tensor = self._functions.flash_attn_with_kvcache(
            query,
            kv.key,
            kv.value,
            cache_seqlens=meta.seq_lens,
            page_table=meta.block_table,
            cu_seqlens_q=meta.query_start_loc,
            max_seqlen_q=meta.max_query_len,
            **options,
        )
        return out


def _options(spec: AttentionSpec) -> dict[str, Any]:
    """A window of flash-attn is the keys before a query's own, which it counts apart."""
    window = (-1, -1) if spec.sliding_window is None else (spec.sliding_window - 1, 0)
    return {
        "softmax_scale": spec.scale,
        "causal": True,
        "window_size": window,
        "softcap": spec.softcap or 0.0,
    }
