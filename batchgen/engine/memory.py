"""Size the KV cache from what the machine has, and say how.

On the CPU the pool is touched in full when it is allocated: the memory a job will need is taken at
the start, so a job that starts does not die of it later, and resident memory does not creep.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from batchgen.types import UsageError

AUTO_SHARE = 0.25
AUTO_LIMIT = 2 * 1024**3


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How many blocks the pool gets, and the figures behind it (bytes)."""

    num_blocks: int
    block_size: int
    bytes_per_block: int
    max_model_len: int
    available: int
    context: int
    asked_for: bool

    def table(self) -> list[str]:
        """The budget in lines for a person."""
        size = self.num_blocks * self.bytes_per_block
        per_token = self.bytes_per_block // self.block_size
        tokens = (self.num_blocks - 1) * self.block_size
        return [
            f"KV cache {size / 2**20:,.0f} MiB: {self.num_blocks:,} blocks of {self.block_size} tokens, "
            f"{per_token / 2**10:,.1f} KiB a token, room for {tokens:,} tokens",
            f"longest sequence {self.max_model_len:,} tokens; "
            f"memory available {self.available / 2**20:,.0f} MiB",
            *([] if self.asked_for else self._shortened()),
        ]

    def _shortened(self) -> list[str]:
        if self.max_model_len >= self.context:
            return []
        return [
            f"the model was made for {self.context:,} tokens; longer rows than {self.max_model_len:,} become "
            "errors (raise engine.kv_cache_memory or set model.max_model_len)"
        ]


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
    bytes_per_block: int,
    block_size: int,
    context: int,
    max_model_len: int | None,
    max_num_seqs: int,
    kv_cache_memory: int | None,
    available: int | None = None,
) -> MemoryPlan:
    """Choose the number of blocks and the longest sequence.

    Args:
        bytes_per_block: of all layers together.
        block_size: tokens in a block.
        context: the longest sequence the model was made for.
        max_model_len: the user's limit, or None for `context` capped by memory.
        max_num_seqs: most requests running at once.
        kv_cache_memory: the user's size in bytes, or None.
        available: bytes that can be had; measured when None.

    Raises:
        UsageError: one sequence of `max_model_len` does not fit, or more is asked for than the model or
            the machine has; says which knob to turn.
    """
    available = available_memory() if available is None else available
    if max_model_len is not None and max_model_len > context:
        raise UsageError(
            f"model.max_model_len: {max_model_len:,} is more than the {context:,} tokens the model was made "
            f"for; use {context:,} or less"
        )
    if kv_cache_memory is not None and kv_cache_memory > available:
        raise UsageError(
            f"engine.kv_cache_memory: {kv_cache_memory:,} bytes are asked for and {available:,} are "
            "available; ask for less or leave it out"
        )
    wanted_len = max_model_len or context

    def blocks_for(tokens: int) -> int:
        return -(-tokens // block_size)

    needed_for_all = (max_num_seqs * blocks_for(wanted_len) + 1) * bytes_per_block
    room = kv_cache_memory or min(int(available * AUTO_SHARE), AUTO_LIMIT)
    if kv_cache_memory is None and max_model_len is not None:
        room = min(max(room, (blocks_for(wanted_len) + 1) * bytes_per_block), int(available * 0.8))
    num_blocks = (kv_cache_memory or min(room, needed_for_all)) // bytes_per_block
    longest = (num_blocks - 1) * block_size
    if longest < wanted_len and max_model_len is None:
        wanted_len = longest
    if longest < wanted_len or longest < block_size:
        raise UsageError(
            f"engine.kv_cache_memory: {room:,} bytes hold {max(longest, 0):,} tokens, but one sequence of "
            f"{max(wanted_len, block_size):,} tokens needs "
            f"{(blocks_for(max(wanted_len, block_size)) + 1) * bytes_per_block:,}; "
            "raise engine.kv_cache_memory or lower model.max_model_len"
        )
    return MemoryPlan(
        num_blocks, block_size, bytes_per_block, wanted_len, available, context, max_model_len is not None
    )


def default_threads() -> int:
    """CPU threads this process may use, by its affinity."""
    return len(os.sched_getaffinity(0))
