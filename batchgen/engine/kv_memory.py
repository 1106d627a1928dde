"""The memory behind the KV cache: what each layer takes of it, and the tensors that hold it.

`build.py` asks for a layout before the cache is sized; `ModelRunner` owns the tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from batchgen.core.kv_layout import KVCacheLayout, plan_layout
from batchgen.core.kv_spec import KVCacheSpec
from batchgen.engine.device import HOST, Device
from batchgen.engine.transfer import Transfer
from batchgen.models.layer_attention import LayerAttention
from batchgen_kernels.backend import AttentionBackend, KVCache


def plan_kv_layout(
    layers: Sequence[LayerAttention],
    backend: AttentionBackend,
    kv_dtype: torch.dtype,
    *,
    block_size: int,
    max_chunk: int,
    max_tokens: int,
) -> KVCacheLayout:
    """`core.kv_layout.plan_layout` for the layers that the probe found and the pages of a backend."""

    specs = [
        KVCacheSpec(
            backend.bytes_per_block(layer.spec, block_size, kv_dtype), layer.spec.sliding_window, layer.source
        )
        for layer in layers
    ]
    return plan_layout(specs, block_size=block_size, max_chunk=max_chunk, max_tokens=max_tokens)


class KVMemory:
    """Buffers of a layout, and each layer's cache in them.

    A block that its group gives back holds, for the layers of the next group, the bits of other layers: no
    kernel reads a position before it was written there. The null block is never written and stays zero.

    Args:
        layout: what lies where.
        layers: as in the layout.
        backend: divides a layer's pages into keys and values.
        kv_dtype: of the stored elements.
        num_blocks: blocks in the pool, the null block included.
        block_size: tokens in a block.
        device: where the memory is.
    """

    def __init__(
        self,
        layout: KVCacheLayout,
        layers: Sequence[LayerAttention],
        backend: AttentionBackend,
        kv_dtype: torch.dtype,
        *,
        num_blocks: int,
        block_size: int,
        device: Device = HOST,
    ) -> None:
        self.buffers = [
            torch.zeros(num_blocks, size, dtype=torch.uint8, device=device.place) for size in layout.buffers
        ]
        self._transfer = Transfer(device)
        self.caches: list[KVCache] = []
        for layer, spec, place in zip(layers, layout.specs, layout.places, strict=True):
            pages = self.buffers[place.buffer][:, place.offset : place.offset + spec.page_bytes]
            self.caches.append(backend.view(layer.spec, pages, block_size, kv_dtype))

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy (source, destination) blocks of any group; all are read before any is written."""
        if copies:
            sources, targets = self._transfer(list(np.array(copies).T.copy()))
            for buffer in self.buffers:
                buffer[targets] = buffer[sources]

    def close(self) -> None:
        """Give the memory back."""
        self.caches.clear()
        self.buffers.clear()
