"""`input` of a job file."""

from __future__ import annotations

import warnings
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from batchgen.data.declared_types import EXAMPLES, read_type
from batchgen.job.selection import Selection
from batchgen.job.spec.section import Rule, Section
from batchgen.job.spec.values import COUNT, Count, Text, Texts, as_tuple, distinct

# Our key has the name of a method that pydantic's models once had, and nothing here calls.
warnings.filterwarnings("ignore", 'Field name "schema" in "InputSpec" shadows')


def _paths(value: Any) -> Any:
    return (value,) if isinstance(value, str) else as_tuple(value)


def _type(value: Any) -> str:
    """A type in the spelling that the fingerprint and the readers know."""
    return str(read_type(value))


def _row_range(value: str) -> str:
    return Selection.of(value, None).rows


class InputSpec(Section):
    """Where the rows come from and what makes one bad."""

    path: Annotated[
        tuple[Text, ...],
        Field(min_length=1),
        BeforeValidator(_paths, json_schema_input_type=Text | Annotated[list[Text], Field(min_length=1)]),
        Rule("a file, a glob pattern, a URL, or a list of them"),
    ]
    format: Annotated[
        Literal["auto", "parquet", "jsonl", "json", "csv", "openai_batch"],
        Rule("auto, parquet, jsonl, json, csv or openai_batch"),
    ] = "auto"
    id: Annotated[Text, Rule("auto or the name of a column")] = "auto"
    duplicate_ids: Annotated[
        Literal["error", "suffix", "keep_first"], Rule("error, suffix or keep_first")
    ] = "error"
    columns: Annotated[
        Annotated[Texts, AfterValidator(distinct)] | None, Rule("null or a list of distinct column names")
    ] = None
    schema: Annotated[
        dict[Text, Annotated[str, BeforeValidator(_type, json_schema_input_type=Any)]] | None,
        Rule(f"null or a map from columns to types such as {EXAMPLES}"),
    ] = None  # type: ignore[assignment]
    where: Annotated[
        Text | None, Rule("null or a condition on columns such as lang = 'de' and score > 0.5")
    ] = None
    rows: Annotated[
        Annotated[str, AfterValidator(_row_range)] | None,
        Rule("null or a range of rows such as 0:1000, 500: or :500 (the row after the colon is not in it)"),
    ] = None
    dedupe: Annotated[Literal["none", "prompt"], Rule("none or prompt")] = "none"
    limit: Annotated[Count | None, Rule(f"null or {COUNT}")] = None
    shuffle: Annotated[
        Annotated[dict[Literal["seed"], Annotated[int, Field(ge=0, lt=2**63)]], Field(min_length=1)] | None,
        Rule("null or a seed, such as {seed: 0}"),
    ] = None
    grow: Annotated[Literal["refuse", "append"], Rule("refuse or append")] = "refuse"
    on_bad_row: Annotated[Literal["record", "stop"], Rule("record or stop")] = "record"
    on_truncated: Annotated[Literal["stop", "keep"], Rule("stop or keep")] = "stop"
    unicode: Annotated[Literal["error", "replace"], Rule("error or replace")] = "error"
    strict_json: Annotated[bool, Rule("true or false")] = False
