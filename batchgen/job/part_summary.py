"""What a part holds, in a few numbers: made while the part is written, added up by the report.

So that a report of ten million rows reads a line a part and not the rows. `summary_of` makes it anew from
results where it is missing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

from batchgen.data.row_result import RowResult
from batchgen.job.histogram import Histogram
from batchgen.text.visible import visible_line

EXAMPLES = 3
LONGEST_MESSAGE = 300
LONGEST_ID = 80
_BATCH = 4096


@dataclass(slots=True)
class ErrorGroup:
    """Rows that failed in the same way. `examples` are the first few: row, id, message."""

    count: int = 0
    examples: list[tuple[int, str, str]] = field(default_factory=list)

    def add(self, row: int, row_id: str, message: str) -> None:
        """Count one row."""
        self.count += 1
        if len(self.examples) < EXAMPLES:
            shown = visible_line(row_id, LONGEST_ID), visible_line(message, LONGEST_MESSAGE)
            self.examples.append((row, *shown))

    def merge(self, other: ErrorGroup) -> None:
        """Add the rows of another group; the examples of the lowest rows stay."""
        self.count += other.count
        self.examples = sorted([*self.examples, *other.examples])[:EXAMPLES]


@dataclass(slots=True)
class PartSummary:
    """What became of rows.

    Args:
        status: rows by status.
        finish_reasons: answers by finish reason, of which a row may have several.
        errors: by class.
        prompt_tokens, output_tokens: of rows that the engine saw.
        truncated_rows, truncated_tokens: prompts that were cut, and what was cut off.
        reasoning_tokens: of output tokens, where a job splits reasoning off.
    """

    status: Counter[str] = field(default_factory=Counter)
    finish_reasons: Counter[str] = field(default_factory=Counter)
    errors: dict[str, ErrorGroup] = field(default_factory=dict)
    prompt_tokens: Histogram = field(default_factory=Histogram)
    output_tokens: Histogram = field(default_factory=Histogram)
    truncated_rows: int = 0
    truncated_tokens: int = 0
    reasoning_tokens: int = 0

    @property
    def rows(self) -> int:
        """Of any status."""
        return sum(self.status.values())

    @property
    def answers(self) -> int:
        """With a finish reason."""
        return sum(self.finish_reasons.values())

    def merge(self, other: PartSummary) -> None:
        """Add the rows of another summary."""
        self.status.update(other.status)
        self.finish_reasons.update(other.finish_reasons)
        for name, group in other.errors.items():
            self.errors.setdefault(name, ErrorGroup()).merge(group)
        self.prompt_tokens.merge(other.prompt_tokens)
        self.output_tokens.merge(other.output_tokens)
        self.truncated_rows += other.truncated_rows
        self.truncated_tokens += other.truncated_tokens
        self.reasoning_tokens += other.reasoning_tokens

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "status": dict(self.status),
            "finish_reasons": dict(self.finish_reasons),
            "errors": {
                name: {"count": group.count, "examples": [list(e) for e in group.examples]}
                for name, group in self.errors.items()
            },
            "prompt_tokens": self.prompt_tokens.to_json(),
            "output_tokens": self.output_tokens.to_json(),
            "truncated_rows": self.truncated_rows,
            "truncated_tokens": self.truncated_tokens,
            "reasoning_tokens": self.reasoning_tokens,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> PartSummary:
        """From `to_json`. Raises ValueError, KeyError or TypeError for anything else."""
        return cls(
            Counter(data["status"]),
            Counter(data["finish_reasons"]),
            {
                name: ErrorGroup(group["count"], [(e[0], e[1], e[2]) for e in group["examples"]])
                for name, group in data["errors"].items()
            },
            Histogram.from_json(data["prompt_tokens"]),
            Histogram.from_json(data["output_tokens"]),
            data["truncated_rows"],
            data["truncated_tokens"],
            data.get("reasoning_tokens", 0),
        )


def add_results(summary: PartSummary, keys: Sequence[tuple[int, str]], results: Sequence[RowResult]) -> None:
    """Count many rows at once, which costs little a row.

    Args:
        summary: to add to.
        keys: number and id of each row.
        results: theirs.
    """
    summary.status.update([result.status for result in results])
    reasons: Iterable[Any] = [result.finish_reason for result in results]
    if list in set(map(type, reasons)):
        reasons = chain.from_iterable(r if isinstance(r, list) else [r] for r in reasons)
    summary.finish_reasons.update([reason for reason in reasons if reason is not None])
    usages = [result.usage for result in results if result.usage is not None]
    if usages:
        prompt, output, truncated = zip(*(usage[:3] for usage in usages), strict=True)
        summary.prompt_tokens.add(prompt)
        summary.output_tokens.add(output)
        summary.truncated_rows += sum(count > 0 for count in truncated) if any(truncated) else 0
        summary.truncated_tokens += sum(truncated)
        summary.reasoning_tokens += sum(sum(usage[3:]) for usage in usages)
    for (row, row_id), result in zip(keys, results, strict=True):
        if result.error is not None:
            name = result.error.error_class.value
            summary.errors.setdefault(name, ErrorGroup()).add(row, row_id, result.error.message)


def summary_of(rows: Iterable[tuple[int, str, RowResult]]) -> PartSummary:
    """Of (row, id, result), lazily."""
    summary = PartSummary()
    remaining = iter(rows)
    while batch := list(islice(remaining, _BATCH)):
        add_results(summary, [(row, row_id) for row, row_id, _ in batch], [result for *_, result in batch])
    return summary
