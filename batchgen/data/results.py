"""The columns of the output: ours, the user's, their names and order.

The job calls `plan_output` once, pins `OutputPlan.to_json()` in the manifest and rebuilds the plan from there
on every later start.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self, cast

import pyarrow as pa

from batchgen.data.identity import AUTO_COLUMN
from batchgen.data.passthrough import (
    ColumnPassthrough,
    NoPassthrough,
    Passthrough,
    TypedPassthrough,
    VerbatimPassthrough,
    arrow_passthrough,
    decide_kinds,
    declared_kinds,
    passthrough_from_json,
)
from batchgen.data.record_columns import (
    AFTER,
    BEFORE,
    LISTS_OF_SAMPLES,
    OF_DIALOGUES,
    USAGE_TYPE,
    USAGE_WITH_REASONING,
    vector_type,
)
from batchgen.data.row_result import INCLUDED, RowResult
from batchgen.data.source import WINDOW_ROWS, InputSet
from batchgen.data.task_columns import ALL_TASK_COLUMNS, ANSWER, TASK_COLUMNS
from batchgen.types import Task, UsageError

__all__ = ["DEFAULT_INCLUDE", "INCLUDABLE", "BatchLabels", "OutputPlan", "RowResult", "plan_output"]


INCLUDABLE = ("usage", "finish_reason", *(key for key in INCLUDED if key != "reasoning"))
DEFAULT_INCLUDE = ("usage", "finish_reason")
_FORMATS = ("parquet", "jsonl", "openai_batch")


@dataclass(frozen=True, slots=True)
class BatchLabels:
    """What lines of the format openai_batch say of their job.

    Args:
        identity: a short text that the same job always has; part of every id.
        model: its name.
        chat: whether answers are messages; else they are completions of a text.
    """

    identity: str
    model: str
    chat: bool


@dataclass(frozen=True, slots=True)
class OutputPlan:
    """What one record of the output looks like.

    Args:
        format: parquet, jsonl or openai_batch.
        names: our column to its name in the output; only those that are written.
        passthrough: the user's columns.
        batch: for openai_batch.
        dialogues: whether a row has several answers, so that `generated_text` is a list.
        embedding_size: of each vector; None where it is not known, or there are none.
        samples: how a row's samples are held, `list` or `explode`; None where each row has one.
        reasoning_tokens: whether usage has a member for them.
    """

    format: str
    names: Mapping[str, str]
    passthrough: Passthrough
    batch: BatchLabels | None = None
    dialogues: bool = False
    embedding_size: int | None = None
    samples: str | None = None
    reasoning_tokens: bool = False

    @property
    def usage_type(self) -> pa.StructType:
        """Of the column `usage`."""
        return USAGE_WITH_REASONING if self.reasoning_tokens else USAGE_TYPE

    def schema(self) -> pa.Schema:
        """Of a Parquet part: row, id, the user's columns, the rest of ours."""
        of_several = OF_DIALOGUES if self.dialogues else LISTS_OF_SAMPLES if self.samples == "list" else {}
        ours = {**AFTER, "embedding": vector_type(self.embedding_size), **of_several}
        ours["usage"] = self.usage_type
        before = [pa.field(self.names[key], type_) for key, type_ in BEFORE.items() if key in self.names]
        after = [pa.field(self.names[key], type_) for key, type_ in ours.items() if key in self.names]
        passthrough = cast(ColumnPassthrough, self.passthrough)
        return pa.schema([*before, *passthrough.fields(), *after])

    def to_json(self) -> dict[str, Any]:
        return {
            "version": 1,
            "format": self.format,
            "names": dict(self.names),
            "passthrough": self.passthrough.to_json(),
            "batch": None if self.batch is None else asdict(self.batch),
            "dialogues": self.dialogues,
            "embedding_size": self.embedding_size,
            "samples": self.samples,
            "reasoning_tokens": self.reasoning_tokens,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], inputs: InputSet) -> Self:
        """Rebuilds a pinned plan. Raises DriftError when the Parquet columns changed."""
        passthrough = passthrough_from_json(data["passthrough"], inputs.arrow_schema())
        batch = data.get("batch")
        labels = batch and BatchLabels(**batch)
        return cls(
            data["format"],
            data["names"],
            passthrough,
            labels,
            data.get("dialogues", False),
            data.get("embedding_size"),
            data.get("samples"),
            data.get("reasoning_tokens", False),
        )

    def notes(self) -> list[str]:
        """Names that only differ in case: allowed here, one column for many readers of Parquet."""
        if self.format != "parquet":
            return []
        seen: dict[str, str] = {}
        notes = []
        for name in self.schema().names:
            other = seen.setdefault(name.casefold(), name)
            if other != name:
                notes.append(
                    f"the output has the columns {other!r} and {name!r}, which Spark, Hive and other readers "
                    "that ignore case cannot tell apart; rename one of them (ours with output.columns)"
                )
        return notes


def plan_output(
    inputs: InputSet,
    *,
    format: str = "parquet",
    columns: Sequence[str] | None = None,
    renames: Mapping[str, str] | None = None,
    include: Sequence[str] = DEFAULT_INCLUDE,
    batch: BatchLabels | None = None,
    dialogues: bool = False,
    samples: str | None = None,
    reasoning: str | None = None,
    task: Task = Task.GENERATE,
    embedding_size: int | None = None,
) -> OutputPlan:
    """Decides the columns of the output; for JSONL input it reads the first 1,000 rows.

    Args:
        inputs: the input.
        format: `output.format`: parquet, jsonl or openai_batch.
        columns: `input.columns`: the columns that go through; None for all.
        renames: `output.columns`: our names to others, all distinct.
        include: `output.include`, of `INCLUDABLE`; without `finish_reason` there is no `stop_reason` either.
        batch: for openai_batch; None where nothing will be written.
        dialogues: whether rows have several answers (`sampling.turns`).
        samples: `output.samples`, where rows have several; else None.
        reasoning: the name of the column for what is split off answers (`sampling.reasoning.column`).
        task: decides in which columns results are given.
        embedding_size: numbers in each vector of `embed`, where it is known.

    Raises:
        UsageError: a column that the input or the format lacks, or an input column named like one of ours.
        InputError: the input cannot be read.
    """
    if format not in _FORMATS:
        raise ValueError(f"{format!r} is not a format; there are {', '.join(_FORMATS)}")
    if format == "openai_batch":
        return _plan_batch(columns, renames, include, batch, samples, reasoning)
    names = _our_names(renames or {}, include, samples, reasoning, task)
    going = _going_through(inputs, columns, names)
    passthrough = _passthrough(inputs, format, columns, names, going)
    return OutputPlan(
        format,
        names,
        passthrough,
        dialogues=dialogues,
        embedding_size=embedding_size,
        samples=samples,
        reasoning_tokens=reasoning is not None,
    )


def _plan_batch(
    columns: Sequence[str] | None,
    renames: Mapping[str, str] | None,
    include: Sequence[str],
    batch: BatchLabels | None,
    samples: str | None,
    reasoning: str | None,
) -> OutputPlan:
    """A format of its own: no columns of the user's, and none of ours can be left out or renamed."""
    given = {
        "input.columns": columns,
        "output.columns": renames,
        "output.include": set(include) - set(DEFAULT_INCLUDE),
    }
    for key, value in given.items():
        if value:
            raise UsageError(
                f"{key}: output.format: openai_batch has its own members and no place for others; "
                f"remove {key}, or use the format jsonl"
            )
    others = ("sample", *INCLUDED, *ALL_TASK_COLUMNS)
    names = {key: key for key in (*BEFORE, *AFTER) if key not in others}
    if reasoning is not None:
        names["reasoning"] = reasoning
    return OutputPlan(
        "openai_batch",
        names,
        NoPassthrough(),
        batch,
        samples=samples,
        reasoning_tokens=reasoning is not None,
    )


def _our_names(
    renames: Mapping[str, str],
    include: Sequence[str],
    samples: str | None,
    reasoning: str | None,
    task: Task,
) -> dict[str, str]:
    left_out = {key for key in (*INCLUDABLE, "reasoning") if key not in include}
    left_out |= set(ALL_TASK_COLUMNS) - set(TASK_COLUMNS[task])
    if task is not Task.GENERATE:
        left_out |= set(ANSWER)
    if "finish_reason" in left_out:
        left_out.add("stop_reason")
    if samples != "explode":
        left_out.add("sample")
    names = {key: renames.get(key, key) for key in (*BEFORE, *AFTER) if key not in left_out}
    for key in renames:
        if key not in names:
            column = "finish_reason" if key == "stop_reason" else key
            if key == "sample":
                raise UsageError(
                    "output.columns: 'sample' is written only of several samples with output.samples: "
                    "explode; leave it alone"
                )
            if key in ALL_TASK_COLUMNS or (key in ANSWER and task is not Task.GENERATE):
                raise UsageError(
                    f"output.columns: {key!r} is no column of task: {task}; remove it, or rename one of "
                    f"{', '.join(names)}"
                )
            raise UsageError(
                f"output.columns: {key!r} is not written; add {column} to output.include, or leave it alone"
            )
    if reasoning in names.values():
        raise UsageError(
            f"sampling.reasoning.column: {reasoning!r} is the name of another column of the output; "
            "choose another"
        )
    return names if reasoning is None else {**names, "reasoning": reasoning}


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
            raise _collision(key, name)
    return going


def _omitted(inputs: InputSet, names: Mapping[str, str]) -> list[str]:
    """The id column is not written twice under one name: ours carries it already."""
    name = inputs.options.id_column or AUTO_COLUMN
    return [name] if name == names["id"] else []


def _collision(key: str, name: str) -> UsageError:
    other = f"batchgen_{key}"
    if key == "reasoning":
        return UsageError(
            f"sampling.reasoning.column: {name!r} is a column of the input; use another, such as {other}"
        )
    return UsageError(
        f"output.columns: input column {name!r} has the name of a column of the output; "
        f"rename ours with output.columns: {{{key}: {other}}}"
    )


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
    kinds = declared_kinds(decide_kinds(inputs.window(), going), inputs.options.schema or {}, going)
    return TypedPassthrough(kinds, extra, columns, omitted)


def _free_name(wanted: str, taken: Collection[str]) -> str:
    name, number = wanted, 1
    while name in taken:
        number += 1
        name = f"{wanted}_{number}"
    return name


def _nearest(name: str, known: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {close[0]!r}?" if close else f"; there are {', '.join(known)}"
