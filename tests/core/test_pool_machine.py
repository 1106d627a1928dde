"""State machine of the pool against a model made of plain lists and dicts, order of reuse included."""

from __future__ import annotations

import pytest
from core_sim import executed
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from machine_steps import machine_settings

from batchgen.core.block_hash import block_key, hash_block
from batchgen.core.block_pool import BlockPool

NAMES = {block_key(name, 0): [name] for name in (hash_block(b"", bytes([i])) for i in range(6))}
KEYS = list(NAMES)
picks = st.lists(st.integers(0, 99), max_size=6)


class PoolMachine(RuleBasedStateMachine):
    """`queue` is the free list, first to be reused first; `refs` and `names` are by block id."""

    @initialize(num_blocks=st.integers(2, 12))
    def start(self, num_blocks):
        self.pool = BlockPool(num_blocks)
        self.queue = list(range(1, num_blocks))
        self.refs = dict.fromkeys(range(1, num_blocks), 0)
        self.names = {}

    def referenced(self, picks):
        ids = [i for i, count in self.refs.items() if count]
        return [ids[pick % len(ids)] for pick in picks] if ids else []

    @rule(n=st.integers(0, 6))
    def get_new_blocks(self, n):
        if n > len(self.queue):
            with pytest.raises(IndexError):
                self.pool.get_new_blocks(n)
            return
        taken, self.queue = self.queue[:n], self.queue[n:]
        assert [block.block_id for block in self.pool.get_new_blocks(n)] == taken
        for i in taken:
            self.refs[i] = 1
            self.names.pop(i, None)

    @rule(picks=picks)
    def touch(self, picks):
        ids = list(dict.fromkeys(1 + pick % len(self.refs) for pick in picks))
        self.pool.touch([self.pool.null_block, *(self.pool.blocks[i] for i in ids)])
        for i in ids:
            self.refs[i] += 1
            if i in self.queue:
                self.queue.remove(i)

    @rule(picks=picks)
    def free_blocks(self, picks):
        ids = list(dict.fromkeys(self.referenced(picks)))
        self.pool.free_blocks([*(self.pool.blocks[i] for i in ids), self.pool.null_block])
        for i in ids:
            self.refs[i] -= 1
        gone = [i for i in ids if not self.refs[i]]
        unnamed = [i for i in gone if i not in self.names]
        self.queue = unnamed + self.queue + [i for i in gone if i in self.names]

    @rule(pick=st.integers(0, 99), key=st.sampled_from(KEYS))
    def register(self, pick, key):
        for i in self.referenced([pick]):
            if i in self.names:
                with pytest.raises(ValueError, match="already has a name"):
                    self.pool.register(self.pool.blocks[i], NAMES[key], 0, 0)
            else:
                self.pool.register(self.pool.blocks[i], NAMES[key], 0, 0)
                self.names[i] = key

    @rule(pick=st.integers(0, 99))
    def unregister(self, pick):
        self.unregistered(1 + pick % len(self.refs))

    def unregistered(self, i):
        self.pool.unregister(self.pool.blocks[i])
        if self.names.pop(i, None) is not None and i in self.queue:
            self.queue.remove(i)
            self.queue.insert(0, i)

    @rule(key=st.sampled_from(KEYS))
    def evict(self, key):
        wanted = {i for i, name in self.names.items() if name == key}
        found = [block.block_id for block in self.pool.evict([key])]
        assert set(found) == wanted
        for i in found:
            if self.names.pop(i) and i in self.queue:
                self.queue.remove(i)
                self.queue.insert(0, i)

    @invariant()
    def agrees(self):
        executed["rules"] += 1
        if not hasattr(self, "pool"):
            return
        self.pool.check()
        assert [block.block_id for block in self.pool._free] == self.queue
        assert {b.block_id: b.ref_cnt for b in self.pool.blocks[1:]} == self.refs
        for key in KEYS:
            holders = {i for i, name in self.names.items() if name == key}
            assert {block.block_id for block in self.pool.index.all(key)} == holders
            found = self.pool.index.get(key)
            assert (found.block_id in holders) if found else not holders


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = machine_settings(0.2)
