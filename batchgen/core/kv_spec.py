"""What the layers of a model keep in the cache, and which of them share block tables. Built by the engine."""

from __future__ import annotations

from dataclasses import dataclass


def peak_blocks(window: int | None, num_tokens: int, block_size: int, max_chunk: int) -> int:
    """Most blocks that a sequence holds at once while its first `num_tokens` are computed.

    Args:
        window: keys that a query sees, its own included; `None` sees all, and so needs all blocks.
        num_tokens: of the sequence.
        block_size: tokens in a block.
        max_chunk: most tokens computed in one step.
    """
    blocks = -(-num_tokens // block_size)
    if window is None:
        return blocks
    # The window before a chunk and the chunk, neither of them aligned to blocks.
    return min(blocks, -(-(window + max_chunk - 2) // block_size) + 1)


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """What one layer keeps of a sequence.

    Args:
        page_bytes: bytes of its keys and values in one block, padding included.
        sliding_window: keys that a query sees, its own included; `None` sees all.
        source: an earlier layer whose keys and values it reads; it keeps none then.
    """

    page_bytes: int
    sliding_window: int | None = None
    source: int | None = None

    def __post_init__(self) -> None:
        if self.page_bytes < 1:
            raise ValueError(f"page_bytes: {self.page_bytes} is not allowed; use 1 or more")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window: {self.sliding_window} is not allowed; use 1 or more, or None")


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers that share one block table per request.

    Args:
        sliding_window: how far back any of them looks; `None` is to the start.
        layers: their indices in the model, without those that read another layer's keys and values.
    """

    sliding_window: int | None
    layers: tuple[int, ...]

    def peak_blocks(self, num_tokens: int, block_size: int, max_chunk: int) -> int:
        """See `peak_blocks`."""
        return peak_blocks(self.sliding_window, num_tokens, block_size, max_chunk)


@dataclass(frozen=True, slots=True)
class KVCacheConfig:
    """One pool for all groups.

    Args:
        num_blocks: blocks in the pool, the reserved null block 0 included.
        block_size: tokens in a block.
        groups: at least one.
    """

    num_blocks: int
    block_size: int
    groups: tuple[KVCacheGroup, ...]

    def __post_init__(self) -> None:
        for name, value, least in (("num_blocks", self.num_blocks, 2), ("block_size", self.block_size, 1)):
            if value < least:
                raise ValueError(f"{name}: {value} is not allowed; use {least} or more")
        if not self.groups:
            raise ValueError("groups: () is not allowed; give at least one group of layers")
