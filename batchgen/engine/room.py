"""How large a cache has to be for the checks at load; both run in the engine's own."""

from __future__ import annotations

from batchgen.core.kv_spec import KVCacheConfig

OUTPUT_TOKENS, OUTPUT_CHUNK = 23, 10
"""Of the sequence whose output is compared with transformers', in pieces of so many."""
INVARIANCE_TOKENS = 40
"""Of the sequence that is computed in two ways."""


def has_room_for_output(config: KVCacheConfig, max_model_len: int) -> bool:
    """For one row more than there are, so that none has to wait for another or is preempted."""
    each = sum(group.peak_blocks(OUTPUT_TOKENS, config.block_size, OUTPUT_CHUNK) for group in config.groups)
    return max_model_len > OUTPUT_TOKENS and config.num_blocks > 3 * each


def invariance_blocks(block_size: int, groups: int) -> int:
    """Blocks that three sequences take in all groups, the null block included."""
    return 3 * groups * -(-INVARIANCE_TOKENS // block_size) + 1


def has_room_for_checks(config: KVCacheConfig, max_model_len: int) -> bool:
    """Whether a cache is large enough for both."""
    return has_room_for_output(config, max_model_len) and config.num_blocks >= invariance_blocks(
        config.block_size, len(config.groups)
    )
