"""What the workers of an output folder have computed, by their counters."""

from __future__ import annotations

from pathlib import Path

from batchgen.job.counters import Counters, read_counters
from batchgen.job.folder import JobFolder


def counters_of(root: Path, attempt: str = "*") -> list[Counters]:
    """Those of every worker of an attempt, or of all."""
    paths = JobFolder(root).attempts.glob(f"{attempt}.*.counters")
    return [found for found in map(read_counters, paths) if found is not None]


def sampled(root: Path, attempt: str = "*") -> int:
    """Tokens."""
    return sum(counters.sampled for counters in counters_of(root, attempt))
