"""Size the KV cache from what the machine has, and say how.

On the CPU the pool is touched in full when it is allocated: the memory a job will need is taken at
the start, so a job that starts does not die of it later, and resident memory does not creep.
"""

from __future__ import annotations

import os
from bisect import bisect_right
from dataclasses import dataclass

from batchgen.core.kv_layout import KVCacheLayout
from batchgen.core.kv_spec import KVCacheConfig
from batchgen.grammar import agreeing, counted
from batchgen.types import UsageError


@dataclass(frozen=True, slots=True)
class Share:
    """How much of what there is besides a step a cache gets when nobody says how large it is to be.

    Args:
        usual: as a share.
        limit: in bytes.
        most: as a share, where one sequence of the length that was asked for needs more than the usual.
    """

    usual: float
    limit: int
    most: float


SOME = Share(0.25, 2 * 1024**3, 0.8)
"""Of a host's memory, which others need too."""
ALL = Share(1.0, 2**62, 1.0)
"""Of a GPU's."""


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What a sequence takes of the KV cache.

    Args:
        layout: groups of layers over one pool of blocks.
        block_size: tokens in a block.
        max_chunk: most tokens of a sequence computed in one step.
    """

    layout: KVCacheLayout
    block_size: int
    max_chunk: int

    def blocks(self, num_tokens: int) -> int:
        """Most blocks that a sequence of so many tokens holds at once."""
        return self.layout.peak_blocks(num_tokens, self.block_size, self.max_chunk)

    def longest(self, num_blocks: int, limit: int) -> int:
        """The most tokens, up to `limit`, of a sequence that never holds more than so many blocks."""
        return bisect_right(range(1, limit + 1), num_blocks, key=self.blocks)

    def lines(self, num_tokens: int) -> list[str]:
        """What each kind of layer keeps of a sequence, where they differ, for a person."""
        if all(group.sliding_window is None for group in self.layout.groups):
            return []
        return [self._line(window, num_tokens) for window in self._kinds()]

    def _kinds(self) -> list[int | None]:
        return list(dict.fromkeys(group.sliding_window for group in self.layout.groups))

    def _line(self, window: int | None, num_tokens: int) -> str:
        ids = [i for i, group in enumerate(self.layout.groups) if group.sliding_window == window]
        groups = [self.layout.groups[i] for i in ids]
        layers = sum(len(group.layers) for group in groups)
        held = sum(group.peak_blocks(num_tokens, self.block_size, self.max_chunk) for group in groups)
        padding = sum(map(self.layout.padding, ids)) / len(ids) / self.layout.block_bytes
        sees = "all tokens" if window is None else f"the last {counted(window, 'token')}"
        return (
            f"  layers that keep {sees}: {layers} (groups: {len(ids)}), at most {counted(held, 'block')} a "
            f"sequence, {padding:.0%} padding"
        )


@dataclass(frozen=True, slots=True)
class Budget:
    """What there is besides the KV cache, in bytes.

    Args:
        available: that this engine may take, its weights loaded.
        weights: of the model.
        step: what the largest step needs.
        step_name: the largest step in words, for the table.
        scoring: what it needs more where its tokens are scored; 0 for a model that scores none.
        share: of the rest, for the cache.
        graphs: what captured steps keep.
    """

    available: int
    weights: int
    step: int
    step_name: str
    scoring: int = 0
    share: Share = SOME
    graphs: int = 0

    @property
    def needed(self) -> int:
        """For a step, whatever is asked of it."""
        return self.step + self.scoring + self.graphs

    @property
    def for_cache(self) -> int:
        """Most that a cache can have."""
        return max(0, self.available - self.needed)


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How many blocks the pool gets, and the figures behind it."""

    num_blocks: int
    shape: CacheShape
    max_model_len: int
    budget: Budget
    context: int
    asked_for: bool

    @property
    def kv_config(self) -> KVCacheConfig:
        """The pool and its groups."""
        return KVCacheConfig(self.num_blocks, self.shape.block_size, self.shape.layout.groups)

    def table(self) -> list[str]:
        """The budget in lines for a person."""
        block = self.shape.layout.block_bytes
        each = self.shape.blocks(self.max_model_len)
        cache = self.num_blocks * block
        budget = self.budget
        what = "logits and log-softmax of scored tokens"
        scoring = [_entry("scoring", budget.scoring, what)] if budget.scoring else []
        graphs = [_entry("CUDA graphs", budget.graphs, "captured steps")] if budget.graphs else []
        return [
            "memory, MiB:",
            _entry("weights", budget.weights, "loaded"),
            _entry("largest step", budget.step, budget.step_name),
            *scoring,
            *graphs,
            _entry(
                "KV cache",
                cache,
                f"{counted(self.num_blocks, 'block')} of {counted(self.shape.block_size, 'token')}, "
                f"{block / 2**10:,.1f} KiB each",
            ),
            _entry("left", budget.for_cache - cache, f"of {budget.available / 2**20:,.0f} after the weights"),
            *self.shape.lines(self.max_model_len),
            f"longest sequence {counted(self.max_model_len, 'token')}, which "
            f"{agreeing(self.max_model_len, 'takes', 'take')} {counted(each, 'block')}: room for "
            f"{(self.num_blocks - 1) / each:,.1f}",
            *([] if self.asked_for else self._shortened()),
        ]

    def _shortened(self) -> list[str]:
        if self.max_model_len >= self.context:
            return []
        return [
            f"the model was made for {counted(self.context, 'token')}; longer rows than "
            f"{self.max_model_len:,} become errors (raise engine.kv_cache_memory or set model.max_model_len)"
        ]


def _entry(name: str, size: int, what: str) -> str:
    return f"  {name:<12} {size / 2**20:>9,.0f}  {what}"


def available_memory() -> int:
    """Bytes that can be had now without swapping: the host's, or the cgroup's where that is less."""
    with open("/proc/meminfo", encoding="ascii") as f:
        fields = dict(line.split(":", 1) for line in f)
    available = int(fields["MemAvailable"].split()[0]) * 1024
    return min(available, _cgroup_room())


def _cgroup_room() -> int:
    try:
        with open("/sys/fs/cgroup/memory.max", encoding="ascii") as f:
            limit = f.read().strip()
        with open("/sys/fs/cgroup/memory.current", encoding="ascii") as f:
            used = int(f.read())
        with open("/sys/fs/cgroup/memory.stat", encoding="ascii") as f:
            fields = dict(line.split() for line in f)
    except (OSError, ValueError):
        return 2**62
    # Cached file pages count as used, and are given back when somebody needs the memory.
    reclaimable = int(fields.get("inactive_file", 0))
    return 2**62 if limit == "max" else max(0, int(limit) - used + reclaimable)


def plan_memory(
    *,
    shape: CacheShape,
    context: int,
    max_model_len: int | None,
    max_num_seqs: int,
    kv_cache_memory: int | None,
    budget: Budget,
) -> MemoryPlan:
    """Choose the number of blocks and the longest sequence.

    Args:
        shape: what a sequence takes.
        context: the longest sequence the model was made for.
        max_model_len: the user's limit, or None for `context` capped by memory.
        max_num_seqs: most requests running at once.
        kv_cache_memory: the user's size in bytes, or None.
        budget: what there is, and what the cache must leave.

    Raises:
        UsageError: one sequence of `max_model_len` does not fit, or more is asked for than the model or
            the machine has; says which knob to turn.
    """
    if max_model_len is not None and max_model_len > context:
        raise UsageError(
            f"model.max_model_len: {max_model_len:,} is more than the {counted(context, 'token')} the model "
            f"was made for; use {context:,} or less"
        )
    if budget.for_cache == 0:
        raise UsageError(
            f"engine.max_num_batched_tokens: the largest step ({budget.step_name}) needs "
            f"{counted(budget.needed, 'byte')} and {budget.available:,} are available; lower it or "
            "engine.max_num_seqs"
        )
    if kv_cache_memory is not None and kv_cache_memory > budget.for_cache:
        raise UsageError(
            f"engine.kv_cache_memory: {counted(kv_cache_memory, 'byte')} "
            f"{agreeing(kv_cache_memory, 'is', 'are')} asked for and {budget.for_cache:,} are available "
            f"beside a step ({budget.step_name}: {budget.needed:,}); ask for less, leave it out, or lower "
            "engine.max_num_batched_tokens or engine.max_num_seqs"
        )
    wanted_len = max_model_len or context
    block_bytes = shape.layout.block_bytes
    share = budget.share
    room = kv_cache_memory or min(int(budget.for_cache * share.usual), share.limit)
    if kv_cache_memory is None and max_model_len is not None:
        most = int(budget.for_cache * share.most)
        room = min(max(room, (shape.blocks(wanted_len) + 1) * block_bytes), most)
    needed_for_all = (max_num_seqs * shape.blocks(wanted_len) + 1) * block_bytes
    num_blocks = (kv_cache_memory or min(room, needed_for_all)) // block_bytes
    longest = shape.longest(num_blocks - 1, wanted_len)
    if longest < wanted_len and max_model_len is None:
        wanted_len = longest
    least = max(wanted_len, shape.block_size)
    if shape.blocks(least) > num_blocks - 1:
        raise UsageError(
            f"engine.kv_cache_memory: {counted(room, 'byte')} {agreeing(room, 'holds', 'hold')} "
            f"{counted(longest, 'token')}, but one sequence of {counted(least, 'token')} needs "
            f"{(shape.blocks(least) + 1) * block_bytes:,}; raise engine.kv_cache_memory or lower "
            "model.max_model_len"
        )
    return MemoryPlan(num_blocks, shape, wanted_len, budget, context, max_model_len is not None)


def default_threads() -> int:
    """CPU threads this process may use, by its affinity."""
    return len(os.sched_getaffinity(0))
