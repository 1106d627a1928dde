"""Results as a worker reports them: several at once, in columns, each packed as the journal keeps it.

The worker packs, so that the supervisor, which serves all workers, only copies bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batchgen.data.row_result import RowResult
from batchgen.job.journal import pack_result, unpack_result

STATS = ("cached_tokens", "preemptions", "queue_ms", "prefill_ms", "decode_ms", "control_tokens")
"""What a worker reports beside a result; it depends on scheduling, so it stays out of the journal."""
_NO_TOKENS = (0, 0, 0)


@dataclass(slots=True)
class ResultBatch:
    """Columns with an entry for each result.

    Args:
        rows: which rows they answer.
        packed: what `journal.pack_result` makes of a result.
        status: ok, error or skipped.
        prompt_tokens, completion_tokens, reasoning_tokens: 0 where the engine never saw the row.
        stats: a column for each of `STATS`.
    """

    rows: Sequence[int]
    packed: Sequence[bytes]
    status: Sequence[str]
    prompt_tokens: Sequence[int]
    completion_tokens: Sequence[int]
    reasoning_tokens: Sequence[int]
    stats: Mapping[str, Sequence[int]]

    def __len__(self) -> int:
        return len(self.rows)

    @classmethod
    def packed_of(
        cls, rows: Sequence[int], results: Sequence[RowResult], stats: Sequence[Sequence[int]] = ()
    ) -> ResultBatch:
        """Pack results.

        Args:
            rows: that they answer.
            results: of each.
            stats: those of `STATS` of each, in that order; empty where they are not known.
        """
        usages = [result.usage or _NO_TOKENS for result in results]
        columns = zip(*stats, strict=True) if stats else ([0] * len(rows) for _ in STATS)
        return cls(
            rows,
            [pack_result(result) for result in results],
            [result.status for result in results],
            [usage[0] for usage in usages],
            [usage[1] for usage in usages],
            [sum(usage[3:]) for usage in usages],
            dict(zip(STATS, columns, strict=True)),
        )

    def message(self) -> dict[str, Any]:
        """What goes to the supervisor."""
        columns = {name: getattr(self, name) for name in self.__slots__}
        return {"type": "results", **columns}

    @classmethod
    def of(cls, message: Mapping[str, Any]) -> ResultBatch:
        """From such a message."""
        return cls(**{name: message[name] for name in cls.__slots__})

    def result(self, place: int) -> RowResult:
        """One of the results."""
        return RowResult.of(*unpack_result(self.packed[place]))

    def without(self, places: set[int]) -> ResultBatch:
        """The same without the results at some places."""
        kept = [place for place in range(len(self.rows)) if place not in places]

        def these(column: Sequence[Any]) -> list[Any]:
            return [column[place] for place in kept]

        columns = {name: these(getattr(self, name)) for name in self.__slots__ if name != "stats"}
        return ResultBatch(**columns, stats={name: these(column) for name, column in self.stats.items()})
