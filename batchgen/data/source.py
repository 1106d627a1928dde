"""The input of a job: an ordered list of files read as one sequence of rows, from any position.

The job's `validate`, `plan` and supervisor call `open_input` and go through `InputSet.rows`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, Protocol, Self

from batchgen.data.declared_values import DeclaredColumn, apply_schema, declared_column
from batchgen.data.identity import RowIdentity
from batchgen.data.input_file import Ignore, InputFile, find_files
from batchgen.data.line_reader import MAX_RECORD_BYTES
from batchgen.data.openai_batch import ID_COLUMN
from batchgen.data.row import Position, Row
from batchgen.data.text_formats import check_endpoint, check_headers, open_text
from batchgen.data.where import Where
from batchgen.types import UsageError

if TYPE_CHECKING:
    import pyarrow as pa

WINDOW_ROWS = 1000
"""Rows at the beginning that decide what the columns of a JSON input are."""

# One cursor for the reading that feeds the engine, one for the assembly of parts, and spare ones for
# a look back; each holds one chunk or batch.
_MAX_PARKED = 4


class _Reader(Protocol):
    position: Position

    def seek(self, position: Position) -> None: ...
    def read(self) -> Row | None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """How records are read, as `open_input` takes it. `id_column` None is `input.id: auto`."""

    id_column: str | None = None
    unicode: str = "error"
    on_truncated: str = "stop"
    strict_json: bool = False
    max_record_bytes: int = MAX_RECORD_BYTES
    where: str | None = None
    schema: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        if self.unicode not in {"error", "replace"}:
            raise ValueError(f"unicode is error or replace, not {self.unicode!r}")
        if self.on_truncated not in {"stop", "keep"}:
            raise ValueError(f"on_truncated is stop or keep, not {self.on_truncated!r}")


def open_input(
    paths: str | Sequence[str],
    *,
    format: str = "auto",
    id_column: str | None = None,
    unicode: str = "error",
    on_truncated: str = "stop",
    strict_json: bool = False,
    max_record_bytes: int = MAX_RECORD_BYTES,
    where: str | None = None,
    schema: Mapping[str, str] | None = None,
    ignore: Ignore | None = None,
) -> InputSet:
    """Opens the input of a job: checks every file's kind, Parquet footers and schemas, and CSV headers.

    Args:
        paths: one path, pattern or URL, or a list of them; relative ones against the working folder.
        format: auto, parquet, jsonl, json, csv or openai_batch.
        id_column: the column that holds the id; None is `auto`: `custom_id` of an OpenAI batch file, else the
            column `id` where a row has it, else `<base name>:<ordinal>`.
        unicode: error or replace, for bytes that are not UTF-8 and lone surrogates.
        on_truncated: stop or keep, for cut compressed files and JSON arrays.
        strict_json: duplicate keys, NaN and control characters are error rows instead of notes.
        max_record_bytes: a longer text record is an error row.
        where: `input.where`; None selects every row.
        schema: `input.schema`: types of columns of JSON and CSV; a value that does not fit is an error row.
        ignore: says which local files the job itself writes: patterns pass over them.

    Raises:
        UsageError: something that is not supported, a wrong `where`, or a column that the input lacks.
        InputError: a file is missing, unreadable, cut or corrupt.
    """
    options = ReadOptions(id_column, unicode, on_truncated, strict_json, max_record_bytes, where, schema)
    files = find_files(paths, format) if ignore is None else find_files(paths, format, ignore)
    if id_column is None and files[0].format == "openai_batch":
        options = replace(options, id_column=ID_COLUMN)
    return InputSet(files, options)


class InputSet:
    """The ordered files of a job. Not thread-safe: readers are parked and taken up again.

    Attributes:
        files: in the order in which they are read.
        options: how records are read.
        notes: sentences about files, such as a cut one that was kept; for the report.
    """

    def __init__(self, files: tuple[InputFile, ...], options: ReadOptions) -> None:
        self.files = files
        self.options = options
        self.notes: list[str] = []
        self._identity = RowIdentity(options.id_column)
        self._where: Where | None = None
        self._declared: tuple[DeclaredColumn, ...] = ()
        self._parked: list[_Reader] = []
        self._schema: pa.Schema | None = None
        self._columns: tuple[str, ...] | None = None
        if self.format in {"parquet", "arrow"}:
            from batchgen.data.table_schema import common_schema

            self._schema = common_schema(files)
            self._columns = tuple(self._schema.names)
        else:
            self._columns = check_headers(files)
        if self.format == "openai_batch":
            check_endpoint(self)
        self._check_id_column()
        self._declared = self._declared_columns()
        self._where = None if options.where is None else Where(options.where)
        if self._where is not None:
            self._where.require_columns(self.columns())

    @property
    def where(self) -> Where | None:
        """What selects rows; None where all are."""
        return self._where

    @property
    def format(self) -> str:
        """That of the first file: parquet, arrow, jsonl, json, csv or openai_batch."""
        return self.files[0].format

    def columns(self) -> tuple[str, ...]:
        """Names of the columns: of the schema, of the CSV header, or those of the first 1,000 JSON rows."""
        if self._columns is None:
            names: dict[str, None] = {}
            for row in self.window():
                names.update(dict.fromkeys(row.values))
            names.update(dict.fromkeys(self.options.schema or ()))
            self._columns = tuple(names)
        return self._columns

    def arrow_schema(self) -> pa.Schema | None:
        """The schema that all Parquet or Arrow files share; None for text."""
        return self._schema

    def has_header(self) -> bool:
        """Whether `columns` are all that any row can have; not so for JSON."""
        return self._schema is not None or self.format == "csv"

    def num_rows(self) -> int | None:
        """Rows of the input where its files say so without being read; None for text."""
        if self._schema is None:
            return None
        from batchgen.data.table_schema import count_rows

        return count_rows(self.files)

    def window(self) -> Iterator[Row]:
        """The first 1,000 rows, error rows included."""
        return islice(self.rows(), WINDOW_ROWS)

    def rows(self, start: Position | None = None) -> Iterator[Row]:
        """Every row from `start` to the end of the input, lazily and in order, with those not `selected`.

        Closing the iterator parks its reader, so that a later call for the rows that follow goes on there
        even where the file itself cannot be entered in the middle.

        Args:
            start: a `Row.next_position`, or None for the beginning.

        Raises:
            InputError: a file is cut or corrupt; after all rows before that place.
        """
        position = start or Position()
        while position.file_index < len(self.files):
            reader = self._take(position)
            try:
                reader.seek(position)
                while (row := reader.read()) is not None:
                    if self._declared:
                        apply_schema(self._declared, row, from_text=self.format == "csv")
                    if self._where is not None:
                        self._where.apply(row)
                    yield row
            except GeneratorExit:
                self._park(reader)
                raise
            except BaseException:
                reader.close()
                raise
            position = Position(position.file_index + 1, ordinal=reader.position.ordinal)
            reader.close()

    def fingerprint(self) -> dict[str, Any]:
        """What the start check compares: see `batchgen.data.fingerprint`. Cheap: reads footers only."""
        from batchgen.data.fingerprint import input_fingerprint

        return input_fingerprint(self.files)

    def close(self) -> None:
        """Closes parked readers; the set can still be read afterwards."""
        while self._parked:
            self._parked.pop().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        # `_parked` is missing when the constructor refused the input.
        if hasattr(self, "_parked"):
            self.close()

    def _take(self, position: Position) -> _Reader:
        usable = [
            reader
            for reader in self._parked
            if reader.position.file_index == position.file_index and reader.position.offset <= position.offset
        ]
        if not usable:
            return self._open(self.files[position.file_index])
        nearest = max(usable, key=lambda reader: reader.position.offset)
        self._parked.remove(nearest)
        return nearest

    def _park(self, reader: _Reader) -> None:
        self._parked.append(reader)
        if len(self._parked) > _MAX_PARKED:
            self._parked.pop(0).close()

    def _open(self, file: InputFile) -> _Reader:
        replace_invalid = self.options.unicode == "replace"
        if self._schema is not None:
            from batchgen.data.table_reader import TableReader

            return TableReader(file, list(self.columns()), self._identity, replace_invalid=replace_invalid)
        return open_text(
            file,
            self._identity,
            replace_invalid=replace_invalid,
            strict_json=self.options.strict_json,
            keep_truncated=self.options.on_truncated == "keep",
            max_record_bytes=self.options.max_record_bytes,
            note=self._note,
        )

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def _declared_columns(self) -> tuple[DeclaredColumn, ...]:
        schema = self.options.schema or {}
        if schema and self._schema is not None:
            raise UsageError(
                f"input.schema: {self.files[0].path} is {self.format}, which has types of its own; remove it"
            )
        if self.format == "csv":
            for name in schema:
                if name not in self.columns():
                    near = difflib.get_close_matches(name, self.columns(), n=1)
                    hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(self.columns())}"
                    raise UsageError(f"input.schema: {self.files[0].path} has no column {name!r}; {hint}")
        return tuple(declared_column(name, type_) for name, type_ in schema.items())

    def _check_id_column(self) -> None:
        name = self._identity.column
        if name is not None and self.columns() and name not in self.columns():
            raise UsageError(
                f"input.id: {self.files[0].path} has no column {name!r}; it has {', '.join(self.columns())}"
            )
