"""Where a request's time went: waiting, prefill, decoding. Times are of the monotonic clock, in seconds."""

from __future__ import annotations

from dataclasses import dataclass

from batchgen.types import Output


@dataclass(slots=True)
class Phases:
    """When a request came, when its first step began, and when it had its first token in this process."""

    added: float
    started: float | None = None
    sampled: float | None = None

    def step_began(self, now: float) -> None:
        """A step that computes some of its tokens begins."""
        if self.started is None:
            self.started = now

    def has_token(self, now: float) -> None:
        """A token of it was sampled."""
        if self.sampled is None:
            self.sampled = now

    def describe(self, output: Output, now: float) -> None:
        """Write the phases of a request that ends now into its output."""
        started = now if self.started is None else self.started
        sampled = now if self.sampled is None else self.sampled
        output.queue_seconds = started - self.added
        output.prefill_seconds = sampled - started
        output.decode_seconds = now - sampled
