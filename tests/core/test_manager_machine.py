"""State machine of the cache manager: refusals and lookups change nothing, copies never lack a block.

Hits are compared with those of a search through everything that the prefix index holds.
"""

from __future__ import annotations

from core_sim import executed
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from machine_steps import machine_settings

from batchgen.core.block_hash import block_key
from batchgen.core.kv_cache_manager import KVCacheManager
from batchgen.core.kv_spec import KVCacheConfig, KVCacheGroup
from batchgen.types import Request, SamplingParams

small = st.integers(0, 7)


def snapshot(manager):
    """Everything that a refusal or a lookup must leave alone."""
    tables = [table for m in manager.coordinator.managers for table in m.tables.items()]
    return (
        [(block.block_id, block.ref_cnt, block.block_hash) for block in manager.pool.blocks],
        [block.block_id for block in manager.pool._free],
        [(i, list(table.ids), table.num_registered) for i, table in tables],
        manager.num_reserved,
    )


def longest_hit(manager, request):
    """The most tokens after which every key that the next query reads is in the index, in every group."""
    if not manager.prefix_caching:
        return 0
    size = manager.block_size
    windows = [m.group.sliding_window for m in manager.coordinator.managers]

    def cached(group, position):
        return block_key(request.block_hashes[position // size], group) in manager.pool.index

    def goes_on_from(end):
        firsts = [0 if window is None else max(0, end - window + 1) for window in windows]
        return all(cached(group, p) for group, first in enumerate(firsts) for p in range(first, end))

    return max(end for end in range(0, request.num_tokens, size) if goes_on_from(end))


class ManagerMachine(RuleBasedStateMachine):
    """Requests are admitted, grow, fork and go in any order, without a scheduler's caution."""

    @initialize(
        block_size=st.integers(1, 4),
        num_blocks=st.integers(2, 20),
        caching=st.booleans(),
        windows=st.lists(st.sampled_from([None, None, 1, 2, 5, 9]), min_size=1, max_size=3),
    )
    def start(self, block_size, num_blocks, caching, windows):
        groups = tuple(KVCacheGroup(window, (i,)) for i, window in enumerate(windows))
        config = KVCacheConfig(num_blocks, block_size, groups)
        self.manager = KVCacheManager(config, prefix_caching=caching, max_chunk=8)
        self.running = []
        self.next_id = 0

    def new_request(self, prompt, outputs=()):
        self.next_id += 1
        return Request(self.next_id, prompt, SamplingParams(), list(outputs))

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=12),
        chunk=st.integers(1, 8),
        headroom=st.integers(0, 3),
    )
    def admit(self, prompt, chunk, headroom):
        manager, request = self.manager, self.new_request(prompt)
        before = snapshot(manager)
        hit = manager.get_computed_blocks(request)
        assert snapshot(manager) == before, "a lookup changed something"
        assert hit.num_tokens == longest_hit(manager, request)
        executed["hits found"] += hit.num_tokens > 0
        chunk = min(chunk, request.num_tokens - hit.num_tokens)
        available, unused = (
            manager.num_available,
            sum(b.ref_cnt == 0 and not b.is_null for bs in hit.blocks for b in bs),
        )
        if manager.allocate_slots(request, chunk, hit, headroom=headroom) is None:
            assert snapshot(manager) == before, "a refusal changed something"
            return
        missing = manager.num_missing_blocks(request)
        assert manager.num_available >= missing + headroom, "the rest of the prompt has no room"
        assert manager.num_available <= available - unused
        self.grown(request, hit.num_tokens + chunk)
        self.running.append(request)

    @rule(index=small, chunk=st.integers(1, 8), token=st.integers(0, 1))
    def grow(self, index, chunk, token):
        if not self.running:
            return
        manager, request = self.manager, self.running[index % len(self.running)]
        if request.num_computed_tokens == request.num_tokens:
            request.output_token_ids.append(token)
        chunk = min(chunk, request.num_tokens - request.num_computed_tokens)
        tails = manager.coordinator.shared_tails(request.request_id, request.num_computed_tokens)
        # What fell out of the window is freed whether or not there is room to go on.
        manager.coordinator.free_skipped(request.request_id, request.num_computed_tokens)
        before = snapshot(manager)
        copies = manager.allocate_slots(request, chunk)
        if copies is None:
            assert snapshot(manager) == before, "a refusal changed something"
            return
        assert [source for source, _ in copies] == [block.block_id for block in tails]
        assert all(manager.pool.blocks[destination].ref_cnt == 1 for _, destination in copies)
        self.grown(request, request.num_computed_tokens + chunk)

    def grown(self, request, num_computed):
        request.num_computed_tokens = num_computed
        named = self.manager.register(request, num_computed)
        assert self.manager.prefix_caching or not named

    @rule(index=small, token=st.integers(0, 1))
    def fork(self, index, token):
        if not self.running:
            return
        parent = self.running[index % len(self.running)]
        child = self.new_request([*parent.tokens(0, parent.num_computed_tokens), token])
        before = snapshot(self.manager)
        if not self.manager.fork(parent, child):
            assert snapshot(self.manager) == before, "a refusal changed something"
            return
        assert self.manager.block_ids(child) == self.manager.block_ids(parent)
        child.num_computed_tokens = parent.num_computed_tokens
        self.running.append(child)

    @rule(index=small)
    def copies_have_their_blocks(self, index):
        """A fork may always go on by one token within its partial block, however full the pool is."""
        if not self.running:
            return
        manager, request = self.manager, self.running[index % len(self.running)]
        if request.num_computed_tokens % manager.block_size:
            if request.num_computed_tokens == request.num_tokens:
                request.output_token_ids.append(0)
            assert manager.allocate_slots(request, 1) is not None
            self.grown(request, request.num_computed_tokens + 1)

    @rule(index=small, chunk=st.integers(1, 8))
    def grow_and_take_back(self, index, chunk):
        """A failed step: names withdrawn and blocks cut, the request stands where it stood."""
        if not self.running:
            return
        manager, request = self.manager, self.running[index % len(self.running)]
        start = request.num_computed_tokens
        chunk = min(chunk, request.num_tokens - start)
        if chunk < 1 or manager.coordinator.shared_tails(request.request_id, start):
            return
        manager.coordinator.free_skipped(request.request_id, start)
        before, used = [list(ids) for ids in manager.block_ids(request)], manager.pool.num_used
        if manager.allocate_slots(request, chunk) is not None:
            manager.unregister(manager.register(request, start + chunk))
            manager.truncate(request, start)
        assert [list(ids) for ids in manager.block_ids(request)] == before
        assert manager.pool.num_used == used

    @rule(index=small)
    def free(self, index):
        if self.running:
            self.manager.free(self.running.pop(index % len(self.running)))

    @invariant()
    def holds(self):
        executed["rules"] += 1
        if hasattr(self, "manager"):
            self.manager.check()

    def teardown(self):
        if hasattr(self, "manager"):
            for request in self.running:
                self.manager.free(request)
            self.manager.check()
            assert self.manager.pool.num_used == 0


TestManagerMachine = ManagerMachine.TestCase
TestManagerMachine.settings = machine_settings(0.2)
