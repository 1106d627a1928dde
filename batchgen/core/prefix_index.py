"""Where the cached blocks are found by name. Used by `BlockPool` alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from batchgen.core.block import KVCacheBlock
from batchgen.core.block_hash import BlockHash, BlockKey, block_key


class PrefixIndex:
    """Key to block, or to several: equal blocks computed side by side are all kept.

    They are not merged, so a block table never changes under a running kernel.
    """

    def __init__(self) -> None:
        # A bare block for the usual single holder: one dict per key would be most of the memory here.
        self._blocks: dict[BlockKey, KVCacheBlock | dict[int, KVCacheBlock]] = {}

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

    def insert(self, block: KVCacheBlock, chain: Sequence[BlockHash], depth: int, group_id: int) -> None:
        """Make `block` findable by the name at `depth` of its sequence's."""
        if block.block_hash is not None:
            raise ValueError(f"{block!r} already has a name")
        block.block_hash = key = block_key(chain[depth], group_id)
        block.chain, block.depth = chain, depth
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
        block.chain = ()
        found = self._blocks[key]
        if isinstance(found, dict):
            del found[block.block_id]
            if len(found) == 1:
                self._blocks[key] = next(iter(found.values()))
        else:
            del self._blocks[key]

    def descendants(self, name: BlockHash, depth: int) -> set[BlockKey]:
        """Keys, in every group, of the block `name` and of all that come after it in some sequence.

        A block knows its whole chain, so that those between may be long gone, as they are where a window
        slides. O(index): for faults only.

        Args:
            name: of a block.
            depth: blocks before it in its sequence.
        """
        return {key for key, block in self if block.depth >= depth and block.chain[depth] == name}

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
        for key, found in self._blocks.items():
            assert not isinstance(found, dict) or len(found) > 1, "a single block kept as several"
            for block in self.all(key):
                assert block.block_hash == key, f"{block!r} is kept under {key.hex()}"
                assert key.startswith(block.chain[block.depth]), f"{block!r} is not of its chain"
