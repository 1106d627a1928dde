"""`output` of a job file."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from batchgen.data.task_columns import ALL_TASK_COLUMNS
from batchgen.job.spec.hub_target import HUB, HubTarget
from batchgen.job.spec.section import Rule, Section
from batchgen.job.spec.values import COUNT, Auto, Count, Text, as_tuple, distinct

OUR_COLUMNS = (
    "row",
    "id",
    "sample",
    *ALL_TASK_COLUMNS,
    "generated_text",
    "finish_reason",
    "stop_reason",
    "status",
    "error",
    "usage",
    "prompt",
    "prompt_token_ids",
    "output_token_ids",
    "seed",
    "logprobs",
    "prompt_logprobs",
)
Included = Literal[
    "usage",
    "finish_reason",
    "prompt",
    "prompt_token_ids",
    "output_token_ids",
    "seed",
    "logprobs",
    "prompt_logprobs",
]


def _renames(value: dict[str, str]) -> dict[str, str]:
    final = [value.get(name, name) for name in OUR_COLUMNS]
    if not set(value) <= set(OUR_COLUMNS) or not all(value.values()) or len(set(final)) != len(final):
        raise ValueError("not a renaming of our columns")
    if any(not name.isprintable() for name in value.values()):
        raise ValueError("a name with characters that cannot be seen, or that no file can hold")
    return value


def _hub_target(value: Any) -> Any:
    return {"repo": value} if isinstance(value, str) else value


class OutputSpec(Section):
    """Where results go and what is in them."""

    path: Annotated[Text, Rule("a local folder, or one in an object store such as s3://bucket/results")]
    format: Annotated[Literal["parquet", "jsonl", "openai_batch"], Rule("parquet, jsonl or openai_batch")] = (
        "parquet"
    )
    compression: Annotated[
        Literal["zstd", "snappy", "gzip", "none"], Rule("zstd, gzip, none, or for Parquet also snappy")
    ] = "zstd"
    columns: Annotated[
        dict[str, str],
        AfterValidator(_renames),
        Rule(f"a map from {', '.join(OUR_COLUMNS)} to distinct new names"),
    ] = Field(default_factory=dict)
    include: Annotated[
        tuple[Included, ...],
        BeforeValidator(as_tuple),
        AfterValidator(distinct),
        Rule(
            "a list of usage, finish_reason, prompt, prompt_token_ids, output_token_ids, seed, logprobs and "
            "prompt_logprobs"
        ),
    ] = ("usage", "finish_reason")
    samples: Annotated[Literal["list", "explode"], Rule("list or explode")] = "list"
    part_rows: Annotated[Count | Auto, Rule(f"auto or {COUNT}")] = "auto"
    push_to_hub: Annotated[HubTarget | None, BeforeValidator(_hub_target), Rule(HUB)] = None
