"""Faults of a job file: where each is and what to do. Used by the loader of job files.

All faults of a file are collected and reported together, each as one sentence.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from batchgen.types import UsageError

KeyPath = tuple[str | int, ...]
LONGEST_VALUE = 80


@dataclass(frozen=True, slots=True, order=True)
class Origin:
    """Where a key or value was given: a place in a file, or a command-line flag (line 0)."""

    source: str
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{self.source}:{self.line}:{self.column}" if self.line else self.source


@dataclass(frozen=True, slots=True, order=True)
class Fault:
    """One thing wrong with a job file."""

    origin: Origin
    message: str

    def __str__(self) -> str:
        return f"{self.origin}: {self.message}"


class JobFileError(UsageError):
    """A job file with faults; `faults` holds each as a sentence."""

    def __init__(self, source: str, faults: list[str]) -> None:
        several = "\n  ".join([f"{source}: {len(faults)} faults", *faults])
        super().__init__(faults[0] if len(faults) == 1 else several)
        self.faults = faults


def dotted(path: KeyPath) -> str:
    """`sampling.stop[0]` for `("sampling", "stop", 0)`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def show_value(value: Any) -> str:
    """A value as a job file would spell it, on one line, without control characters, shortened."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return "a value too large to show"
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 1] + "…"


def raise_faults(source: str, faults: Iterable[Fault]) -> None:
    """Report all faults as one error, in the order of the file.

    Raises:
        JobFileError: if there is any fault.
    """
    ordered = [str(fault) for fault in sorted(set(faults))]
    if ordered:
        raise JobFileError(source, ordered)
