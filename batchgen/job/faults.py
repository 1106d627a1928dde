"""Faults of a job file: where each is and what to do. Used by the loader of job files and by `validate`.

All faults of a file are collected and reported together, each as one sentence that ends with the remedy
after its last semicolon.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from batchgen.data.urls import shown_text, shown_url
from batchgen.types import UsageError

KeyPath = tuple[str | int, ...]
LONGEST_VALUE = 80
MOST_FAULTS = 50
"""Enough to mend a file by; a file with more is hardly a job file."""
_NAMED_KEY = re.compile(r"[a-z_]+(?:\.[a-z_]+)*(?=\W*(?::| is missing| is not ))")


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
    """One thing wrong with a job file; `key` is the one it is about, as far as it is about one."""

    origin: Origin
    message: str
    key: KeyPath = field(default=(), compare=False)

    def __str__(self) -> str:
        return f"{self.origin}: {self.message}"


class JobFileError(UsageError):
    """A job file with faults, in the order of the file."""

    def __init__(self, source: str, faults: Sequence[Fault]) -> None:
        more = ", perhaps more" if len(faults) >= MOST_FAULTS else ""
        several = "\n  ".join([f"{source}: {len(faults)} faults{more}", *map(str, faults)])
        super().__init__(str(faults[0]) if len(faults) == 1 else several)
        self.faults = tuple(faults)


def dotted(path: KeyPath) -> str:
    """`sampling.stop[0]` for `("sampling", "stop", 0)`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else part
    return text


def named_key(sentence: str) -> KeyPath:
    """The key that a sentence begins with, such as `output.path: no permission …`; empty if it names none."""
    named = _NAMED_KEY.match(sentence)
    return tuple(named[0].split(".")) if named else ()


def remedy(sentence: str) -> str | None:
    """What to do, of a sentence that says it after its last semicolon."""
    _, semicolon, last = sentence.rpartition("; ")
    return last if semicolon else None


def show_value(value: Any) -> str:
    """A value as a job file would spell it, on one line, shortened.

    Without control characters, and without the credentials of a URL.
    """
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    try:
        text = repr(shown_url(value)) if isinstance(value, str) else shown_text(repr(value))
    except (ValueError, RecursionError):
        return "a value too large to show"
    return text if len(text) <= LONGEST_VALUE else text[: LONGEST_VALUE - 1] + "…"


def raise_faults(source: str, faults: Iterable[Fault]) -> None:
    """Report all faults as one error, in the order of the file.

    Raises:
        JobFileError: if there is any fault.
    """
    ordered = sorted(set(faults))[:MOST_FAULTS]
    if ordered:
        raise JobFileError(source, ordered)
