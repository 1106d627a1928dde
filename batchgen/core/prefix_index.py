"""Where the cached blocks are found by name. Used by `BlockPool` alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator

from batchgen.core.block import KVCacheBlock
from batchgen.core.block_hash import BlockKey


class PrefixIndex:
    """Key to block, or to several: equal blocks computed side by side are all kept.

    They are not merged, so a block table never changes under a running kernel.
    """

    def __init__(self) -> None:
        # A bare block for the usual single holder: one dict per key would be most of the memory here.
        self._blocks: dict[BlockKey, KVCacheBlock | dict[int, KVCacheBlock]] = {}
        self._parents: dict[BlockKey, BlockKey | None] = {}

    def get(self, key: BlockKey) -> KVCacheBlock | None:
        """Some block of that name."""
        found = self._blocks.get(key)
        if isinstance(found, dict):
            return next(iter(found.values()))
        return found

    def all(self, key: BlockKey) -> list[KVCacheBlock]:
        """Every block of that name."""
        found = self._blocks.get(key)
        if found is None:
            return []
        return list(found.values()) if isinstance(found, dict) else [found]

    def insert(self, block: KVCacheBlock, key: BlockKey, parent: BlockKey | None) -> None:
        """Make `block` findable; `parent` is the key of the block before it, `None` for the first."""
        if block.block_hash is not None:
            raise ValueError(f"{block!r} already has a name")
        block.block_hash = key
        self._parents[key] = parent
        found = self._blocks.get(key)
        if found is None:
            self._blocks[key] = block
        elif isinstance(found, dict):
            found[block.block_id] = block
        else:
            self._blocks[key] = {found.block_id: found, block.block_id: block}

    def remove(self, block: KVCacheBlock) -> None:
        """Forget `block`; no effect on one without a name."""
        key = block.block_hash
        if key is None:
            return
        block.block_hash = None
        found = self._blocks[key]
        if isinstance(found, dict):
            del found[block.block_id]
            if len(found) == 1:
                self._blocks[key] = next(iter(found.values()))
        else:
            del self._blocks[key]
            del self._parents[key]

    def with_descendants(self, keys: Iterable[BlockKey]) -> set[BlockKey]:
        """`keys` and every key whose chain goes through one of them. O(index): for faults only."""
        children: defaultdict[BlockKey | None, list[BlockKey]] = defaultdict(list)
        for key, parent in self._parents.items():
            children[parent].append(key)
        found: set[BlockKey] = set()
        pending = list(keys)
        while pending:
            key = pending.pop()
            if key not in found:
                found.add(key)
                pending.extend(children.get(key, ()))
        return found

    def parent(self, key: BlockKey) -> BlockKey | None:
        """Key of the block before `key`; `None` at the start of a chain."""
        return self._parents[key]

    def __contains__(self, key: object) -> bool:
        return key in self._blocks

    def __len__(self) -> int:
        """Number of different keys."""
        return len(self._blocks)

    def __iter__(self) -> Iterator[tuple[BlockKey, KVCacheBlock]]:
        for key in self._blocks:
            for block in self.all(key):
                yield key, block

    def check(self) -> None:
        """Assert that every entry's block carries the name it is kept under."""
        assert self._blocks.keys() == self._parents.keys()
        for key, found in self._blocks.items():
            assert not isinstance(found, dict) or len(found) > 1, "a single block kept as several"
            for block in self.all(key):
                assert block.block_hash == key, f"{block!r} is kept under {key.hex()}"
