"""Committed parts that are assembled again: because the selection grew, or because some of their rows are
retried. The present file stays in place, and says which results stay, until the new one is renamed over it.

Recovery decides which parts; the window asks for the rows that stay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchgen.data.row_result import RowResult
from batchgen.job.part_reader import PartRow, read_part
from batchgen.job.parts import PartCommit
from batchgen.types import StorageError

Anew = Callable[[PartRow], bool]


def no_row(row: PartRow) -> bool:
    """Every row stays."""
    return False


@dataclass(frozen=True, slots=True)
class Replaced:
    """A committed part that a new one is to replace.

    Args:
        commit: of the present file.
        path: of the present file.
        plan: what is in it, as in `OutputPlan.to_json`.
        anew: rows that are computed again.
        since: the epoch from which on the journal may answer those rows.
        change: number of the retry that the new part has taken in; 0 for none.
    """

    commit: PartCommit
    path: Path
    plan: Mapping[str, Any]
    anew: Anew = no_row
    since: int = 0
    change: int = 0

    def kept(self) -> KeptRows:
        """Its rows that stay, to be asked for in order."""
        return KeptRows(self)


class KeptRows:
    """Reads the present file of a part in step with the input.

    Args:
        replaced: the part.
    """

    def __init__(self, replaced: Replaced) -> None:
        self._anew = replaced.anew
        self._path = replaced.path
        self._rows: Iterator[PartRow] = read_part(replaced.path, replaced.plan)
        self._next = self._advance()

    def result(self, row: int) -> RowResult | None:
        """The result of a row if it stays; rows must be asked for in rising order.

        Raises:
            StorageError: the file is not what was committed.
        """
        while self._next is not None and self._next.row < row:
            self._next = self._advance()
        found = self._next
        if found is None or found.row != row or self._anew(found):
            return None
        return found.result

    def close(self) -> None:
        """Close the file."""
        getattr(self._rows, "close", lambda: None)()

    def _advance(self) -> PartRow | None:
        try:
            return next(self._rows, None)
        except (ValueError, KeyError, TypeError) as error:
            raise StorageError(
                f"{self._path}: cannot be read as the part that was committed ({error}); move it away, then "
                "run the same command again to compute its rows anew"
            ) from error
