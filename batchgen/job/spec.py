"""The job file as frozen models: every key that this version implements, with what it allows.

`load_job` makes a `JobSpec`; the supervisor, `validate` and `show` read it. A key that the job file's
format knows but this version does not implement is listed in `unavailable.py`, not here.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field

from batchgen.data.declared_types import EXAMPLES, read_type
from batchgen.data.task_columns import ALL_TASK_COLUMNS
from batchgen.data.urls import is_url
from batchgen.job.faults import KeyPath, Origin
from batchgen.job.gates import Gate
from batchgen.job.object_store import working_copy
from batchgen.job.selection import Selection
from batchgen.job.units import parse_address, parse_duration, parse_share, parse_size
from batchgen.types import MOST_LOGPROBS

PART_ROWS = 1000
FEWEST_PART_ROWS = 16
PART_OUTPUT_TOKENS = 256 * 1024
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
_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


@dataclass(frozen=True, slots=True)
class Rule:
    """What a key allows, in words, and which values a later version will allow."""

    allowed: str
    later: Container[Any] = ()


class Section(BaseModel):
    """Base of the sections: frozen, no unknown keys, no silent conversion of types."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, hide_input_in_errors=True
    )


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _paths(value: Any) -> Any:
    return (value,) if isinstance(value, str) else _tuple(value)


def _dtype(value: Any) -> Any:
    return _DTYPES.get(value, value) if isinstance(value, str) else value


def _positive(value: float) -> float:
    if not value > 0:
        raise ValueError("must be above 0")
    return value


def _not_negative(value: float) -> float:
    if value < 0:
        raise ValueError("must be 0 or more")
    return value


def _distinct(value: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(value)) != len(value):
        raise ValueError("given twice")
    return value


def _portable(value: dict[str, Any]) -> dict[str, Any]:
    """What can be hashed as JSON and sent to a worker: no NaN, no lone surrogate, no endless integer."""
    json.dumps(value, allow_nan=False, ensure_ascii=False).encode()
    if not _fits(value):
        raise ValueError("an integer of more than 64 bits")
    return value


def _portable_all(value: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
    return tuple(map(_portable, value))


def _fits(value: Any) -> bool:
    if isinstance(value, dict | list):
        return all(map(_fits, value.values() if isinstance(value, dict) else value))
    return not isinstance(value, int) or -(2**63) <= value < 2**63


def _renames(value: dict[str, str]) -> dict[str, str]:
    final = [value.get(name, name) for name in OUR_COLUMNS]
    if not set(value) <= set(OUR_COLUMNS) or not all(value.values()) or len(set(final)) != len(final):
        raise ValueError("not a renaming of our columns")
    if any(not name.isprintable() for name in value.values()):
        raise ValueError("a name with characters that cannot be seen, or that no file can hold")
    return value


def _type(value: Any) -> str:
    """A type in the spelling that the fingerprint and the readers know."""
    return str(read_type(value))


def _row_range(value: str) -> str:
    return Selection.of(value, None).rows


def _gates(value: dict[str, str] | None) -> dict[str, str] | None:
    for measure, condition in (value or {}).items():
        Gate.parse(measure, condition)
    return value


Text = Annotated[str, Field(min_length=1)]
Texts = Annotated[tuple[Text, ...], BeforeValidator(_tuple)]
TokenIds = Annotated[tuple[Annotated[int, Field(ge=0, lt=2**62)], ...], BeforeValidator(_tuple)]
# Keys of a map are strings in YAML and JSON alike.
TokenId = Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,17})$")]
# What a job file may hold where something else is kept; the schema for editors is made from these.
Duration = BeforeValidator(
    parse_duration, json_schema_input_type=float | Annotated[str, Field(pattern=r"\d")]
)
Size = BeforeValidator(parse_size, json_schema_input_type=int | Annotated[str, Field(pattern=r"^\s*\d")])
Share = BeforeValidator(parse_share, json_schema_input_type=float | Annotated[str, Field(pattern=r"\d ?%$")])
Seconds = Annotated[float, Duration, AfterValidator(_not_negative)]
PositiveSeconds = Annotated[float, Duration, AfterValidator(_positive)]
Bytes = Annotated[int, Size, AfterValidator(_not_negative)]
PositiveBytes = Annotated[int, Size, AfterValidator(_positive)]
Count = Annotated[int, Field(ge=1, lt=2**62)]
Auto = Literal["auto"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16", "fp32", "bf16", "fp16"]
KVDtypeName = DtypeName | Literal["int8"]
COUNT = "a whole number of 1 or more"
DURATION = "a duration such as 20s, 5m or 1h30m, or seconds"


class ModelSpec(Section):
    """Which model, and the numeric choices about it."""

    path: Annotated[Text, Rule("a hub id such as org/name, a local folder, or a .gguf file")]
    revision: Annotated[Text | None, Rule("null, or a branch, tag or commit of a hub id")] = None
    tokenizer: Annotated[Text | None, Rule("null, a folder or a hub id")] = None
    allow_pickle: Annotated[bool, Rule("true or false")] = False
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        BeforeValidator(_dtype, json_schema_input_type=DtypeName),
        Rule("auto, float32, bfloat16 or float16"),
    ] = "auto"
    max_model_len: Annotated[Count | None, Rule(f"null or {COUNT}")] = None
    generation_defaults: Annotated[Literal["model", "none"], Rule("model or none")] = "model"


# Our key has the name of a method that pydantic's models once had, and nothing here calls.
warnings.filterwarnings("ignore", 'Field name "schema" in "InputSpec" shadows')


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
        Annotated[Texts, AfterValidator(_distinct)] | None, Rule("null or a list of distinct column names")
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


class PromptSection(Section):
    """From a row's columns to the text that the model continues."""

    mode: Annotated[Literal["chat", "completion", "tokens"], Rule("chat, completion or tokens")] = "chat"
    messages: Annotated[Text | None, Rule("null or the name of a column")] = None
    system: Annotated[str | None, Rule("null or a text")] = None
    user: Annotated[Text | None, Rule("null or a template")] = None
    continuation: Annotated[Text | None, Rule("null or a template")] = None
    assistant_prefix: Annotated[Text | None, Rule("null or a text")] = None
    chat_template: Annotated[
        Text | None, Rule("null, a file, a template, or the name of one of the tokenizer's")
    ] = None
    chat_template_kwargs: Annotated[
        dict[str, Any], AfterValidator(_portable), Rule("a map of names to values that JSON knows")
    ] = Field(default_factory=dict)
    system_fallback: Annotated[Literal["error", "prepend_to_user"], Rule("error or prepend_to_user")] = (
        "error"
    )
    tools: Annotated[
        Text
        | Annotated[tuple[dict[str, Any], ...], BeforeValidator(_tuple), AfterValidator(_portable_all)]
        | None,
        Rule("null, the name of a column, or a list of tools, each a map that JSON knows"),
    ] = None
    bos: Annotated[Auto, Rule("auto")] = "auto"
    special_tokens_in_content: Annotated[
        Literal["escape", "allow", "error"], Rule("escape, allow or error")
    ] = "escape"
    overflow: Annotated[
        Literal["error", "skip", "truncate_left", "truncate_right", "truncate_middle"],
        Rule("error, skip, truncate_left, truncate_right or truncate_middle"),
    ] = "error"


class ReasoningSpec(Section):
    """What a model writes before its answer, between two marks, gets a column of its own."""

    start: Annotated[Text, Rule("the mark as the model writes it")] = "<think>"
    end: Annotated[Text, Rule("the mark as the model writes it")] = "</think>"
    column: Annotated[Text, Rule("a name for the column")] = "reasoning"


class SamplingSection(Section):
    """How each row is decoded; null takes the model's own default, else the neutral value."""

    temperature: Annotated[
        Annotated[float, Field(ge=0)] | None, Rule("null, 0 (greedy) or a larger number")
    ] = None
    top_p: Annotated[
        Annotated[float, Field(gt=0, le=1)] | None, Rule("null or a number above 0 and up to 1")
    ] = None
    top_k: Annotated[Annotated[int, Field(ge=0)] | None, Rule("null, 0 (off) or a positive whole number")] = (
        None
    )
    min_p: Annotated[Annotated[float, Field(ge=0, le=1)] | None, Rule("null or a number from 0 to 1")] = None
    max_tokens: Annotated[Count, Rule(COUNT)] = 256
    min_tokens: Annotated[int, Field(ge=0), Rule("a whole number from 0 to max_tokens")] = 0
    n: Annotated[Count, Rule(COUNT)] = 1
    stop: Annotated[Texts, Rule("a list of non-empty strings")] = ()
    stop_token_ids: Annotated[TokenIds, Rule("a list of token ids of 0 or more")] = ()
    seed: Annotated[int, Field(ge=0, lt=2**63), Rule("a whole number from 0 to 2**63 - 1")] = 0
    logprobs: Annotated[
        Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None,
        Rule(f"null or a number from 0 to {MOST_LOGPROBS}"),
    ] = None
    presence_penalty: Annotated[Annotated[float, Field(ge=-2, le=2)], Rule("a number from -2 to 2")] = 0.0
    frequency_penalty: Annotated[Annotated[float, Field(ge=-2, le=2)], Rule("a number from -2 to 2")] = 0.0
    repetition_penalty: Annotated[
        Annotated[float, Field(gt=0)] | None, Rule("null or a number above 0, 1 for none")
    ] = None
    logit_bias: Annotated[
        dict[TokenId, Annotated[float, Field(ge=-100, le=100)]],
        Rule("a map from token ids to numbers from -100 to 100, such as {50256: -100}"),
    ] = Field(default_factory=dict)
    bad_words: Annotated[Texts, Rule("a list of non-empty strings")] = ()
    allowed_token_ids: Annotated[TokenIds, Rule("a list of token ids of 0 or more; empty for all")] = ()
    ignore_eos: Annotated[bool, Rule("true or false")] = False
    prompt_logprobs: Annotated[
        Annotated[int, Field(ge=0, le=MOST_LOGPROBS)] | None,
        Rule(f"null or a whole number from 0 to {MOST_LOGPROBS}"),
    ] = None
    per_row: Annotated[Text | None, Rule("null or the name of a column")] = None
    reasoning: Annotated[
        ReasoningSpec | None, Rule("null or a map of start, end and column, each a text that is not empty")
    ] = None
    turns: Annotated[Text | None, Rule("null or the name of a column")] = None

    @property
    def reasoning_column(self) -> str | None:
        """Of the output; None where nothing is split off."""
        return None if self.reasoning is None else self.reasoning.column


class EmbeddingSection(Section):
    """How `task: embed` makes one vector of the hidden states of a prompt."""

    pooling: Annotated[Literal["auto", "last", "mean"], Rule("auto, last or mean")] = "auto"
    normalize: Annotated[bool, Rule("true or false")] = True


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


REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def _hub_target(value: Any) -> Any:
    return {"repo": value} if isinstance(value, str) else value


def _repository(value: str) -> str:
    if not REPOSITORY.fullmatch(value) or len(value) > 96 or "--" in value or ".." in value:
        raise ValueError("not the name of a data set")
    return value


def _path_in_repo(value: str) -> str:
    parts = value.split("/")
    if not value.isprintable() or any(part in ("", ".", "..") for part in parts):
        raise ValueError("not a relative path without . and ..")
    return value


class HubTarget(Section):
    """Where results are pushed when the job is complete: a data set of the Hugging Face hub."""

    repo: Annotated[str, AfterValidator(_repository), Rule("a data set such as org/name")]
    private: Annotated[bool, Rule("true or false")] = True
    path_in_repo: Annotated[Text, AfterValidator(_path_in_repo), Rule("a folder such as data")] = "data"
    revision: Annotated[Text | None, Rule("null or a branch that exists")] = None


HUB = "null, a data set such as org/name, or a map of repo, private, path_in_repo and revision"


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
        BeforeValidator(_tuple),
        AfterValidator(_distinct),
        Rule(
            "a list of usage, finish_reason, prompt, prompt_token_ids, output_token_ids, seed, logprobs and "
            "prompt_logprobs"
        ),
    ] = ("usage", "finish_reason")
    samples: Annotated[Literal["list", "explode"], Rule("list or explode")] = "list"
    part_rows: Annotated[Count | Auto, Rule(f"auto or {COUNT}")] = "auto"
    push_to_hub: Annotated[HubTarget | None, BeforeValidator(_hub_target), Rule(HUB)] = None


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
        Annotated[str, BeforeValidator(parse_address)] | None,
        Rule("null, a port of this machine such as 9400, or host:port such as 0.0.0.0:9400"),
    ] = None
    cost: Annotated[
        Annotated[dict[Literal["gpu_hour"], Annotated[float, Field(ge=0)]], Field(min_length=1)] | None,
        Rule("null or a price of 0 or more, such as {gpu_hour: 2.50}"),
    ] = None


class EngineSpec(Section):
    """How the engine runs; only `kv_cache_dtype` blocks a resume."""

    device: Annotated[Literal["auto", "cpu"], Rule("auto or cpu", later=("cuda", "gpu"))] = "auto"
    attention: Annotated[
        Literal["auto", "cpu", "reference"],
        Rule("auto, cpu or reference", later=("triton", "flash_attn")),
    ] = "auto"
    max_num_batched_tokens: Annotated[Count | Auto, Rule(f"auto or {COUNT}")] = "auto"
    max_num_seqs: Annotated[Count | Auto, Rule(f"auto or {COUNT}")] = "auto"
    block_size: Annotated[Count | Auto, Rule(f"auto or {COUNT}")] = "auto"
    kv_cache_memory: Annotated[Auto | PositiveBytes, Rule("auto or a size such as 4GB")] = "auto"
    kv_cache_dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16", "int8"],
        BeforeValidator(_dtype, json_schema_input_type=KVDtypeName),
        Rule("auto, float32, bfloat16, float16 or int8"),
    ] = "auto"
    prefix_caching: Annotated[bool, Rule("true or false")] = True
    deterministic: Annotated[Auto | bool, Rule("auto, true or false")] = "auto"


Name = Annotated[Text | None, Rule("null or up to 64 letters, digits, dots, dashes and underscores")]


def _name(value: str | None) -> str | None:
    if value is not None and not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", value):
        raise ValueError("not a name")
    return value


class TopSpec(Section):
    """The keys that stand outside any section; `JobSpec` takes them over."""

    version: Annotated[int, Field(ge=1, le=1), Rule("1")] = 1
    name: Annotated[Name, AfterValidator(_name)] = None
    task: Annotated[
        Literal["generate", "loglikelihood", "perplexity", "embed", "classify"],
        Rule("generate, loglikelihood, perplexity, embed or classify"),
    ] = "generate"


SECTIONS: Mapping[str, type[Section]] = {
    "model": ModelSpec,
    "input": InputSpec,
    "prompt": PromptSection,
    "sampling": SamplingSection,
    "embedding": EmbeddingSection,
    "output": OutputSpec,
    "run": RunSpec,
    "engine": EngineSpec,
}
REQUIRED = ("model", "input", "output")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """A valid job: paths are absolute, the chat template is text, durations are seconds, sizes bytes.

    Args:
        source: the job file.
        notes: sentences for the user.
        redacted: per key path, what a copy shows instead of a string that came from the environment.
        places: per key path, where it was given; a key that is not here has its default.
        faulty: key paths with faults, of a job that is only checked; empty for one that may run.
    """

    version: int
    name: str | None
    task: str
    model: ModelSpec
    input: InputSpec
    prompt: PromptSection
    sampling: SamplingSection
    embedding: EmbeddingSection
    output: OutputSpec
    run: RunSpec
    engine: EngineSpec
    source: Path
    notes: tuple[str, ...] = ()
    redacted: Mapping[KeyPath, str] = field(default_factory=dict)
    places: Mapping[KeyPath, Origin] = field(default_factory=dict, repr=False)
    faulty: frozenset[KeyPath] = frozenset()

    def sound(self, *keys: str) -> bool:
        """Whether none of these keys or sections, nor anything in or around them, has a fault."""
        wanted = [tuple(key.split(".")) for key in keys]
        return not any(a[: len(b)] == b or b[: len(a)] == a for a in wanted for b in self.faulty)

    def place(self, key: KeyPath) -> Origin | None:
        """Where `key`, or what it is in, was given; None where neither was."""
        given = (self.places.get(key[:n]) for n in range(len(key), 0, -1))
        return next((origin for origin in given if origin is not None), None)

    @property
    def samples(self) -> Literal["list", "explode"] | None:
        """How the output holds the samples of a row; None where each row has one."""
        return self.output.samples if self.sampling.n > 1 else None

    @property
    def output_folder(self) -> Path:
        """The folder that the job owns; of one in an object store, the copy on this machine."""
        path = self.output.path
        return working_copy(path) if is_url(path) else Path(path)

    @property
    def output_url(self) -> str | None:
        """Of an output folder in an object store."""
        return self.output.path if is_url(self.output.path) else None


def part_rows_auto(spec: JobSpec) -> int:
    """Rows in one part: what the job says, else 1,000, fewer where `max_tokens` times `n` is large.

    A function of the job alone, so that parts are the same on every machine. About a quarter of a million
    output tokens at most, so that parts of long answers still appear while the job runs.
    """
    if spec.output.part_rows != "auto":
        return spec.output.part_rows
    return max(
        FEWEST_PART_ROWS, min(PART_ROWS, PART_OUTPUT_TOKENS // (spec.sampling.max_tokens * spec.sampling.n))
    )
