"""Results as a worker reports them: several at once, in columns, each packed as the journal keeps it.

The worker packs, so that the supervisor, which serves all workers, only copies bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
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
        prompt_tokens, completion_tokens: 0 where the engine never saw the row.
        stats: a column for each of `STATS`.
    """

    rows: list[int] = field(default_factory=list)
    packed: list[bytes] = field(default_factory=list)
    status: list[str] = field(default_factory=list)
    prompt_tokens: list[int] = field(default_factory=list)
    completion_tokens: list[int] = field(default_factory=list)
    stats: dict[str, list[int]] = field(default_factory=lambda: {name: [] for name in STATS})

    def __len__(self) -> int:
        return len(self.rows)

    def add(self, row: int, result: Mapping[str, Any], stats: Mapping[str, int]) -> None:
        """Take one result.

        Args:
            row: that it answers.
            result: `status`, `text` (a list for a dialogue), `finish_reason`, `stop_reason`, `error` (class
                and message, or None), `usage` (prompt, completion and truncated tokens, or None), and
                `included` where `output.include` asks for more; lists where rows have several samples.
            stats: those of `STATS` that are known; the others are 0.
        """
        prompt_tokens, completion_tokens, _ = result["usage"] or _NO_TOKENS
        self.rows.append(row)
        self.packed.append(pack_result(result))
        self.status.append(result["status"])
        self.prompt_tokens.append(prompt_tokens)
        self.completion_tokens.append(completion_tokens)
        for name, column in self.stats.items():
            column.append(stats.get(name, 0))

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
        if not kept:
            return ResultBatch()

        def these(column: list[Any]) -> list[Any]:
            return [column[place] for place in kept]

        columns = {name: these(getattr(self, name)) for name in self.__slots__ if name != "stats"}
        return ResultBatch(**columns, stats={name: these(column) for name, column in self.stats.items()})
