"""Counters of the scheduler, for progress lines, the report and `bench`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class SchedulerStats:
    """Totals since the start; tokens unless named otherwise. Steps that failed do not count.

    Args:
        prompt_tokens: known tokens of requests when they were first admitted.
        cached_tokens: those of them that came from the prefix cache; a fork's count for neither.
        resumed_tokens: known tokens of requests admitted again after a preemption.
        resumed_cached_tokens: those of them that came from the prefix cache.
        scheduled_tokens: computed in all steps.
        preemptions: times that a running request lost its blocks, or a fork could not have its share.
        steps: with at least one token.
        pool_used: blocks referenced after the latest step.
        pool_peak: most blocks ever referenced.
        pool_total: blocks that requests can have.
        slack_tokens: slots in referenced blocks without a token, after the latest step.
        idle_blocks: blocks nobody referenced after the latest step while requests waited; else 0.
        waste_sum: over all steps, the share of the pool that was slack or idle.
    """

    pool_total: int
    block_size: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    resumed_tokens: int = 0
    resumed_cached_tokens: int = 0
    scheduled_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    pool_used: int = 0
    pool_peak: int = 0
    slack_tokens: int = 0
    idle_blocks: int = 0
    waste_sum: float = 0.0

    @property
    def waste(self) -> float:
        """Mean share of the pool, 0 to 1, that held nothing useful although it could have."""
        return self.waste_sum / self.steps if self.steps else 0.0

    def count_admission(self, tokens: int, cached: int, *, resumed: bool, sign: int = 1) -> None:
        """Count an admission, or with `sign=-1` take it back."""
        if resumed:
            self.resumed_tokens += sign * tokens
            self.resumed_cached_tokens += sign * cached
        else:
            self.prompt_tokens += sign * tokens
            self.cached_tokens += sign * cached

    def count_step(self, tokens: int, *, pool_used: int, slack_tokens: int, waiting: bool) -> None:
        """Count a step that was computed, with the state of the pool during it."""
        self.steps += 1
        self.scheduled_tokens += tokens
        self.pool_used = pool_used
        self.pool_peak = max(self.pool_peak, pool_used)
        self.slack_tokens = slack_tokens
        self.idle_blocks = self.pool_total - pool_used if waiting else 0
        self.waste_sum += (slack_tokens / self.block_size + self.idle_blocks) / self.pool_total
