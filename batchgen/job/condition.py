"""Which rows `retry` computes anew: a list of simple conditions on what a row's result says.

`timeout,engine_oom` names error classes; `finish_reason=length`, `stop_reason=…`, `status=skipped`,
`id=…`, `row=7` and `row=10:20` look at the row's other columns; `errors` is every failed row. A row that
meets any of them is meant.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from batchgen.job.part_reader import PartRow
from batchgen.types import ErrorClass, FinishReason, Status, UsageError

EVERY_ERROR = "errors"
CAN_CHANGE = (
    ErrorClass.CONTEXT_LENGTH,
    ErrorClass.STRUCTURED_UNSATISFIED,
    ErrorClass.NONFINITE,
    ErrorClass.TIMEOUT,
    ErrorClass.ENGINE_OOM,
    ErrorClass.ENGINE_CRASH,
    ErrorClass.INTERNAL,
)
"""Classes that another attempt, another machine or other settings can turn into a result; all others say
what is wrong with the input."""

DEFAULT = ",".join(CAN_CHANGE)
_KNOWN = (
    "error classes, errors, finish_reason=stop|length|abort, stop_reason=…, status=ok|error|skipped, id=…, "
    "row=N or row=FIRST:END, separated by commas"
)
_CLOSED = {"finish_reason": FinishReason, "status": Status}


@dataclass(frozen=True, slots=True)
class Condition:
    """A parsed `--where`.

    Args:
        text: as given.
        tests: a row is meant if one of them holds.
        columns: of ours that must be in the output for the tests to say anything.
        errors_only: whether only failed rows can be meant.
    """

    text: str
    tests: tuple[Callable[[PartRow], bool], ...]
    columns: frozenset[str]
    errors_only: bool

    def __call__(self, row: PartRow) -> bool:
        return any(test(row) for test in self.tests)

    def require(self, names: Collection[str]) -> None:
        """Raises UsageError when the output lacks a column that is asked about."""
        for column in sorted(self.columns - set(names)):
            raise UsageError(
                f"--where {self.text}: the output has no column {column} (output.include leaves it out); "
                "name error classes or rows instead"
            )

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Read `--where`. Raises UsageError naming the term that is not understood."""
        terms = [term.strip() for term in text.split(",")]
        parsed = [_term(text, term) for term in terms]
        return cls(
            text,
            tuple(test for test, _ in parsed),
            frozenset(column for _, column in parsed),
            all(column == "error" for _, column in parsed),
        )


def _term(text: str, term: str) -> tuple[Callable[[PartRow], bool], str]:
    name, equals, value = (part.strip() for part in term.partition("="))
    if not equals and name == EVERY_ERROR:
        return lambda row: row.result.status == Status.ERROR, "error"
    if not equals and name in set(ErrorClass):
        return lambda row: row.result.error is not None and row.result.error.error_class == name, "error"
    if name in _CLOSED and value in set(_CLOSED[name]):
        return lambda row: _is(getattr(row.result, name), value), name
    if name == "stop_reason" and value:
        return lambda row: _is(row.result.stop_reason, value), name
    if name == "id" and value:
        return lambda row: row.id == value, name
    if name == "row":
        first, end = _range(text, value)
        return lambda row: first <= row.row < end, name
    near = difflib.get_close_matches(term, [*ErrorClass, EVERY_ERROR, *_CLOSED, "stop_reason"], n=1)
    hint = f"did you mean {near[0]}? Or " if near else ""
    raise UsageError(f"--where {text}: {term!r} is no condition; {hint}use {_KNOWN}")


def _is(found: str | Sequence[str | None] | None, value: str) -> bool:
    """Whether a reason is this one; of several samples that of any."""
    return found == value if isinstance(found, str | None) else value in found


def _range(text: str, value: str) -> tuple[int, int]:
    first, colon, end = value.partition(":")
    if first.isdecimal() and (end.isdecimal() or not colon):
        return int(first), int(end) if colon else int(first) + 1
    raise UsageError(f"--where {text}: row={value} is no row; write row=7, or row=10:20 for rows 10 to 19")
