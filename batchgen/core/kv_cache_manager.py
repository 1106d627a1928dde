"""The scheduler's one view of the cache: look up, allocate, register, free, fork.

Lookups change nothing; `allocate_slots` either does all of its work or returns `None` and does none.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from batchgen.core.block import KVCacheBlock
from batchgen.core.block_hash import block_key, extend_block_hashes
from batchgen.core.block_pool import BlockPool
from batchgen.core.coordinator import HitBlocks, KVCacheCoordinator
from batchgen.core.kv_spec import KVCacheConfig
from batchgen.core.single_type import FullAttentionManager
from batchgen.types import Request

Copies = list[tuple[int, int]]
"""(source, destination) block ids, copied in this order in every layer of the group before any write."""


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Cached blocks that a request can start from, per group; `num_tokens` is whole blocks."""

    blocks: HitBlocks
    num_tokens: int


class KVCacheManager:
    """Block tables of all requests that hold blocks.

    Args:
        config: the pool and its groups.
        prefix_caching: name full blocks and look for them.
        max_chunk: most tokens that one request computes in one step.
    """

    def __init__(self, config: KVCacheConfig, *, prefix_caching: bool, max_chunk: int) -> None:
        self.block_size = config.block_size
        self.prefix_caching = prefix_caching
        self.pool = BlockPool(config.num_blocks)
        self.coordinator = KVCacheCoordinator(config, self.pool, max_chunk)
        self.requests: dict[int, Request] = {}
        # Partial blocks that forks share. All holders but the last to write need a block for their copy.
        self._shared_tails: dict[int, KVCacheBlock] = {}

    @property
    def num_reserved(self) -> int:
        """Free blocks set aside so that every fork can copy its shared partial block."""
        return sum(block.ref_cnt - 1 for block in self._shared_tails.values())

    @property
    def num_available(self) -> int:
        """Free blocks that are not set aside."""
        return self.pool.num_free - self.num_reserved

    def peak_blocks(self, num_tokens: int) -> int:
        """Most blocks that a sequence holds at once while its first `num_tokens` are computed."""
        return self.coordinator.peak_blocks(num_tokens)

    def get_computed_blocks(self, request: Request) -> PrefixHit:
        """The longest cached prefix of a request without blocks; no side effects on the cache.

        It ends before the first position whose logits or hidden state are needed, such as the last known
        token's.
        """
        if not self.prefix_caching:
            return PrefixHit(self.coordinator.find_longest_hit((), 0), 0)
        extend_block_hashes(request, self.block_size)
        max_blocks = request.first_needed // self.block_size
        blocks = self.coordinator.find_longest_hit(request.block_hashes, max_blocks)
        return PrefixHit(blocks, len(blocks[0]) * self.block_size)

    def num_missing_blocks(self, request: Request) -> int:
        """Blocks that a request with tables needs to compute its tokens, and its forks to begin."""
        missing = self.coordinator.num_missing_blocks(request.request_id, request.num_expected)
        return missing + self.num_fork_blocks(request)

    def num_fork_blocks(self, request: Request) -> int:
        """Blocks that a request's forks, none of them made yet, need for one token each."""
        return request.num_forks * len(self.coordinator.managers)

    def allocate_slots(
        self, request: Request, num_new_tokens: int, hit: PrefixHit | None = None, *, headroom: int = 0
    ) -> Copies | None:
        """Make room for the next `num_new_tokens` of a request.

        |  hit (admission) or computed  |  new  |  known, later steps  |
        |  touched, or in the tables    | allocated | only counted: must fit at admission |

        Args:
            request: has blocks already, or is admitted with `hit`.
            num_new_tokens: tokens to compute after the computed ones (or after the hit).
            hit: from `get_computed_blocks` in this very moment; makes this an admission.
            headroom: available blocks that an admission must leave once all its known tokens have theirs.

        Returns:
            The copies of shared partial blocks that must come before any write, or `None` if the blocks
            are not there; then nothing has changed.
        """
        if hit is None:
            return self._extend(request, num_new_tokens)
        needed = self.coordinator.num_missing_after_hit(hit.blocks, request.num_tokens)
        if needed + headroom > self.num_available:
            return None
        self.coordinator.open_tables(request.request_id, hit.blocks)
        self.requests[request.request_id] = request
        self.coordinator.allocate(request.request_id, hit.num_tokens + num_new_tokens)
        return []

    def register(self, request: Request, num_tokens: int) -> list[KVCacheBlock]:
        """Name the blocks that the first `num_tokens` known tokens fill; returns those named now."""
        if not self.prefix_caching:
            return []
        registered = self.coordinator.num_registered(request.request_id)
        # In most steps of decoding no block is filled, which is seen without asking what is known.
        if num_tokens // self.block_size <= registered:
            return []
        num_full = min(num_tokens, request.num_tokens) // self.block_size
        if num_full <= registered:
            return []
        extend_block_hashes(request, self.block_size)
        return self.coordinator.register(request.request_id, request.block_hashes, num_full)

    def unregister(self, blocks: Iterable[KVCacheBlock]) -> None:
        """Take names away whose contents were never written."""
        for block in blocks:
            self.pool.unregister(block)

    def truncate(self, request: Request, num_tokens: int) -> None:
        """Free the blocks beyond the first `num_tokens` tokens of a request."""
        self.coordinator.truncate(request.request_id, num_tokens)

    def free(self, request: Request) -> None:
        """Free all blocks of a request, the last first."""
        self.coordinator.free(request.request_id)
        del self.requests[request.request_id]
        self._settle_forks()

    def fork(self, parent: Request, child: Request) -> bool:
        """Let `child` share all blocks of `parent`, and set aside what copies of the partial ones need.

        Returns:
            Whether there was a block to set aside in every group; else nothing has changed.
        """
        num_computed = parent.num_computed_tokens
        partial = len(self.coordinator.managers) if num_computed % self.block_size else 0
        if partial > self.num_available:
            return False
        tails = self.coordinator.fork(parent.request_id, child.request_id, num_computed)
        self._shared_tails.update((block.block_id, block) for block in tails)
        self.requests[child.request_id] = child
        child.block_hashes = parent.block_hashes[: num_computed // self.block_size]
        return True

    def evict_from(self, request: Request, position: int) -> list[Request]:
        """Forget everything cached that depends on the request's keys and values from `position` on.

        The request may have been preempted: what it left in the cache is forgotten all the same.

        Returns:
            The other requests that have read any of those blocks, or may have, in order of admission.
        """
        first = position // self.block_size
        tables = self.block_ids(request) if request.request_id in self.requests else []
        own = {i for ids in tables for i in ids[first:]}
        name = request.block_hashes[first : first + 1]
        keys = self.pool.index.descendants(name[0], first) if name else ()
        bad = own.union(block.block_id for block in self.pool.evict(keys))
        bad.discard(self.pool.null_block.block_id)

        def depends(other: Request) -> bool:
            # Where a window has slid on, a request may have read what it no longer holds.
            goes_through = bool(name) and other.block_hashes[first : first + 1] == name
            return goes_through or any(not bad.isdisjoint(ids) for ids in self.block_ids(other))

        return [other for other in self.requests.values() if other is not request and depends(other)]

    def block_ids(self, request: Request) -> list[array[int]]:
        """Block ids per group; live arrays that the next call may change in place."""
        return self.coordinator.block_ids(request.request_id)

    def num_slack_tokens(self, request: Request) -> int:
        """Slots of a request's blocks, over all groups, that hold no token."""
        each = self.coordinator.num_blocks(request.request_id) * self.block_size - request.num_computed_tokens
        return len(self.coordinator.managers) * each

    def check(self) -> None:
        """Assert the invariants of pool, tables, prefix index and reservations."""
        self.pool.check()
        held = Counter[int]()
        for manager in self.coordinator.managers:
            assert manager.tables.keys() == self.requests.keys(), "a table without its request"
            for request_id, table in manager.tables.items():
                manager.check(request_id, self.requests[request_id].block_hashes)
                held.update(table.ids)
        del held[self.pool.null_block.block_id]
        counts = {b.block_id: b.ref_cnt for b in self.pool.blocks if b.ref_cnt and not b.is_null}
        assert counts == held, f"reference counts {counts} differ from the block tables {dict(held)}"
        for manager in self.coordinator.managers:
            if isinstance(manager, FullAttentionManager):
                for _, block in manager.named_blocks():
                    parent = block_key(block.chain[block.depth - 1], manager.group_id)
                    assert block.depth == 0 or parent in self.pool.index, f"{block!r} outlived its prefix"
        self._check_forks()

    def _extend(self, request: Request, num_new_tokens: int) -> Copies | None:
        request_id, num_computed = request.request_id, request.num_computed_tokens
        if self.coordinator.slides:
            self.coordinator.free_skipped(request_id, num_computed)
        if not self._shared_tails and self.coordinator.covers(request_id, num_computed + num_new_tokens):
            return []
        num_copies = len(self.coordinator.shared_tails(request_id, num_computed)) if self._shared_tails else 0
        needed = self.coordinator.num_new_blocks(request_id, num_computed + num_new_tokens)
        # Each copy takes a block that was set aside for it, so only the others must be available.
        if needed > self.num_available:
            return None
        copies = self.coordinator.copy_tails(request_id, num_computed) if num_copies else []
        self.coordinator.allocate(request_id, num_computed + num_new_tokens)
        if copies:
            self._settle_forks()
        return copies

    def _settle_forks(self) -> None:
        """Forget partial blocks that one holder is left with: it writes in place."""
        if self._shared_tails:
            self._shared_tails = {i: b for i, b in self._shared_tails.items() if b.ref_cnt > 1}

    def _check_forks(self) -> None:
        assert self.num_available >= 0, "more blocks set aside than are free"
        for block in self._shared_tails.values():
            assert block.ref_cnt > 1, f"{block!r} is taken as shared"
            assert block.block_hash is None, f"{block!r} is partial and has a name"
        for request in self.requests.values():
            tails = self.coordinator.shared_tails(request.request_id, request.num_computed_tokens)
            missing = [b for b in tails if b.block_id not in self._shared_tails]
            assert not missing, f"request {request.request_id}: no copy set aside for {missing}"
