"""What reading the rows of an input says of a job before it runs: how many, which are bad, which occur twice.

For `plan`. Reads all rows or the first so many, and hands on those that are to be tokenized. Takes 16 bytes
of memory a row.
"""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from batchgen.data.prompt_values import prompt_values
from batchgen.data.row import Row
from batchgen.job.part_summary import ErrorGroup

BATCH = 256
EXAMPLES = 3
Prompt = tuple[int, str, dict[str, Any]]
"""Row, its id, and the values that its prompt needs."""


@dataclass(slots=True)
class Twice:
    """Rows that are equal in something.

    Args:
        rows: those that an earlier row equals.
        examples: (earlier, later) row.
    """

    rows: int = 0
    examples: list[tuple[int, int]] = field(default_factory=list)


@dataclass(slots=True)
class RowScan:
    """What was found.

    Args:
        read: rows of the selection that were read.
        ended: whether that is all of them.
        bytes: that they take in the input, roughly.
        readable: rows that can be rendered.
        errors: rows that cannot be read, by class.
        notes: what the reader repaired.
        ids, prompts: rows whose id, or whose columns for the prompt, an earlier row has as well.
    """

    read: int = 0
    ended: bool = False
    bytes: int = 0
    readable: int = 0
    errors: dict[str, ErrorGroup] = field(default_factory=dict)
    notes: Counter[str] = field(default_factory=Counter)
    ids: Twice = field(default_factory=Twice)
    prompts: Twice = field(default_factory=Twice)


class Everything:
    """Hands on every row, a batch at a time.

    Args:
        take: called with each batch.
    """

    def __init__(self, take: Callable[[list[Prompt]], None]) -> None:
        self._take = take
        self._batch: list[Prompt] = []

    def add(self, prompt: Prompt) -> None:
        """Consider a row."""
        self._batch.append(prompt)
        if len(self._batch) == BATCH:
            self.close()

    def close(self) -> None:
        """Hand on what is left."""
        self._take(self._batch)
        self._batch = []


class Sample:
    """Hands on `size` rows in input order, each as likely as any other, always the same (reservoir sampling).

    Args:
        size: most rows.
        take: called with each batch, at the end.
    """

    def __init__(self, size: int, take: Callable[[list[Prompt]], None]) -> None:
        self._size = size
        self._take = take
        self._random = random.Random(0)
        self._seen = 0
        self._kept: list[Prompt] = []

    def add(self, prompt: Prompt) -> None:
        """Consider a row."""
        self._seen += 1
        if len(self._kept) < self._size:
            self._kept.append(prompt)
        elif (place := self._random.randrange(self._seen)) < self._size:
            self._kept[place] = prompt

    def close(self) -> None:
        """Hand on the sample."""
        self._kept.sort(key=lambda prompt: prompt[0])
        for start in range(0, len(self._kept), BATCH):
            self._take(self._kept[start : start + BATCH])


def scan_rows(
    rows: Iterable[Row], columns: Sequence[str], most: int | None, sampler: Everything | Sample
) -> RowScan:
    """Read rows.

    Args:
        rows: of the selection, in input order.
        columns: that the prompt needs.
        most: rows to read; None for all.
        sampler: gets the rows that can be rendered; closed at the end.

    Raises:
        InputError: the input is cut or corrupt.
    """
    scan = RowScan()
    numbers, ids, prompts = array("q"), array("q"), array("q")
    for row in rows:
        if scan.read == most:
            break
        scan.read += 1
        scan.bytes += row.size
        scan.notes.update(row.notes)
        if row.error is not None:
            group = scan.errors.setdefault(row.error.error_class.value, ErrorGroup())
            group.add(row.ordinal, row.id, row.error.message)
            continue
        values = prompt_values(row, columns)
        numbers.append(row.ordinal)
        ids.append(hash(row.id))
        prompts.append(hash(repr(values)))
        sampler.add((row.ordinal, row.id, values))
    else:
        scan.ended = True
    sampler.close()
    scan.readable = len(numbers)
    scan.ids, scan.prompts = _twice(numbers, ids), _twice(numbers, prompts)
    return scan


def _twice(numbers: array[int], hashes: array[int]) -> Twice:
    """Rows with a hash that an earlier row has; that two things share one of 64 bits does not happen."""
    if not hashes:
        return Twice()
    rows, all_hashes = np.frombuffer(numbers, np.int64), np.frombuffer(hashes, np.int64)
    order = np.argsort(all_hashes, kind="stable")
    again = all_hashes[order][1:] == all_hashes[order][:-1]
    pairs = sorted(zip(rows[order[1:][again]], rows[order[:-1][again]], strict=True))[:EXAMPLES]
    return Twice(int(again.sum()), [(int(earlier), int(later)) for later, earlier in pairs])
