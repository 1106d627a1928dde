"""`run` of a job file."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from batchgen.job.gates import Gate
from batchgen.job.spec.section import Rule, Section
from batchgen.job.spec.values import (
    COUNT,
    DURATION,
    Address,
    Auto,
    Bytes,
    Count,
    PositiveSeconds,
    Seconds,
    Share,
    Text,
)


def _gates(value: dict[str, str] | None) -> dict[str, str] | None:
    for measure, condition in (value or {}).items():
        Gate.parse(measure, condition)
    return value


class RunSpec(Section):
    """How the job is driven; nothing here changes a result."""

    workers: Annotated[Auto | Count, Rule(f"auto or {COUNT}")] = "auto"
    priority: Annotated[Text | None, Rule("null or the name of a column of integers")] = None
    order: Annotated[Literal["prefix", "length", "input"], Rule("prefix, length or input")] = "prefix"
    checkpoint_seconds: Annotated[PositiveSeconds, Rule(DURATION)] = 5.0
    row_timeout: Annotated[PositiveSeconds | None, Rule(f"null or {DURATION}")] = None
    poison: Annotated[Literal["bisect", "off"], Rule("bisect or off")] = "bisect"
    lease_seconds: Annotated[PositiveSeconds, Rule(DURATION)] = 60.0
    max_errors: Annotated[
        Annotated[int | float, Share] | None,
        Rule("null, a count of rows such as 10, or a share such as 0.05 or 5%"),
    ] = None
    gates: Annotated[
        dict[str, str] | None,
        AfterValidator(_gates),
        Rule(
            'a map such as {finish_reason.length: "<= 5%", error: "< 1%", error.timeout: "<= 3"} from ok, '
            "error, skipped, finish_reason.REASON or error.CLASS to a count or share of rows"
        ),
    ] = None
    fail_fast: Annotated[bool, Rule("true or false")] = False
    max_time: Annotated[PositiveSeconds | None, Rule(f"null or {DURATION}")] = None
    grace: Annotated[Seconds, Rule(DURATION)] = 20.0
    min_free_disk: Annotated[Bytes, Rule("a size such as 1GB or 500MiB, or bytes")] = 1_000_000_000
    progress: Annotated[
        Literal["auto", "bar", "plain", "json", "none"], Rule("auto, bar, plain, json or none")
    ] = "auto"
    metrics: Annotated[
        Address | None,
        Rule("null, a port of this machine such as 9400, or host:port such as 0.0.0.0:9400"),
    ] = None
    cost: Annotated[
        Annotated[dict[Literal["gpu_hour"], Annotated[float, Field(ge=0)]], Field(min_length=1)] | None,
        Rule("null or a price of 0 or more, such as {gpu_hour: 2.50}"),
    ] = None
