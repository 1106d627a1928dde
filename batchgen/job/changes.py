"""How a job was changed on purpose after it began: retries and accepted drifts, kept in the manifest.

Number 0 is the job as it began; the n-th change has number n. Every attempt runs under one of them, so the
epoch of a journal record says which settings its row was computed under, and a committed part keeps that
for each of its rows (`PartCommit.settings`).
"""

from __future__ import annotations

import getpass
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from batchgen.grammar import counted

RETRY, DRIFT = "retry", "drift"
Runs = list[tuple[int, int, int]]
"""(first row, rows, number of the change) of stretches of rows; those of number 0 are left out."""


def now_text() -> str:
    """The time in ISO 8601, UTC."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def host_name() -> str:
    """Of this machine."""
    return socket.gethostname()


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return str(os.getuid())


@dataclass(slots=True, kw_only=True)
class Change:
    """One deliberate change.

    Args:
        kind: retry or drift.
        epoch: of the attempt that recorded it.
        differences: what changed, one sentence or three lines each; nothing where settings stayed.
        result: the result fingerprint from here on; of a retry, for its rows only.
        before: the result fingerprint until then.
        where: the condition of a retry.
        sets: what a retry was given by `--set`, as written.
        parts: first part and number of parts of each stretch that a retry replaces.
        rows: that a retry computes anew.
        open: whether a retry still goes on.
    """

    kind: str
    epoch: int
    differences: Sequence[str] = ()
    result: Mapping[str, Any] = field(default_factory=dict)
    before: Mapping[str, Any] = field(default_factory=dict)
    pinned_before: Mapping[str, Any] = field(default_factory=dict)
    where: str | None = None
    sets: Sequence[str] = ()
    parts: Sequence[Sequence[int]] = ()
    rows: int = 0
    open: bool = False
    user: str = field(default_factory=_user)
    host: str = field(default_factory=host_name)
    pid: int = field(default_factory=os.getpid)
    time: str = field(default_factory=now_text)

    def covers(self, part: int) -> bool:
        """Whether a retry replaces this part."""
        return any(first <= part < first + count for first, count in self.parts)

    def describe(self) -> str:
        """One line for a person."""
        what = (
            f"retry of {counted(self.rows, 'row')} ({self.where})" if self.kind == RETRY else "accepted drift"
        )
        settings = f", with {', '.join(self.sets)}" if self.sets else ""
        return f"{what}{settings}, by {self.user} on {self.host}, {self.time}"


def stretches(numbers: Iterable[int]) -> list[list[int]]:
    """First and length of each stretch of consecutive numbers, of numbers in order."""
    found: list[list[int]] = []
    for number in numbers:
        if found and number == found[-1][0] + found[-1][1]:
            found[-1][1] += 1
        else:
            found.append([number, 1])
    return found


def add_row(runs: Runs, row: int, number: int) -> None:
    """Note that a row, the next in order, was computed under change `number`."""
    if number == 0:
        return
    if runs:
        first, count, last = runs[-1]
        if last == number and row == first + count:
            runs[-1] = (first, count + 1, number)
            return
    runs.append((row, 1, number))


def number_of(runs: Iterable[Sequence[int]], row: int) -> int:
    """Under which change a row was computed."""
    return next((number for first, count, number in runs if first <= row < first + count), 0)


def rows_by_number(all_runs: Iterable[Iterable[Sequence[int]]]) -> dict[int, int]:
    """How many rows were computed under each change but 0."""
    totals: dict[int, int] = {}
    for runs in all_runs:
        for _, count, number in runs:
            totals[number] = totals.get(number, 0) + count
    return totals


def told(changes: Sequence[Change], rows: Mapping[int, int]) -> list[str]:
    """The changes for a person, each with its differences.

    Args:
        changes: of the manifest.
        rows: how many rows in parts were computed under each, see `rows_by_number`.
    """
    lines: list[str] = []
    for number, change in enumerate(changes, 1):
        goes_on = ", not finished yet" if change.open else ""
        lines += [f"{counted(rows.get(number, 0), 'row')}: {change.describe()}{goes_on}", *change.differences]
    return lines


def of_epoch(epochs: Sequence[Sequence[int]], epoch: int) -> int:
    """The change under which an attempt ran.

    Args:
        epochs: first epoch and number, in order, as the manifest keeps them.
        epoch: of the attempt.
    """
    return next((number for first, number in reversed(epochs) if first <= epoch), 0)


def latest_drift(changes: Sequence[Change]) -> int:
    """Number of the last accepted drift: what an ordinary run goes by; 0 for none."""
    return next((n for n in range(len(changes), 0, -1) if changes[n - 1].kind == DRIFT), 0)
