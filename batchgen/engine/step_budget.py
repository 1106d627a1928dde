"""How many tokens a step may hold after memory ran out. `EngineCore` asks before each step."""

from __future__ import annotations

STEPS_BEFORE_MORE = 16


class StepBudget:
    """Halved by a step that ran out of memory, doubled again after steps that had enough.

    Without the memory of it, each step would try the full budget anew and throw away what it had computed
    until then. Chunks of other sizes change no result.
    """

    def __init__(self) -> None:
        self.tokens: int | None = None
        """Most tokens of the next step; None is the scheduler's own limit."""
        self._full = 0
        self._good_steps = 0

    def ran_out(self, tokens: int) -> None:
        """A step of so many tokens did not fit; more than one, or it cannot be halved."""
        self._full = max(self._full, tokens)
        self.tokens = tokens // 2
        self._good_steps = 0

    def forget(self) -> None:
        """Who needed that much is gone."""
        self.tokens = None
        self._good_steps = self._full = 0

    def sufficed(self) -> None:
        """A step fitted."""
        if self.tokens is None:
            return
        self._good_steps += 1
        if self._good_steps == STEPS_BEFORE_MORE:
            self._good_steps = 0
            self.tokens = None if 2 * self.tokens >= self._full else 2 * self.tokens
