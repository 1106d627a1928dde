"""Which rows may have killed an engine, and how that is found out.

When a worker dies the rows that were with it are suspects. They run again apart from all others, in groups;
a group that kills its engine is split, and a row that kills the engine twice when it is alone is guilty. Each
new process first proves itself on a canary, a row that finished before, so that a broken engine is never
taken for a poison row. While no row has finished there is no canary, and single rows are tried instead.

The supervisor uses it. What was seen is kept in a file, because the supervisor may be killed too, and a row
must not kill one engine after another without end.
"""

from __future__ import annotations

import contextlib
import json
from collections import deque
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from batchgen.data.row_result import RowResult
from batchgen.job.files import atomic_write, storage
from batchgen.job.window import Pending
from batchgen.types import ErrorClass, RowError

DEATHS_ALONE = 2
SHORT_ANSWER = 4
GUILTY = (
    "the engine process died each time it ran this row, also when it ran nothing else; "
    "the logs of its workers are in .batchgen/attempts"
)


def guilty_result() -> RowResult:
    """The result of a row that kills the engine."""
    return RowResult.from_error(RowError(ErrorClass.ENGINE_CRASH, GUILTY))


class Suspects:
    """Groups of rows that may hold one that kills the engine.

    Args:
        path: where the suspicion is kept; what an earlier attempt left there is taken up.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._groups: deque[list[Pending]] = deque()
        self._running: list[Pending] = []
        self._deaths_alone: dict[int, int] = {}
        self._expected: set[int] = set()
        self._canary: Pending | None = None
        self._canary_tokens = 0
        self._load()

    def __len__(self) -> int:
        """Groups that wait to be run apart."""
        return len(self._groups)

    @property
    def canary(self) -> Pending | None:
        """A row that has finished, now or in an earlier attempt; None while none is known."""
        return self._canary

    def finished(self, pending: Pending, tokens: int) -> None:
        """A row has a result after so many tokens; short ones make good canaries."""
        if self._canary is None or (tokens < self._canary_tokens and self._canary_tokens > SHORT_ANSWER):
            self._canary, self._canary_tokens = pending, tokens

    def expects(self, pending: Pending) -> bool:
        """Take a row that was a suspect when an earlier supervisor was killed."""
        if pending.row not in self._expected:
            return False
        self._expected.discard(pending.row)
        if self._groups:
            self._groups[-1].append(pending)
        else:
            self._groups.append([pending])
        return True

    def accuse(self, rows: Collection[Pending], in_step: Collection[int]) -> None:
        """A worker died with these rows, of which `in_step` were being computed."""
        self._groups += _parted(rows, in_step)
        self._save()

    def next_group(self) -> list[Pending]:
        """Rows to be run apart from all others; call `passed` or `died` afterwards."""
        if self._canary is None:
            # Whoever waited is less suspect than whoever ran, and rows that lie apart less alike.
            group = self._groups[-1]
            self._running = [group.pop(len(group) // 2)]
            if not group:
                self._groups.pop()
        else:
            self._running = self._groups.popleft()
        return self._running

    def passed(self) -> None:
        """The group that ran, if any, was answered as a whole."""
        if not self._running:
            return
        for pending in self._running:
            self._deaths_alone.pop(pending.row, None)
        self._running = []
        self._save()

    def died(self, rows: Collection[Pending], in_step: Collection[int]) -> Pending | None:
        """The engine died while it ran the group.

        Args:
            rows: those that were not answered.
            in_step: of them, those that were being computed.

        Returns:
            The row that is guilty, if this settles it; call `convicted` when its result is on disk.
        """
        alone = len(self._running) == 1
        self._running = []
        if alone and rows:
            return self._died_alone(next(iter(rows)))
        parts = _parted(rows, in_step)
        if len(parts) == 1 and len(parts[0]) > 1:
            middle = len(parts[0]) // 2
            parts = [parts[0][:middle], parts[0][middle:]]
        self._groups.extendleft(reversed(parts))
        self._save()
        return None

    def convicted(self, row: int) -> None:
        """A guilty row has its result."""
        self._deaths_alone.pop(row, None)
        self._save()

    def forget(self) -> None:
        """Every row has a result. Raises StorageError."""
        self._expected.clear()
        self._save()

    def _died_alone(self, pending: Pending) -> Pending | None:
        deaths = self._deaths_alone[pending.row] = self._deaths_alone.get(pending.row, 0) + 1
        if deaths >= DEATHS_ALONE and self._canary is not None:
            return pending
        self._groups.appendleft([pending])
        self._save()
        return None

    def _load(self) -> None:
        with contextlib.suppress(OSError, ValueError, TypeError, AttributeError, LookupError):
            kept: Mapping[str, Any] = json.loads(self._path.read_bytes())
            deaths = {int(row): int(count) for row, count in kept["deaths_alone"].items()}
            self._expected, self._deaths_alone = set(map(int, kept["rows"])), deaths

    def _save(self) -> None:
        """Raises StorageError."""
        rows = {pending.row for group in (*self._groups, self._running) for pending in group}
        if not rows | self._expected:
            with storage(self._path, action="removed"):
                self._path.unlink(missing_ok=True)
            return
        kept = {"rows": sorted(rows | self._expected), "deaths_alone": self._deaths_alone}
        atomic_write(self._path, json.dumps(kept).encode() + b"\n")


def _parted(rows: Collection[Pending], in_step: Collection[int]) -> list[list[Pending]]:
    """Those that were being computed, then the others."""
    parts = [p for p in rows if p.row in in_step], [p for p in rows if p.row not in in_step]
    return [part for part in parts if part]
