"""What happens outside the supervisor's loop, as its queue carries it, and the state of a run that ends."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batchgen.job.parts import PartCommit
from batchgen.types import BatchgenError


@dataclass(frozen=True, slots=True)
class Message:
    """A worker said something; None when its channel has closed."""

    worker: int
    content: Mapping[str, Any] | None


@dataclass(frozen=True, slots=True)
class Assembled:
    """A part was committed, or could not be."""

    part: int
    outcome: PartCommit | BaseException


@dataclass(frozen=True, slots=True)
class StopAsked:
    """A signal, or the loss of the lease."""

    reason: str
    error: BatchgenError | None = None


@dataclass(slots=True)
class Stopping:
    """How the run is being brought to its end.

    Args:
        reason: one sentence.
        error: what the run ends with; None for a stop that can be resumed.
        stop_at: when workers are asked to end, whatever still runs.
        kill_at: when they are killed.
    """

    reason: str
    error: BatchgenError | None
    stop_at: float
    kill_at: float
