"""Where the keys and values of a model's layers lie in memory. Planned once, by the engine.

A block belongs to one group of layers at a time, so the groups lie over each other in the same memory:

```
             buffer 0   buffer 1   buffer 2
    block b  | layer 0 | layer 2 | layer 4 |   if group 0 holds it
             | layer 1 | layer 3 | padding |   if group 1 holds it
```

A group that needs fewer bytes than another leaves padding in each of its blocks. Where a model has few
layers that see everything and many with a window, the many are therefore divided into several groups of
about the size of the few.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from batchgen.core.kv_spec import KVCacheGroup, KVCacheSpec, peak_blocks

GROUP_COST = 0.02
"""Share of memory that one group fewer is worth: each costs time in every step."""

Kinds = dict[int | None, list[int]]
"""Layers with keys and values of their own by how far back they are read, the largest pages first."""


class Place(NamedTuple):
    """Where a layer's pages are: `offset` bytes into each row of a buffer, in blocks of its group."""

    group: int
    buffer: int
    offset: int


@dataclass(frozen=True, slots=True)
class KVCacheLayout:
    """Buffers of one row a block, and each layer's place in them.

    Args:
        groups: each layer with keys and values of its own is in exactly one.
        buffers: bytes of a row, per buffer.
        places: per layer; one that reads another layer's keys and values has the place of that layer.
        specs: per layer, what the layout was planned for.
    """

    groups: tuple[KVCacheGroup, ...]
    buffers: tuple[int, ...]
    places: tuple[Place, ...]
    specs: tuple[KVCacheSpec, ...]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block, whichever group holds it."""
        return sum(self.buffers)

    def padding(self, group: int) -> int:
        """Bytes that a block of this group leaves unused."""
        return self.block_bytes - sum(self.specs[layer].page_bytes for layer in self.groups[group].layers)

    def peak_blocks(self, num_tokens: int, block_size: int, max_chunk: int) -> int:
        """Most blocks of all groups that a sequence holds at once; see `kv_spec.peak_blocks`."""
        return sum(group.peak_blocks(num_tokens, block_size, max_chunk) for group in self.groups)


def plan_layout(
    specs: Sequence[KVCacheSpec], *, block_size: int, max_chunk: int, max_tokens: int
) -> KVCacheLayout:
    """Divide layers into groups, and lay the groups over each other, for least memory.

    What counts is the memory of a sequence against that of its keys and values alone, for one of a single
    block and for one of `max_tokens`, whichever is worse.

    Args:
        specs: per layer of the model.
        block_size: tokens in a block.
        max_chunk: most tokens of a sequence computed in one step.
        max_tokens: longest sequence; a window that none outgrows is as good as none.
    """
    kinds = _kinds(specs, max_tokens)

    def cost(layout: KVCacheLayout) -> tuple[float, int]:
        overhead = max(
            layout.block_bytes * layout.peak_blocks(n, block_size, max_chunk) / needed(n)
            for n in (block_size, max_tokens)
        )
        return overhead + GROUP_COST * len(layout.groups), len(layout.groups)

    def needed(num_tokens: int) -> int:
        return sum(
            specs[layer].page_bytes * peak_blocks(window, num_tokens, block_size, max_chunk)
            for window, layers in kinds.items()
            for layer in layers
        )

    return min((_lay_out(groups, specs) for groups in _divisions(kinds, specs)), key=cost)


def _kinds(specs: Sequence[KVCacheSpec], max_tokens: int) -> Kinds:
    reach = [spec.sliding_window or max_tokens for spec in specs]
    for layer, spec in enumerate(specs):
        if spec.source is not None:
            reach[spec.source] = max(reach[spec.source], reach[layer])
    kinds: Kinds = {}
    for layer, spec in enumerate(specs):
        if spec.source is None:
            kinds.setdefault(reach[layer] if reach[layer] < max_tokens else None, []).append(layer)
    # The prefix that all layers have is at most what those that see everything have: they are asked first.
    return {
        window: sorted(kinds[window], key=lambda layer: -specs[layer].page_bytes)
        for window in sorted(kinds, key=lambda window: window is not None)
    }


def _divisions(kinds: Kinds, specs: Sequence[KVCacheSpec]) -> Iterator[tuple[KVCacheGroup, ...]]:
    """Every sensible division: for each size that a part can have, all kinds in parts of at most that."""

    def largest_part(layers: list[int], parts: int) -> int:
        return sum(specs[layer].page_bytes for layer in layers[::parts])

    sizes = {
        window: [largest_part(layers, parts) for parts in range(1, len(layers) + 1)]
        for window, layers in kinds.items()
    }
    least = max(size[-1] for size in sizes.values())
    for limit in sorted({s for size in sizes.values() for s in size if s >= least}):
        parts = {
            window: next(i for i, s in enumerate(size, 1) if s <= limit) for window, size in sizes.items()
        }
        yield tuple(
            KVCacheGroup(window, tuple(layers[i :: parts[window]]))
            for window, layers in kinds.items()
            for i in range(parts[window])
        )


def _lay_out(groups: tuple[KVCacheGroup, ...], specs: Sequence[KVCacheSpec]) -> KVCacheLayout:
    """Layer j of each group in buffer j, or where pages differ so much that it takes less, all in a row."""
    sizes = [[specs[layer].page_bytes for layer in group.layers] for group in groups]
    buffers = [max(column) for column in _columns(sizes)]
    row = max(map(sum, sizes))
    stacked = sum(buffers) == row
    places: dict[int, Place] = {}
    for g, group in enumerate(groups):
        for j, layer in enumerate(group.layers):
            places[layer] = Place(g, j, 0) if stacked else Place(g, 0, sum(sizes[g][:j]))
    return KVCacheLayout(
        groups=groups,
        buffers=tuple(buffers) if stacked else (row,),
        places=tuple(
            places[layer if spec.source is None else spec.source] for layer, spec in enumerate(specs)
        ),
        specs=tuple(specs),
    )


def _columns(sizes: list[list[int]]) -> Iterator[list[int]]:
    for j in range(max(map(len, sizes))):
        yield [row[j] for row in sizes if j < len(row)]
