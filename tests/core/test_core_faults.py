"""Each fault that a re-implementation is known to make is put in, and the simulation must notice it."""

from __future__ import annotations

import pytest
from core_sim import EARLY, KINDS, random_run

from batchgen.core import block_hash as block_hash_module
from batchgen.core import scheduler as scheduler_module
from batchgen.core.block_hash import block_key
from batchgen.core.block_pool import BlockPool
from batchgen.core.coordinator import KVCacheCoordinator
from batchgen.core.kv_cache_manager import KVCacheManager, PrefixHit
from batchgen.core.kv_spec import KVCacheGroup
from batchgen.core.prefix_index import PrefixIndex
from batchgen.core.scheduler import Scheduler
from batchgen.core.single_type import SingleTypeKVCacheManager, SlidingWindowManager
from batchgen.types import EngineError

SEEDS = range(200)


def head_first(patch):
    def free(self, request_id):
        self.pool.free_blocks(self.tables.pop(request_id).blocks)

    patch.setattr(SingleTypeKVCacheManager, "free", free)


def no_touch(patch):
    patch.setattr(BlockPool, "touch", lambda self, blocks: None)


def touch_leaves_free_queue_alone(patch):
    def touch(self, blocks):
        for block in blocks:
            block.ref_cnt += 1

    patch.setattr(BlockPool, "touch", touch)


def name_survives_reuse(patch):
    original = BlockPool.get_new_blocks

    def get_new_blocks(self, n):
        remove, self.index.remove = self.index.remove, lambda block: None
        blocks = original(self, n)
        self.index.remove = remove
        return blocks

    patch.setattr(BlockPool, "get_new_blocks", get_new_blocks)


def hits_are_not_counted(patch):
    def num_missing_after_hit(self, hit, num_tokens):
        pairs = zip(self.managers, hit, strict=True)
        return sum(manager.num_missing_after_hit(blocks, num_tokens) for manager, blocks in pairs)

    patch.setattr(KVCacheCoordinator, "num_missing_after_hit", num_missing_after_hit)


def hit_covers_last_token(patch):
    def get_computed_blocks(self, request):
        block_hash_module.extend_block_hashes(request, self.block_size)
        max_blocks = request.num_tokens // self.block_size
        blocks = self.coordinator.find_longest_hit(request.block_hashes, max_blocks)
        return PrefixHit(blocks, len(blocks[0]) * self.block_size)

    patch.setattr(KVCacheManager, "get_computed_blocks", get_computed_blocks)


def hash_without_parent(patch):
    original = block_hash_module.hash_block
    patch.setattr(block_hash_module, "hash_block", lambda parent, *rest: original(b"", *rest))


def hash_without_extra_keys(patch):
    patch.setattr(block_hash_module, "encode_extra_keys", lambda keys: b"")


def partial_blocks_are_named(patch):
    original = SingleTypeKVCacheManager.register

    def register(self, request_id, hashes, num_full_blocks):
        held = len(self.tables[request_id].blocks)
        return original(self, request_id, hashes, min(num_full_blocks + 1, held, len(hashes)))

    patch.setattr(SingleTypeKVCacheManager, "register", register)


def no_copy_on_write(patch):
    patch.setattr(SingleTypeKVCacheManager, "shared_tail", lambda self, *args: None)


def copies_are_lost(patch):
    original = Scheduler._close

    def close(self, step):
        step.copies.clear()
        original(self, step)

    patch.setattr(Scheduler, "_close", close)


def copies_have_no_reserve(patch):
    patch.setattr(KVCacheManager, "num_reserved", property(lambda self: 0))


def failed_step_keeps_names(patch):
    patch.setattr(KVCacheManager, "unregister", lambda self, blocks: None)


def failed_step_keeps_admissions(patch):
    def withdraw(self, scheduled, state):
        scheduled.request.num_computed_tokens = max(1, scheduled.start)
        self.manager.truncate(scheduled.request, max(1, scheduled.start))

    patch.setattr(Scheduler, "_withdraw", withdraw)


def failed_step_keeps_progress(patch):
    def rollback(self, output):
        step = self._end_step(output, -1)
        self.manager.unregister(step.named if step else [])

    patch.setattr(Scheduler, "rollback", rollback)


def failed_copy_is_trusted(patch):
    original = Scheduler.rollback

    def rollback(self, output):
        if self._steps:
            self._steps[-1].copies.clear()
        original(self, output)

    patch.setattr(Scheduler, "rollback", rollback)


def poison_spares_descendants(patch):
    def only_itself(self, name, depth):
        return {key for key, _ in self if key.startswith(name)}

    patch.setattr(PrefixIndex, "descendants", only_itself)


def poison_stops_at_a_gap(patch):
    def unbroken(self, name, depth):
        def held(block):
            group = block.block_hash[len(name) :]
            return all(link + group in self for link in block.chain[depth : block.depth])

        return {k for k, b in self if b.depth >= depth and b.chain[depth] == name and held(b)}

    patch.setattr(PrefixIndex, "descendants", unbroken)


def poison_evicts_nothing(patch):
    patch.setattr(KVCacheManager, "evict_from", lambda self, request, position: [])


def victim_keeps_its_tokens(patch):
    patch.setattr(Scheduler, "_give_back", lambda self, step, victim: None)


def preempted_keeps_computed_count(patch):
    original = Scheduler._preempt

    def preempt(self, request):
        computed = request.num_computed_tokens
        original(self, request)
        request.num_computed_tokens = computed

    patch.setattr(Scheduler, "_preempt", preempt)


def admits_after_preempting(patch):
    original = Scheduler._name_running

    def name_running(self, step):
        original(self, step)
        if step.output.preempted:
            self._admit_waiting(step)

    patch.setattr(Scheduler, "_name_running", name_running)


def samples_mid_prompt(patch):
    def scheduled(request, start, num_tokens, samples, block_ids):
        return original(request, start, num_tokens, True, block_ids)

    original = scheduler_module.ScheduledRequest
    patch.setattr(scheduler_module, "ScheduledRequest", scheduled)


def ignores_budget(patch):
    original = Scheduler._schedule_tokens

    def schedule_tokens(self, step, request, num_tokens):
        original(self, step, request, num_tokens)
        step.budget += num_tokens

    patch.setattr(Scheduler, "_schedule_tokens", schedule_tokens)


def finish_leaks(patch):
    def free(self, request):
        del self.requests[request.request_id]

    patch.setattr(KVCacheManager, "free", free)


def window_frees_a_token_too_early(patch):
    original = SlidingWindowManager.num_skipped_blocks
    patch.setattr(SlidingWindowManager, "num_skipped_blocks", lambda self, n: original(self, n + 1))


def window_frees_nothing(patch):
    patch.setattr(SlidingWindowManager, "free_skipped", lambda self, *args: None)


def window_needs_a_block_less(patch):
    original = KVCacheGroup.peak_blocks
    patch.setattr(
        KVCacheGroup,
        "peak_blocks",
        lambda self, *args: max(1, original(self, *args) - (self.sliding_window is not None)),
    )


def window_hits_a_block_short(patch):
    original = SlidingWindowManager._blocks_below
    patch.setattr(SlidingWindowManager, "_blocks_below", lambda self, n: max(0, original(self, n) - 1))


def groups_share_names(patch):
    patch.setattr(SingleTypeKVCacheManager, "_key", lambda self, hashes, i: block_key(hashes[i], 0))


def groups_do_not_agree_on_a_hit(patch):
    def find_longest_hit(self, hashes, max_blocks):
        hits = [manager.find_longest_hit(hashes, max_blocks) for manager in self.managers]
        shortest = min(map(len, hits))
        return tuple(hit[:shortest] for hit in hits)

    patch.setattr(KVCacheCoordinator, "find_longest_hit", find_longest_hit)


def names_what_is_pending(patch):
    original = KVCacheManager.register

    def register(self, request, num_tokens):
        request.output_token_ids += [0] * request.num_pending
        named = original(self, request, num_tokens)
        del request.output_token_ids[len(request.output_token_ids) - request.num_pending :]
        return named

    patch.setattr(KVCacheManager, "register", register)


def names_nothing_late(patch):
    patch.setattr(Scheduler, "_name_late", lambda self, step: None)


def names_late_what_has_ended(patch):
    original = Scheduler._name_late

    def name_late(self, step):
        for request_id, computed in step.unnamed.items():
            step.scheduled[request_id].request.num_computed_tokens = computed
        original(self, step)

    patch.setattr(Scheduler, "_name_late", name_late)


def pending_tokens_stay_pending(patch):
    original = Scheduler.update

    def update(self, output, sampled):
        requests = {s.request.request_id: s.request for s in output.scheduled}
        pending = {i: r.num_pending for i, r in requests.items()}
        found = original(self, output, sampled)
        for request_id, count in pending.items():
            requests[request_id].num_pending = count
        return found

    patch.setattr(Scheduler, "update", update)


def last_token_is_followed(patch):
    def ends(self, request):
        return request.num_computed_tokens == request.num_expected

    patch.setattr(Scheduler, "_ends", ends)


def who_would_end_stays_ending(patch):
    original = Scheduler.rollback

    def rollback(self, output):
        ending = set(self._ending)
        original(self, output)
        self._ending = ending & self.running.keys()

    patch.setattr(Scheduler, "rollback", rollback)


def early_steps_take_blocks(patch):
    original = Scheduler._extend

    def extend(self, step, request):
        early, step.early = step.early, False
        original(self, step, request)
        step.early = early

    patch.setattr(Scheduler, "_extend", extend)


def who_ends_stays_in_the_next_step(patch):
    patch.setattr(Scheduler, "_void", lambda self, request: None)


def windows_slide_back(patch):
    original = Scheduler._follow

    def follow(self, step):
        original(self, step)
        step.followed = False

    patch.setattr(Scheduler, "_follow", follow)


FAULTS = [value for name, value in list(globals().items()) if getattr(value, "__module__", "") == __name__]
FORKING = [*KINDS, *["fork"] * 8, *["fail"] * 4]
LOOKING_AHEAD = (
    names_what_is_pending,
    names_nothing_late,
    names_late_what_has_ended,
    pending_tokens_stay_pending,
    last_token_is_followed,
    who_would_end_stays_ending,
    early_steps_take_blocks,
    who_ends_stays_in_the_next_step,
    windows_slide_back,
)
AHEAD = [*["add"] * 6, *["launch"] * 12, *["confirm"] * 4, *["take back"] * 2, *["take all back"] * 4]
HYBRID = (
    window_frees_a_token_too_early,
    window_frees_nothing,
    window_needs_a_block_less,
    window_hits_a_block_short,
    groups_share_names,
    groups_do_not_agree_on_a_hit,
)
# Where a group has full attention, its chains have no gaps, and they are what a hit ends at.
WINDOWS = {poison_stops_at_a_gap: (5,), windows_slide_back: (5, None)}
NOTICED = (AssertionError, EngineError, ValueError, IndexError, KeyError)


def run_all(windows, early=False):
    for seed in SEEDS:
        kinds = FORKING if seed % 2 else KINDS
        if early:
            kinds = AHEAD if seed % 2 else EARLY
        random_run(seed, kinds, windows=windows, num_blocks=6 + seed % 8, max_seqs=2 + seed % 5)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_fault_is_noticed(fault, monkeypatch):
    fault(monkeypatch)
    with pytest.raises(NOTICED):
        run_all(WINDOWS.get(fault, (None, 3) if fault in HYBRID else (None,)), fault in LOOKING_AHEAD)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("windows", [(None,), (None, 3), (2, 9, None), (5,)])
def test_without_a_fault_nothing_is_noticed(windows, early):
    run_all(windows, early)
