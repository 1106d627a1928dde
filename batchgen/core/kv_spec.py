"""What the layers of a model keep in the cache, and how the cache is divided. Built by the engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """What one layer keeps per token.

    Args:
        num_kv_heads: heads of keys and values.
        head_size: elements of one key.
        v_head_size: elements of one value.
        dtype: of the stored elements, by torch's name ("float32").
        sliding_window: keys that a query sees, its own included; `None` sees all.
    """

    num_kv_heads: int
    head_size: int
    v_head_size: int
    dtype: str
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window: {self.sliding_window} is not allowed; use 1 or more, or None")


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers that share one block table per request: `layers` are their indices in the model."""

    spec: KVCacheSpec
    layers: tuple[int, ...]


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


def group_layers(specs: Sequence[KVCacheSpec]) -> tuple[KVCacheGroup, ...]:
    """Layers of equal spec form a group; groups are in order of their first layer."""
    layers: dict[KVCacheSpec, list[int]] = {}
    for layer, spec in enumerate(specs):
        layers.setdefault(spec, []).append(layer)
    return tuple(KVCacheGroup(spec, tuple(indices)) for spec, indices in layers.items())
