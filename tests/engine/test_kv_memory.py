"""The memory behind the cache: groups over each other, copies of blocks, layers that share a cache."""

from __future__ import annotations

import pytest
import torch

from batchgen.core.kv_layout import KVCacheLayout
from batchgen.engine.kv_memory import KVMemory, plan_kv_layout
from batchgen.models.layer_attention import LayerAttention
from batchgen_kernels import AttentionSpec
from batchgen_kernels.reference import ReferenceBackend

BACKEND = ReferenceBackend()
BLOCK, BLOCKS = 16, 6


def layer(
    kv_heads: int, head_size: int, window: int | None = None, source: int | None = None
) -> LayerAttention:
    spec = AttentionSpec(
        num_heads=4,
        num_kv_heads=kv_heads,
        head_size=head_size,
        v_head_size=head_size // 2,
        scale=1.0,
        sliding_window=window,
    )
    return LayerAttention(spec, None, source)


LAYERS = {
    "equal": [layer(2, 16), layer(2, 16, 20), layer(2, 16), layer(2, 16, 20)],
    "unequal": [layer(4, 32), layer(2, 16, 20), layer(1, 48, 20), layer(2, 16, 20)],
    "sharing": [layer(2, 16), layer(2, 32, 20), layer(2, 16, None, 0), layer(2, 32, 20, 1)],
}


def make(layers: list[LayerAttention], kv_dtype: torch.dtype) -> tuple[KVCacheLayout, KVMemory]:
    layout = plan_kv_layout(layers, BACKEND, kv_dtype, block_size=BLOCK, max_chunk=32, max_tokens=512)
    memory = KVMemory(layout, layers, BACKEND, kv_dtype, num_blocks=BLOCKS, block_size=BLOCK)
    return layout, memory


@pytest.mark.parametrize("kv_dtype", [torch.float32, torch.int8], ids=str)
@pytest.mark.parametrize("name", LAYERS)
def test_blocks_of_two_groups_are_written_and_copied_apart(name: str, kv_dtype: torch.dtype) -> None:
    """Each layer fills the blocks of its group, then one block of each group is copied to a free one."""
    layout, memory = make(LAYERS[name], kv_dtype)
    tables = {g: [1 + 2 * g, 2 + 2 * g] for g in range(len(layout.groups))}
    if max(map(max, tables.values())) >= BLOCKS - 1:
        tables = {g: [1 + g] for g in range(len(layout.groups))}
    owners = [(i, p.group) for i, p in enumerate(layout.places) if LAYERS[name][i].source is None]
    for i, group in owners:
        for tensor in memory.caches[i].tensors:
            tensor[tables[group]] = i + 1
    copies = [(tables[g][0], BLOCKS - 1) for g in tables]
    for copy in copies:
        memory.copy_blocks([copy])
        for i, group in owners:
            for tensor in memory.caches[i].tensors:
                assert (tensor[tables[group]] == i + 1).all()
                assert not tensor[0].any()
                if copy[0] in tables[group]:
                    assert (tensor[BLOCKS - 1] == i + 1).all()


def test_copies_of_one_step_read_before_they_write() -> None:
    _, memory = make(LAYERS["equal"], torch.float32)
    key = memory.caches[0].key
    for block in (1, 2, 3):
        key[block] = block
    memory.copy_blocks([(1, 2), (2, 3)])
    assert [float(key[block].max()) for block in (1, 2, 3)] == [1, 1, 2]


def test_memory_is_the_blocks_of_the_layout_and_goes_on_close() -> None:
    layout, memory = make(LAYERS["unequal"], torch.float32)
    assert sum(buffer.nbytes for buffer in memory.buffers) == BLOCKS * layout.block_bytes
    assert layout.block_bytes < sum(spec.page_bytes for spec in layout.specs)
    memory.close()
    assert not memory.buffers
    assert not memory.caches
