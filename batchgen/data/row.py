"""What a reader hands to the job: a row, where it lies, and the index entry of a part of the input.

Everything here is cheap to create, and what goes to disk turns into JSON and back. Standard library only.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from batchgen.types import RowError

DIGEST_BYTES = 16


def digest(data: bytes) -> bytes:
    """Content hash of one record: blake2b, 16 bytes."""
    return hashlib.blake2b(data, digest_size=DIGEST_BYTES).digest()


class Position(NamedTuple):
    """A place between two records of the ordered file list; reading can begin there.

    Args:
        file_index: index in the ordered file list.
        offset: JSONL: bytes of (decompressed) text before it. Parquet: rows of the file before it.
        line: physical lines of the file before it, blank ones included; 0 for Parquet.
        ordinal: rows of the whole input before it.
    """

    file_index: int = 0
    offset: int = 0
    line: int = 0
    ordinal: int = 0

    def to_json(self) -> dict[str, int]:
        return self._asdict()

    @classmethod
    def from_json(cls, data: Mapping[str, int]) -> Self:
        return cls(data["file_index"], data["offset"], data["line"], data["ordinal"])


@dataclass(slots=True)
class Row:
    """One record of the input. A record that cannot be read is a row with `error` and no values.

    Args:
        ordinal: index among all records of the input, from 0.
        id: the user's id as a string, or `<base name of the file>:<ordinal>`.
        values: column to exact Python value. JSONL: what `exact_json` decodes. Parquet: lazily converted,
            see `arrow_values`; struct fields that are null are left out.
        error: why the row cannot run; final whatever the engine would say.
        line: physical line from 1; 0 for Parquet.
        file: base name of the file.
        digest: 16 bytes that depend on the record's content alone.
        next_position: where the record after this one begins.
        notes: short codes of what was repaired: `bom_stripped`, `nan_replaced`, `duplicate_key`,
            `control_character`, `invalid_unicode_replaced`.
        nonfinite: columns in which NaN or an infinity became null.
        size: bytes that the record takes in the input, roughly; a function of the input alone. Decides where
            row groups of the output end.
        selected: whether `input.where` lets it through; one that it drops has no output row.
        skipped: whether it stands for an earlier row of the same id (`input.duplicate_ids: keep_first`).
    """

    ordinal: int
    id: str
    values: Mapping[str, Any]
    error: RowError | None
    line: int
    file: str
    digest: bytes
    next_position: Position
    notes: tuple[str, ...] = ()
    nonfinite: tuple[str, ...] = ()
    size: int = 0
    selected: bool = True
    skipped: bool = False


@dataclass(frozen=True, slots=True)
class PartIndexEntry:
    """Where one part of the input begins, how many rows it has and what they contained when first read."""

    part: int
    start: Position
    rows: int
    digest: str

    def to_json(self) -> dict[str, Any]:
        return {"part": self.part, "start": self.start.to_json(), "rows": self.rows, "digest": self.digest}

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        return cls(data["part"], Position.from_json(data["start"]), data["rows"], data["digest"])


@dataclass(slots=True)
class PartIndexer:
    """Builds the index entry of a part while its rows pass by, in order."""

    part: int
    start: Position
    rows: int = 0
    _hash: hashlib.blake2b = field(default_factory=lambda: hashlib.blake2b(digest_size=DIGEST_BYTES))

    def add(self, row: Row) -> None:
        """The next row."""
        self.add_all([row])

    def add_all(self, rows: Sequence[Row]) -> None:
        """The next rows."""
        self.rows += len(rows)
        self._hash.update(b"".join([row.digest for row in rows]))

    def entry(self) -> PartIndexEntry:
        return PartIndexEntry(self.part, self.start, self.rows, self._hash.hexdigest())
