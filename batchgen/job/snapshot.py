"""How far a run is. The supervisor makes one every second or so and hands it to whoever shows progress."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot:
    """Counts at one moment. Rows count over all attempts, tokens over this one.

    Args:
        stage: what is going on, such as `loading the model`, `running`, `stopping`.
        rows_total: rows selected; None while the end of the input has not been seen.
        rows_ok, rows_error, rows_skipped: rows that are final.
        rows_before: rows that were final when this attempt began.
        running, waiting: rows in the engine.
        prompt_tokens: prompt tokens of the rows that began to run.
        cached_tokens: those of them that were found in the prefix cache.
        output_tokens: tokens sampled.
        seconds: since the attempt began, on a monotonic clock.
    """

    stage: str
    rows_total: int | None = None
    rows_ok: int = 0
    rows_error: int = 0
    rows_skipped: int = 0
    rows_before: int = 0
    running: int = 0
    waiting: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    seconds: float = 0.0

    @property
    def rows_final(self) -> int:
        """Rows that have a result of any kind."""
        return self.rows_ok + self.rows_error + self.rows_skipped

    @property
    def tokens(self) -> int:
        """Work done in this attempt."""
        return self.prompt_tokens + self.output_tokens


class Progress(Protocol):
    """Shows snapshots and sentences to the user."""

    def update(self, snapshot: Snapshot) -> None:
        """Show how far the run is; called often, shows as often as is sensible."""

    def note(self, text: str) -> None:
        """Show a sentence."""

    def close(self) -> None:
        """Show the last snapshot and leave the terminal tidy."""
