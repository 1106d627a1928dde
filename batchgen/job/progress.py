"""What a running job tells while it runs: to the terminal, and to `status` through a file."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from batchgen.job.attempts import attempt_file
from batchgen.job.folder import JobFolder

TOKEN_COUNTERS = ("prompt_tokens", "cached_tokens", "output_tokens", "preemptions")


@dataclass(slots=True)
class Progress:
    """A snapshot.

    Args:
        state: starting, loading, running, draining or done.
        rows_total: of the selection; None while it is not known.
        rows_done, ok, error, skipped: rows with a result, those of earlier attempts too.
        reasoning_tokens: of these results.
        rows_before: of `rows_done`, those that did not run in this attempt: an earlier one had done them, or
            they cannot be read.
        parts_done: committed parts.
        running, waiting: rows in the engine.
        prompt_tokens, cached_tokens, output_tokens, preemptions: of this attempt.
        pool_used, pool_total: blocks of the cache, over all workers.
        pool_waste: mean share of the cache that held nothing useful although it could have, over all
            workers.
        seconds: since this attempt began.
        working_seconds: since a worker was ready first; what speeds are measured over.
        workers: worker processes that run.
    """

    state: str = "starting"
    rows_total: int | None = None
    rows_done: int = 0
    rows_before: int = 0
    ok: int = 0
    error: int = 0
    skipped: int = 0
    reasoning_tokens: int = 0
    parts_done: int = 0
    running: int = 0
    waiting: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    pool_used: int = 0
    pool_total: int = 0
    pool_waste: float = 0
    seconds: float = 0.0
    working_seconds: float = 0.0
    workers: int = 0

    @property
    def tokens(self) -> int:
        """Of prompts and outputs, of this attempt."""
        return self.prompt_tokens + self.output_tokens

    def per_second(self, amount: float) -> float:
        """An amount of this attempt over its working time."""
        return amount / self.working_seconds if self.working_seconds > 0 else 0.0

    @property
    def tokens_left(self) -> float | None:
        """Rows that are left, each as long as those of this attempt; None while nothing tells.

        What is half done counts as half a row.
        """
        begun = self.rows_done - self.rows_before + self.running / 2
        if self.rows_total is None or begun <= 0:
            return None
        left = self.rows_total - self.rows_done - self.running / 2
        return max(left, 0.0) * self.tokens / begun

    @property
    def eta_seconds(self) -> float | None:
        """Until the last row, at this attempt's speed in tokens; None while it cannot be told."""
        left, speed = self.tokens_left, self.per_second(self.tokens)
        return left / speed if left is not None and speed > 0 else None


def save_progress(folder: JobFolder, attempt: int, progress: Progress) -> None:
    """For `status`. It is a convenience: a failure is left to the writers that matter to report."""
    path = attempt_file(folder, attempt, "progress.json")
    temporary = path.with_name(f".tmp-{path.name}")
    with contextlib.suppress(OSError):
        temporary.write_text(json.dumps(asdict(progress)))
        os.replace(temporary, path)


def read_progress(folder: JobFolder, attempt: int) -> Progress | None:
    """The latest snapshot of an attempt, if there is one."""
    try:
        data: Mapping[str, Any] = json.loads(attempt_file(folder, attempt, "progress.json").read_bytes())
        return Progress(**data)
    except (OSError, ValueError, TypeError):
        return None
