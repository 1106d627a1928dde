"""What a step has yielded. Used by `EngineCore` and `LookAhead`."""

from __future__ import annotations

from dataclasses import dataclass

from batchgen.engine.reading import Reading
from batchgen.scores import TokenScores
from batchgen.types import Request, RowError

Drawn = list[tuple[int | RowError, TokenScores | None]]
"""A token of a request, or why it has none, and its scores; then those of its forks, in their order."""


@dataclass(frozen=True, slots=True)
class Computed:
    """Tokens, and readings for tasks.

    Of `nonfinite` logits or hidden states are not finite, at the given position.
    """

    drawn: list[tuple[Request, Drawn]]
    readings: list[Reading]
    nonfinite: list[tuple[Request, int]]
