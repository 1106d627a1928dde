"""The nouns that every part of batchgen takes and returns. Standard library only.

`SamplingParams` says how to generate, `Request` is one row in the engine, `Output` is what
comes back. A fault of one row is data (`RowError`); a fault of the job is one of the
exceptions below, and each knows its exit code.
"""

from __future__ import annotations

import enum
import math
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from batchgen.scores import Classification, Pooling, Scoring, TokenLogprob, TokenScores

MOST_LOGPROBS = 100
"""Most likeliest tokens that are kept beside a token."""


class Status(enum.StrEnum):
    """What became of a row."""

    OK = "ok"
    ERROR = "error"
    SKIPPED = "skipped"


class FinishReason(enum.StrEnum):
    """Why generation ended: a stop condition, the length limit, or an abort."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


class ErrorClass(enum.StrEnum):
    """The closed list of what can be wrong with one row."""

    INVALID_JSON = "invalid_json"
    INVALID_CSV = "invalid_csv"
    INVALID_UNICODE = "invalid_unicode"
    NUMBER_OUT_OF_RANGE = "number_out_of_range"
    MISSING_COLUMN = "missing_column"
    NULL_PROMPT = "null_prompt"
    EMPTY_PROMPT = "empty_prompt"
    TEMPLATE = "template"
    INVALID_TOOLS = "invalid_tools"
    INVALID_PARAM = "invalid_param"
    CONTEXT_LENGTH = "context_length"
    STRUCTURED_SCHEMA = "structured_schema"
    STRUCTURED_UNSATISFIED = "structured_unsatisfied"
    NONFINITE = "nonfinite"
    TIMEOUT = "timeout"
    ENGINE_OOM = "engine_oom"
    ENGINE_CRASH = "engine_crash"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class RowError:
    """Why a row has no result. `message` is a function of the row alone.

    `status` is `skipped` where the job asked for rows like this one to be left out.
    """

    error_class: ErrorClass
    message: str
    status: Status = Status.ERROR


class RowFailure(Exception):
    """Raised while one row is read or rendered; becomes that row's `RowError`."""

    def __init__(self, error_class: ErrorClass, message: str, status: Status = Status.ERROR) -> None:
        super().__init__(message)
        self.error = RowError(error_class, message, status)


class BatchgenError(Exception):
    """Ends the job. `exit_code` is what the process returns."""

    exit_code: ClassVar[int] = 1


class UsageError(BatchgenError):
    """A wrong command line, job file or model; found before any weights are loaded where possible."""

    exit_code = 2


class InputError(BatchgenError):
    """An input file is missing, unreadable, corrupt, or changed since the job began."""

    exit_code = 3


class DriftError(BatchgenError):
    """The job differs from the one that the output folder belongs to."""

    exit_code = 4


class StorageError(BatchgenError):
    """The output folder cannot be written: space, permission, quota, failing disk."""

    exit_code = 5


class OwnershipError(BatchgenError):
    """Another live process owns the output folder."""

    exit_code = 6


class EngineError(BatchgenError):
    """The engine or the hardware failed and retrying did not help."""

    exit_code = 7


class StoppedError(BatchgenError):
    """A signal or a time limit ended the run early; the same call continues it."""

    exit_code = 75


LogitsProcessor = Callable[[list[int], Any], Any]
"""(token ids of prompt and output so far, logits `(V,)` float32 tensor) -> logits of the same shape.

The tensor may be changed in place. Only what is returned counts, and it must be a function of the arguments:
a token may be computed again, and rows come in any order.
"""


@dataclass(frozen=True, slots=True)
class Reasoning:
    """The marks between which a model reasons before it answers, as it writes them."""

    start: str = "<think>"
    end: str = "</think>"

    def __post_init__(self) -> None:
        if not self.start or not self.end:
            raise ValueError("sampling.reasoning: an empty mark is not allowed; use two texts")


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How one request is decoded.

    The settings are applied in this order: allowed_token_ids, bad_words, min_tokens, logit_bias, the three
    penalties, logits_processors, then temperature, min_p, top_k, top_p.

    Args:
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_p: keep the smallest set of tokens with at least this probability mass, in (0, 1].
        top_k: keep the k likeliest tokens; 0 keeps all.
        min_p: drop tokens less likely than this share of the likeliest one, in [0, 1].
        max_tokens: most tokens to generate, clipped to what fits the context.
        min_tokens: no end of sequence and no stop condition before this many tokens.
        n: samples of each prompt, drawn independently; more than 1 only where temperature is above 0.
        stop: strings that end generation; the text is cut before the one that completes first.
        stop_token_ids: token ids that end generation; not part of the text.
        seed: sampling noise is a function of (seed, row, sample, position) alone.
        ignore_eos: go on after the model's end-of-sequence token.
        presence_penalty: subtracted from the logits of tokens in the output, in [-2, 2].
        frequency_penalty: the same, times how often the token is in the output.
        repetition_penalty: above 0; logits of tokens in prompt or output are divided by it where positive,
            else multiplied.
        logit_bias: token id to a number from -100 to 100 that is added to its logits.
        bad_words: texts that are not to be written, however they begin: with or without a space before.
        allowed_token_ids: only these may be drawn, the end of sequence too only if it is here; empty for all.
        logits_processors: functions of the caller's, see `LogitsProcessor`; not in a job file.
        logprobs: score the tokens of the answer, each with this many of the likeliest beside it, by the
            model's own logits, before any of the settings above. None for no scores.
        prompt_logprobs: score the prompt's own tokens, each with this many of the likeliest beside it; such a
            prompt is computed in full, whatever the prefix cache holds. None for no scores.
        reasoning: marks of what is split off the text; stop conditions hold for both parts.

    Raises:
        ValueError: names the field, the value and what is allowed.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int = 256
    min_tokens: int = 0
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    ignore_eos: bool = False
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    logits_processors: tuple[LogitsProcessor, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    reasoning: Reasoning | None = None

    def __post_init__(self) -> None:
        def require(ok: bool, name: str, allowed: str) -> None:
            if not ok:
                raise ValueError(f"sampling.{name}: {getattr(self, name)!r} is not allowed; use {allowed}")

        require(math.isfinite(self.temperature) and self.temperature >= 0, "temperature", "0 or more")
        require(0 < self.top_p <= 1, "top_p", "a number above 0 and up to 1")
        require(self.top_k >= 0, "top_k", "0 (off) or a positive integer")
        require(0 <= self.min_p <= 1, "min_p", "a number from 0 to 1")
        require(self.max_tokens >= 1, "max_tokens", "1 or more")
        require(0 <= self.min_tokens <= self.max_tokens, "min_tokens", "a number from 0 to max_tokens")
        require(self.n >= 1, "n", "1 or more")
        require(self.n == 1 or not self.greedy, "n", "1 with temperature 0, where all samples would be equal")
        require(all(self.stop), "stop", "non-empty strings")
        require(all(t >= 0 for t in self.stop_token_ids), "stop_token_ids", "token ids of 0 or more")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            allowed = f"null or a number from 0 to {MOST_LOGPROBS}"
            require(count is None or 0 <= count <= MOST_LOGPROBS, name, allowed)
        require(0 <= self.seed < 2**63, "seed", "an integer from 0 to 2**63 - 1")
        for name in ("presence_penalty", "frequency_penalty"):
            require(-2 <= getattr(self, name) <= 2, name, "a number from -2 to 2")
        factor = self.repetition_penalty
        require(math.isfinite(factor) and factor > 0, "repetition_penalty", "a number above 0")
        require(
            all(t >= 0 and -100 <= bias <= 100 for t, bias in self.logit_bias.items()),
            "logit_bias",
            "a map from token ids of 0 or more to numbers from -100 to 100",
        )
        require(all(map(_is_text, self.bad_words)), "bad_words", "non-empty strings of valid Unicode")
        require(all(t >= 0 for t in self.allowed_token_ids), "allowed_token_ids", "token ids of 0 or more")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature < 1e-5


class Task(enum.StrEnum):
    """What is computed for a row."""

    GENERATE = "generate"
    LOGLIKELIHOOD = "loglikelihood"
    PERPLEXITY = "perplexity"
    EMBED = "embed"
    CLASSIFY = "classify"


def _is_text(value: str) -> bool:
    """Whether it has characters, and a tokenizer can take it: no half of a surrogate pair."""
    try:
        return len(value.encode()) > 0
    except UnicodeEncodeError:
        return False


class RequestState(enum.Enum):
    """Where a request is; it is in exactly one place of the scheduler at any time."""

    WAITING = enum.auto()
    RUNNING = enum.auto()
    PREEMPTED = enum.auto()
    FINISHED = enum.auto()


CacheKey = tuple[int, tuple[str | int | bytes, ...]]
"""(position, tagged values): what besides the token ids decides keys and values from that position on."""


@dataclass(slots=True, eq=False)
class Request:
    """One row in the engine, or one of its samples. The scheduler owns every field from `state` on.

    The engine counts in `num_read` at how many positions logits or hidden states have been read: what was
    read is kept when the request is preempted.

    Args:
        request_id: the row's ordinal, which is also its key for sampling noise; a sample after the row's
            first has any other number that is not in use.
        prompt_token_ids: never empty.
        sampling: how to decode.
        output_token_ids: generated so far; a resumed row starts with what was journalled.
        priority: higher runs first.
        cache_keys: what else decides keys and values, such as (0, ("lora", name, path)), (0, ("salt", text))
            or (first position of an image, ("image", digest)); rows share cache only where these agree.
        control_tokens: how many the row's own text spelled; for the report.
        truncated_tokens: how many the prompt has less than the whole row would have had.
        task: a request that does not generate ends when its prompt is computed.
        scoring: tokens whose logprobs are wanted.
        pooling: how its hidden states become a vector; for `embed` and `classify`.
        normalize: whether that vector gets length 1.
        following: further pieces of one row, computed after this one under its id; their scores come after
            its own.
        fork_token_ids: generated so far for the row's other samples; empty for a new row.
        sample: which of the row's samples this is, from 0.
        first: the row's first sample, where this is another.
        num_forks: samples that will be forked off once the tokens known now are computed.
        num_pending: tokens, 0 or 1, that a step under way samples, where another was decided after it.
    """

    request_id: int
    prompt_token_ids: list[int]
    sampling: SamplingParams
    output_token_ids: list[int] = field(default_factory=list)
    priority: int = 0
    cache_keys: tuple[CacheKey, ...] = ()
    control_tokens: int = 0
    truncated_tokens: int = 0
    task: Task = Task.GENERATE
    scoring: Scoring | None = None
    pooling: Pooling | None = None
    normalize: bool = False
    following: tuple[Request, ...] = ()
    fork_token_ids: list[list[int]] = field(default_factory=list)
    sample: int = 0
    first: Request | None = None
    num_forks: int = 0
    num_read: int = 0
    state: RequestState = RequestState.WAITING
    sequence_number: int = -1
    num_computed_tokens: int = 0
    num_pending: int = 0
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    block_hashes: list[bytes] = field(default_factory=list)

    @property
    def row(self) -> int:
        """The row's ordinal."""
        return self.request_id if self.first is None else self.first.request_id

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens known so far."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def num_expected(self) -> int:
        """`num_tokens`, and the one that is pending."""
        return self.num_tokens + self.num_pending

    @property
    def generates(self) -> bool:
        """Whether tokens are sampled after the prompt."""
        return self.task is Task.GENERATE

    @property
    def first_needed(self) -> int:
        """The first position whose logits or hidden state are still to be read; no prefix hit covers it."""
        last = self.num_tokens - 1
        if self.scoring is not None and self.num_read < len(self.scoring.targets):
            return min(last, self.scoring.first + self.num_read)
        if self.pooling is Pooling.MEAN:
            return min(last, self.num_read)
        return last

    @property
    def is_read(self) -> bool:
        """Whether any position is read for a task."""
        return self.scoring is not None or self.pooling is not None

    def reads(self, start: int, stop: int) -> range:
        """Positions from `start` to `stop` (exclusive), computed in one step, that are read for a task."""
        if self.scoring is not None:
            return range(max(start, self.scoring.first + self.num_read), min(stop, self.scoring.stop))
        return range(0) if self.pooling is None else range(max(start, self.first_needed), stop)

    @property
    def max_total_tokens(self) -> int:
        """Most tokens whose keys and values this request can ever need in the cache."""
        if not self.generates:
            return len(self.prompt_token_ids)
        return len(self.prompt_token_ids) + max(self.sampling.max_tokens, len(self.output_token_ids) + 1) - 1

    def token(self, position: int) -> int:
        """Token id of a position over prompt and output."""
        n = len(self.prompt_token_ids)
        return self.prompt_token_ids[position] if position < n else self.output_token_ids[position - n]

    def tokens(self, start: int, stop: int) -> list[int]:
        """Token ids of positions `start` to `stop` (exclusive) over prompt and output."""
        n = len(self.prompt_token_ids)
        if stop <= n:
            return self.prompt_token_ids[start:stop]
        if start >= n:
            return self.output_token_ids[start - n : stop - n]
        return self.prompt_token_ids[start:] + self.output_token_ids[: stop - n]


@dataclass(slots=True)
class Sample:
    """One of the answers to a request.

    `token_ids` and `text` are cut at the stop condition, both at the same place; neither holds the
    end-of-sequence or stop token. `reasoning` was split off `text`, if that was asked for and there was any;
    `token_ids` are those of both, and `reasoning_tokens` says how many of them, the first ones, are the
    reasoning's. `scores` are those of `token_ids`, if they were asked for.
    """

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    reasoning: str | None = None
    scores: TokenScores | None = None
    reasoning_tokens: int = 0

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        """Of each of `token_ids`; None where they were not asked for."""
        return None if self.scores is None else self.scores.tokens()


@dataclass(slots=True)
class Output:
    """The end of one request.

    `samples` holds as many answers as were asked for, and none where there is an error; `text`, `token_ids`,
    `finish_reason`, `stop_reason` and `logprobs` are those of the first. `completion_tokens` counts every
    token sampled for any of them, the end-of-sequence and stop tokens included; of these `reasoning_tokens`
    are those of what was split off as reasoning, with its marks.
    `queue_seconds` passed from the request's arrival to its first step, `prefill_seconds` from there to its
    first token in this process, `decode_seconds` from there to its end;
    `control_tokens` is how many its own text spelled. `turns` holds the answer of each turn of a dialogue;
    `samples` is then of the last, with the tokens of all. `scores` are those of the tokens that a request
    asks for; `embedding` (`(hidden,)` float32) and `classification` come of tasks of these names.
    """

    request_id: int
    samples: tuple[Sample, ...] = ()
    prompt_tokens: int = 0
    completion_tokens: int = 0
    truncated_tokens: int = 0
    reasoning_tokens: int = 0
    cached_tokens: int = 0
    preemptions: int = 0
    queue_seconds: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    control_tokens: int = 0
    turns: tuple[Sample, ...] = ()
    scores: TokenScores | None = None
    embedding: array[float] | None = None
    classification: Classification | None = None
    error: RowError | None = None

    @property
    def ok(self) -> bool:
        """Whether the row has a result."""
        return self.error is None

    @property
    def token_ids(self) -> list[int]:
        """Of the first sample; empty where there is an error."""
        return self.samples[0].token_ids if self.samples else []

    @property
    def prompt_logprobs(self) -> list[TokenLogprob | None] | None:
        """Of each token of the prompt, None for the first; None where they were not asked for."""
        return None if self.scores is None else [None, *self.scores.tokens()]

    @property
    def logprobs(self) -> list[TokenLogprob] | None:
        """Of the first sample; None where they were not asked for."""
        return self.samples[0].logprobs if self.samples else None

    @property
    def text(self) -> str:
        """Of the first sample; empty where there is an error."""
        return self.samples[0].text if self.samples else ""

    @property
    def finish_reason(self) -> FinishReason | None:
        """Of the first sample; None where there is an error."""
        return self.samples[0].finish_reason if self.samples else None

    @property
    def stop_reason(self) -> str | int | None:
        """Of the first sample: the stop string or token id that ended it, if one did."""
        return self.samples[0].stop_reason if self.samples else None
