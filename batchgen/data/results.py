"""The columns of the output: ours, the user's, their names and order.

The job calls `plan_output` once, pins `OutputPlan.to_json()` in the manifest and rebuilds the plan from there
on every later start. `RowResult` is what the engine's answer becomes.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, cast

import pyarrow as pa

from batchgen.data.exact_json import clean_text
from batchgen.data.identity import AUTO_COLUMN
from batchgen.data.passthrough import (
    ColumnPassthrough,
    MemberPassthrough,
    Passthrough,
    TypedPassthrough,
    VerbatimPassthrough,
    arrow_passthrough,
    decide_kinds,
    passthrough_from_json,
)
from batchgen.data.row import Row
from batchgen.data.source import WINDOW_ROWS, InputSet
from batchgen.types import ErrorClass, RowError, Status, UsageError

ERROR_TYPE = pa.struct([("class", pa.string()), ("message", pa.string())])
USAGE_TYPE = pa.struct(
    [("prompt_tokens", pa.int64()), ("completion_tokens", pa.int64()), ("truncated_tokens", pa.int64())]
)
BEFORE = {"row": pa.int64(), "id": pa.string()}
AFTER = {
    "generated_text": pa.string(),
    "finish_reason": pa.string(),
    "stop_reason": pa.string(),
    "status": pa.string(),
    "error": ERROR_TYPE,
    "usage": USAGE_TYPE,
}
INCLUDABLE = ("usage", "finish_reason")
_LATER = ("prompt", "prompt_token_ids", "output_token_ids", "logprobs", "seed")
_FORMATS = ("parquet", "jsonl")


@dataclass(frozen=True, slots=True)
class RowResult:
    """The outcome of one row; nothing in it depends on scheduling.

    Args:
        usage: prompt, completion and truncated tokens; None where the engine never saw the row.
    """

    status: str
    generated_text: str | None = None
    finish_reason: str | None = None
    stop_reason: str | None = None
    error: RowError | None = None
    usage: tuple[int, int, int] | None = None

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Self:
        """From the map in which a worker reports a result and the journal keeps it.

        Args:
            message: `status`, `text`, `finish_reason`, `stop_reason` (text or token id), `error` (class and
                message, or None), `usage` (three counts, or None).
        """
        error, usage, stop = message["error"], message["usage"], message["stop_reason"]
        return cls(
            status=message["status"],
            generated_text=message["text"],
            finish_reason=message["finish_reason"],
            stop_reason=None if stop is None else str(stop),
            error=RowError(ErrorClass(error[0]), error[1]) if error else None,
            usage=(usage[0], usage[1], usage[2]) if usage else None,
        )

    @classmethod
    def from_error(cls, error: RowError) -> Self:
        """The result of a row that failed before it reached the engine."""
        return cls(Status.ERROR.value, error=error)


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """What one record of the output looks like.

    Args:
        format: parquet or jsonl.
        names: our column to its name in the output; only those that are written.
        passthrough: the user's columns.
    """

    format: str
    names: Mapping[str, str]
    passthrough: Passthrough

    def schema(self) -> pa.Schema:
        """Of a Parquet part: row, id, the user's columns, the rest of ours."""
        before = [pa.field(self.names[key], type_) for key, type_ in BEFORE.items()]
        after = [pa.field(self.names[key], type_) for key, type_ in AFTER.items() if key in self.names]
        passthrough = cast(ColumnPassthrough, self.passthrough)
        return pa.schema([*before, *passthrough.fields(), *after])

    def to_json(self) -> dict[str, Any]:
        return {
            "version": 1,
            "format": self.format,
            "names": dict(self.names),
            "passthrough": self.passthrough.to_json(),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], inputs: InputSet) -> Self:
        """Rebuilds a pinned plan. Raises DriftError when the Parquet columns changed."""
        passthrough = passthrough_from_json(data["passthrough"], inputs.arrow_schema())
        return cls(data["format"], data["names"], passthrough)


def plan_output(
    inputs: InputSet,
    *,
    format: str = "parquet",
    columns: Sequence[str] | None = None,
    renames: Mapping[str, str] | None = None,
    include: Sequence[str] = INCLUDABLE,
) -> OutputPlan:
    """Decides the columns of the output; for JSONL input it reads the first 1,000 rows.

    Args:
        inputs: the input.
        format: `output.format`: parquet or jsonl.
        columns: `input.columns`: the columns that go through; None for all.
        renames: `output.columns`: our name to another.
        include: `output.include`; without `finish_reason` there is no `stop_reason` either.

    Raises:
        UsageError: an unknown name, something not supported, or an input column named like one of ours.
        InputError: the input cannot be read.
    """
    if format not in _FORMATS:
        raise UsageError(f"output.format: {format!r} is not supported; use {' or '.join(_FORMATS)}")
    names = _our_names(renames or {}, include)
    going = _going_through(inputs, columns, names)
    return OutputPlan(format, names, _passthrough(inputs, format, columns, names, going))


def _our_names(renames: Mapping[str, str], include: Sequence[str]) -> dict[str, str]:
    ours = [*BEFORE, *AFTER]
    for key in renames:
        if key not in ours:
            raise UsageError(f"output.columns: {key!r} is not a column of ours{_nearest(key, ours)}")
    for key in include:
        if key not in INCLUDABLE:
            later = "is not supported yet" if key in _LATER else "is not known"
            raise UsageError(f"output.include: {key!r} {later}; use any of {', '.join(INCLUDABLE)}")
    left_out = {key for key in INCLUDABLE if key not in include}
    if "finish_reason" in left_out:
        left_out.add("stop_reason")
    names = {key: renames.get(key, key) for key in ours if key not in left_out}
    for key, name in names.items():
        if list(names.values()).count(name) > 1:
            raise UsageError(f"output.columns: {key!r} becomes {name!r}, which is taken; choose another name")
    return names


def _going_through(
    inputs: InputSet, columns: Sequence[str] | None, names: Mapping[str, str]
) -> tuple[str, ...]:
    available = inputs.columns()
    for name in columns or ():
        if name not in available:
            seen = "" if inputs.format == "parquet" else f" in its first {WINDOW_ROWS:,} rows"
            raise UsageError(f"input.columns: no column {name!r}{seen}{_nearest(name, available)}")
    omitted = _omitted(inputs, names)
    chosen = available if columns is None else columns
    going = tuple(name for name in chosen if name not in omitted)
    for key, name in names.items():
        if name in going:
            raise UsageError(_collision(key, name, inputs))
    return going


def _omitted(inputs: InputSet, names: Mapping[str, str]) -> list[str]:
    """The id column is not written twice under one name: ours carries it already."""
    name = inputs.options.id_column or AUTO_COLUMN
    return [name] if name == names["id"] else []


def _collision(key: str, name: str, inputs: InputSet) -> str:
    other = f"batchgen_{key}"
    remedy = f"rename ours with output.columns: {{{key}: {other}}}"
    return f"input column {name!r} has the name of a column of the output; {remedy}"


def _passthrough(
    inputs: InputSet,
    format: str,
    columns: Sequence[str] | None,
    names: Mapping[str, str],
    going: Collection[str],
) -> Passthrough:
    schema = inputs.arrow_schema()
    if schema is not None:
        return arrow_passthrough(schema, going)
    extra = _free_name("extra", {*names.values(), *inputs.columns()})
    omitted = _omitted(inputs, names)
    if format == "jsonl":
        return VerbatimPassthrough(extra, list(names.values()), columns, omitted)
    return TypedPassthrough(decide_kinds(inputs.window(), going), extra, columns, omitted)


def _free_name(wanted: str, taken: Collection[str]) -> str:
    name, number = wanted, 1
    while name in taken:
        number += 1
        name = f"{wanted}_{number}"
    return name


def _nearest(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(known)}"


def result_arrays(
    plan: OutputPlan, rows: Sequence[Row], results: Sequence[RowResult]
) -> list[pa.ChunkedArray | pa.Array]:
    """Columns of a Parquet row group, in the order of `OutputPlan.schema`."""
    ours = [_our_values(result) for result in results]
    return [
        pa.array([row.ordinal for row in rows], pa.int64()),
        pa.array([row.id for row in rows], pa.string()),
        *cast(ColumnPassthrough, plan.passthrough).arrays(rows),
        *(
            pa.array([values[key] for values in ours], type_)
            for key, type_ in AFTER.items()
            if key in plan.names
        ),
    ]


def result_members(plan: OutputPlan, row: Row, result: RowResult) -> dict[str, Any]:
    """One JSONL record, in the order of a Parquet part; members that the row lacks stay absent."""
    ours = _our_values(result)
    return {
        plan.names["row"]: row.ordinal,
        plan.names["id"]: row.id,
        **cast(MemberPassthrough, plan.passthrough).members(row),
        **{plan.names[key]: ours[key] for key in AFTER if key in plan.names},
    }


def _our_values(result: RowResult) -> dict[str, Any]:
    error, usage = result.error, result.usage
    return {
        "generated_text": _clean(result.generated_text),
        "finish_reason": result.finish_reason,
        "stop_reason": _clean(result.stop_reason),
        "status": result.status,
        "error": error and {"class": error.error_class.value, "message": _clean(error.message)},
        "usage": usage and dict(zip(USAGE_TYPE.names, usage, strict=True)),
    }


def _clean(text: str | None) -> str | None:
    return text if text is None else clean_text(text)
