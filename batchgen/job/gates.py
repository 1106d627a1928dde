"""`run.gates`: what must hold of a finished job, else it exits with 8.

    gates: {finish_reason.length: "<= 5%", error: "< 1%", error.timeout: "<= 3"}

The job file's models parse them; `run_job` checks them at the end.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from batchgen.grammar import counted
from batchgen.types import ErrorClass, FinishReason, Status

if TYPE_CHECKING:
    from batchgen.job.part_summary import PartSummary

_CONDITION = re.compile(r"(<=|<|>=|>|==) ?(\d+(?:\.\d+)?) ?(%?)")
_OPERATORS: Mapping[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    "<": operator.lt,
    ">=": operator.ge,
    ">": operator.gt,
    "==": operator.eq,
}
MEASURES = (
    *(f"{status}" for status in Status),
    *(f"finish_reason.{reason}" for reason in FinishReason),
    *(f"error.{name}" for name in ErrorClass),
)


@dataclass(frozen=True, slots=True)
class Gate:
    """One condition.

    Args:
        measure: one of `MEASURES`; rows are counted.
        comparison: `<=`, `<`, `>=`, `>` or `==`.
        limit: rows, or a percentage of all rows.
        percent: which of the two.
    """

    measure: str
    comparison: str
    limit: float
    percent: bool

    @classmethod
    def parse(cls, measure: str, condition: Any) -> Gate:
        """Raises ValueError: an unknown measure, or not a condition."""
        match = _CONDITION.fullmatch(condition.strip()) if isinstance(condition, str) else None
        if match is None or measure not in MEASURES:
            raise ValueError("not a gate")
        return cls(measure, match[1], float(match[2]), bool(match[3]))

    @property
    def condition(self) -> str:
        """As the job file has it."""
        return f"{self.comparison} {self.limit:g}{'%' if self.percent else ''}"

    def fault(self, summary: PartSummary) -> str | None:
        """Why a job does not pass; None if it does. A job without rows passes."""
        rows = summary.rows
        count = _count(summary, self.measure)
        whole, noun = rows, "row"
        if self.measure.startswith("finish_reason") and summary.answers > summary.status[Status.OK]:
            # Where rows have several samples, each has its reason, and a row that failed counts once.
            whole, noun = rows - summary.status[Status.OK] + summary.answers, "answer"
        value = 100 * count / whole if self.percent and rows else count
        if not rows or _OPERATORS[self.comparison](value, self.limit):
            return None
        share = f" ({value:.4g}%)" if self.percent else ""
        found = f"{self.measure} is {count:,} of {counted(whole, noun)}{share}"
        return f"{found} and run.gates asks for {self.condition}"


def _count(summary: PartSummary, measure: str) -> int:
    kind, _, name = measure.partition(".")
    if kind == "finish_reason":
        return summary.finish_reasons[name]
    if name:
        return summary.errors[name].count if name in summary.errors else 0
    return summary.status[kind]


def faults(gates: Iterable[Gate], summary: PartSummary) -> list[str]:
    """Of every gate that is not passed, a sentence."""
    return [fault for gate in gates if (fault := gate.fault(summary)) is not None]
