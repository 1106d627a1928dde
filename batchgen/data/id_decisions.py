"""What `input.duplicate_ids` does with rows whose id an earlier row has, worked out from the ledger of ids.

`suffix` gives ids in input order: a row whose id was given before gets `#k` behind it, k being its place
among the rows of that id; where that in turn is the id of another row, the later of the two gets a further
`#k`, and so on until all differ. `keep_first` skips such rows. Either way what becomes of a row depends only
on the rows before it, so a larger selection changes nothing that was decided for a smaller one.

The decisions lie in one file, sorted by ordinal, which is read beside the input: memory is bounded however
many rows share an id.

    decided-<policy>-<rows>     ordinal, round (0 for keep_first), k
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np

from batchgen.data.id_hash import hash_suffixed, suffixed
from batchgen.data.id_ledger import IdLedger, with_repeats
from batchgen.data.row import Row
from batchgen.data.sorted_runs import WIDTH, Records, Run, RunSorter, read_run, write_run

Policy = Literal["suffix", "keep_first"]

_MOST_IN_MEMORY = 1 << 17
# So many rows ahead, decisions are read over; beyond, and backwards, they are looked up.
_READ_OVER = 10_000


def decide(ledger: IdLedger, policy: Policy, folder: Path) -> IdDecisions:
    """Decide for every row of a ledger that is complete; takes up what was decided before.

    Args:
        ledger: of the rows from ordinal 0 on, merged.
        policy: suffix or keep_first.
        folder: for the file.

    Raises:
        StorageError: it cannot be written.
    """
    path = folder / f"decided-{policy}-{ledger.end}"
    run = read_run(path)
    if run is None:
        sorter = RunSorter(folder, ".tmp-decided", _MOST_IN_MEMORY)
        try:
            _rounds(ledger, policy, folder, sorter)
            run = write_run(path, sorter.merged(), {})
        finally:
            sorter.close()
    for other in folder.glob("decided-*"):
        if other != path:
            other.unlink()
    return IdDecisions(run, policy)


def recorded_decisions(folder: Path) -> IdDecisions | None:
    """Those of the last run, for who only looks; None where there are none. Raises StorageError."""
    for path in folder.glob("decided-*"):
        run = read_run(path)
        if run is not None:
            return IdDecisions(run, "suffix" if path.name.startswith("decided-suffix") else "keep_first")
    return None


def _rounds(ledger: IdLedger, policy: Policy, folder: Path, decided: RunSorter) -> None:
    """Each round renames the rows whose id an earlier one has, until all ids differ."""
    chunks, number = ledger.chunks(), 0
    kept: Run | None = None
    renamed: RunSorter | None = None
    # Made-up ids differ among themselves; only where a real one looks like them can two be the same.
    once = policy == "keep_first" or not ledger.looks_suffixed
    while True:
        number += 1
        before, renamed = (kept, renamed), RunSorter(folder, f".tmp-renamed-{number}", _MOST_IN_MEMORY)
        found = _one_round(
            chunks, 0 if policy == "keep_first" else number, decided, None if once else renamed
        )
        if once:
            for _ in found:
                pass
        else:
            kept = write_run(folder / f".tmp-kept-{number}", found, {})
        _remove(*before)
        if once or not renamed.added:
            _remove(kept, renamed)
            return
        assert kept is not None
        chunks = renamed.merged(kept)


def _one_round(
    chunks: Iterator[Records], number: int, decided: RunSorter, renamed: RunSorter | None
) -> Iterator[Records]:
    """Yields the records that keep their id; the others go to `decided`, with new hashes to `renamed`."""
    for chunk, repeated in with_repeats(chunks):
        if not len(repeated):
            yield chunk
            continue
        round_column = np.full(len(repeated), number, np.uint64)
        decided.add(np.stack([repeated[:, 2], round_column, repeated[:, 1]], axis=1))
        again = np.isin(chunk[:, 2], repeated[:, 2])
        if renamed is not None:
            renamed.add(_renamed(chunk[again], repeated[:, 1]))
        yield chunk[~again]


def _renamed(records: Records, places: np.ndarray[tuple[int], np.dtype[np.uint64]]) -> Records:
    """The records with the hashes of their made-up ids."""
    hashes = np.ascontiguousarray(records[:, :2].astype(">u8")).tobytes()
    new = bytearray()
    for i, place in enumerate(places.tolist()):
        new += hash_suffixed(hashes[16 * i : 16 * i + 16], place)
    result = np.empty((len(records), WIDTH), np.uint64)
    result[:, :2] = np.frombuffer(bytes(new), ">u8").reshape(-1, 2)
    result[:, 2] = records[:, 2]
    return result


def _remove(kept: Run | None, renamed: RunSorter | None) -> None:
    if kept is not None:
        kept.path.unlink(missing_ok=True)
    if renamed is not None:
        renamed.close()


class IdDecisions:
    """Applies the decisions to rows; fast where their ordinals rise. One for each reader of the input.

    Args:
        run: the file.
        policy: suffix or keep_first.
    """

    def __init__(self, run: Run, policy: Policy) -> None:
        self.run = run
        self._policy = policy
        self._records: Iterator[tuple[int, int]] = iter(())
        self._next: tuple[int, int] | None = None
        self._ordinal = -_READ_OVER - 1

    def another(self) -> IdDecisions:
        """The same decisions for another reader."""
        return IdDecisions(self.run, self._policy)

    def apply(self, row: Row) -> None:
        """Gives the row its id, or marks it as skipped. Raises StorageError."""
        if not self.run.count:
            return
        if not 0 < row.ordinal - self._ordinal <= _READ_OVER:
            self._go_to(row.ordinal)
        self._ordinal = row.ordinal
        numbers = []
        while self._next is not None and self._next[0] <= row.ordinal:
            if self._next[0] == row.ordinal:
                numbers.append(self._next[1])
            self._next = next(self._records, None)
        if numbers and self._policy == "keep_first":
            row.skipped = True
        elif numbers:
            row.id = suffixed(row.id, numbers)

    def ordinals(self) -> Iterator[int]:
        """Ordinals of the rows for which something was decided, rising; repeated for each further round."""
        return (int(ordinal) for chunk in self.run.chunks() for ordinal in chunk[:, 0])

    def _go_to(self, ordinal: int) -> None:
        first = self.run.find(ordinal)
        self._records = ((r[0], r[2]) for chunk in self.run.chunks(first) for r in chunk.tolist())
        self._next = next(self._records, None)
