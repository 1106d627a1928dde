"""The one schema of a list of Parquet or Arrow files. `InputSet` asks for it when it opens them."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from batchgen.data.arrow_values import unsupported_type
from batchgen.data.input_file import InputFile
from batchgen.data.table_file import open_table
from batchgen.types import UsageError


def common_schema(files: Sequence[InputFile]) -> pa.Schema:
    """The schema of the first file, after checking that all others have the same columns and types.

    Raises:
        UsageError: a type that cannot be read, a name that occurs twice, or files that differ.
        InputError: a file without a readable footer.
    """
    first = _schema(files[0])
    _check(files[0], first)
    for file in files[1:]:
        difference = _difference(first, _schema(file))
        if difference is not None:
            raise UsageError(
                f"input.path: {file.path} differs from {files[0].path}: {difference}; "
                f"all {files[0].format.title()} files of a job need the same "
                "columns and types, so convert one of them"
            )
    return first


def count_rows(files: Sequence[InputFile]) -> int:
    """Rows of all files, as their footers say."""
    rows = 0
    for file in files:
        table = open_table(file)
        rows += table.num_rows
        table.close()
    return rows


def _schema(file: InputFile) -> pa.Schema:
    table = open_table(file)
    try:
        return table.schema
    finally:
        table.close()


def _check(file: InputFile, schema: pa.Schema) -> None:
    for field in schema:
        if schema.names.count(field.name) > 1:
            raise UsageError(f"input.path: {file.path} has two columns named {field.name!r}; rename one")
        reason = unsupported_type(field.type)
        if reason is not None:
            raise UsageError(f"input.path: {file.path}, column {field.name!r}: {reason}")


def _difference(first: pa.Schema, other: pa.Schema) -> str | None:
    if missing := [name for name in first.names if name not in other.names]:
        return f"column {missing[0]!r} is missing"
    if extra := [name for name in other.names if name not in first.names]:
        return f"column {extra[0]!r} is additional"
    if len(other.names) != len(first.names):
        return "a column occurs twice"
    for field in first:
        type_ = other.field(field.name).type
        if type_ != field.type:
            return f"column {field.name!r} is {type_}, not {field.type}"
    return None
