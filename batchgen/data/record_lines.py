"""Rows and results as lines of strict JSON: our own records, and OpenAI's batch output. The sink calls it.

Lines are put together from text instead of from a dict a row, which is most of what writing JSONL costs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from batchgen.data.exact_json import draft, draft_members, encode, one_line
from batchgen.data.openai_logprobs import chat_logprobs, completion_logprobs
from batchgen.data.packed_logprobs import PackedLogprobs
from batchgen.data.passthrough import MemberPassthrough
from batchgen.data.row import Row
from batchgen.data.row_result import INCLUDED, OF_SAMPLES, TOKEN_IDS, RowResult, exploded, unpack_ids
from batchgen.data.task_columns import ALL_TASK_COLUMNS, named_logprobs, unpack_vector
from batchgen.types import RowError, Status

if TYPE_CHECKING:
    from batchgen.data.results import BatchLabels, OutputPlan

_NULL = "null"
Liner = Callable[[Row, RowResult], str]
"""From a row and its result to one line, or one for each sample, without the last newline."""


def liner(plan: OutputPlan) -> Liner:
    """What turns records into the lines of `plan`."""
    if plan.format == "openai_batch":
        if plan.batch is None:
            raise ValueError("openai_batch needs the labels of its job")
        return BatchLine(plan.batch)
    passthrough = cast(MemberPassthrough, plan.passthrough)
    ours = OurLine(plan.names, lists=plan.samples == "list")
    if plan.samples != "explode":
        return lambda row, result: ours(row.ordinal, row.id, passthrough.members(row), result)

    def lines(row: Row, result: RowResult) -> str:
        members = passthrough.members(row)
        return "\n".join(ours(row.ordinal, row.id, members, one) for one in exploded(result))

    return lines


class OurLine:
    """One record in the order of a Parquet part; members that the row lacks stay absent.

    Args:
        names: our columns to their names in the output; only those that are written.
        lists: whether rows have lists of samples.
    """

    def __init__(self, names: Mapping[str, str], *, lists: bool = False) -> None:
        self._lists = lists
        self._names = {key: f", {draft(name)}: " for key, name in names.items()}
        self._row, self._id, self._sample = map(self._names.get, ("row", "id", "sample"))
        self._text, self._error, self._usage = map(self._names.get, ("generated_text", "error", "usage"))
        self._includes = [key for key in INCLUDED if key in names]
        self._task = [key for key in ALL_TASK_COLUMNS if key in names]
        self._reasons: dict[tuple[Any, Any, str], str] = {}

    def __call__(self, row: int, row_id: str, members: Mapping[str, Any], result: RowResult) -> str:
        text = "" if self._row is None else f"{self._row}{row}"
        if self._id is not None:
            text += f"{self._id}{draft(row_id)}"
        if self._sample is not None:
            text += f"{self._sample}{draft(result.sample)}"
        if members:
            text += f", {draft_members(members)}"
        if self._task:
            text += self._values(self._task, result.included or {})
        if self._text is not None:
            text += f"{self._text}{draft(result.generated_text)}"
        text += self._reason(result)
        if self._error is not None:
            text += f"{self._error}{_NULL if result.error is None else _error('class', result.error)}"
        if self._usage is not None:
            text += f"{self._usage}{_usage(result.usage)}"
        if self._includes:
            text += self._values(self._includes, result.included or {})
        return one_line(f"{{{text[2:]}}}")

    def _reason(self, result: RowResult) -> str:
        """Few combinations occur, so each is put together once; lists of those of samples are many."""
        key = result.finish_reason, result.stop_reason, result.status
        if self._lists:
            return self._members(*key)
        known = self._reasons.get(key)
        if known is None:
            if len(self._reasons) > 1000:
                self._reasons.clear()
            known = self._reasons[key] = self._members(*key)
        return known

    def _members(self, *values: Any) -> str:
        named = zip(("finish_reason", "stop_reason", "status"), values, strict=True)
        return "".join(f"{self._names[name]}{draft(value)}" for name, value in named if name in self._names)

    def _values(self, keys: Sequence[str], included: Mapping[str, Any]) -> str:
        lists = self._lists
        return "".join(
            f"{self._names[key]}{draft(shown(key, included.get(key), lists=lists))}" for key in keys
        )


def shown(key: str, value: Any, *, lists: bool = False) -> Any:
    """A reported value as the output has it; with `lists`, what each sample has is one."""
    if value is None:
        return None
    if lists and key in OF_SAMPLES:
        return [shown(key, one) for one in value]
    if key in TOKEN_IDS:
        return unpack_ids(value)
    if key == "embedding":
        return unpack_vector(value)
    if key == "scores":
        return [{"label": label, "score": score} for label, score in value]
    if key == "logprobs":
        return list(PackedLogprobs.unpack(value).records())
    return named_logprobs(value) if key == "prompt_logprobs" else value


def _error(key: str, error: RowError) -> str:
    return f'{{"{key}": "{error.error_class.value}", "message": {encode(error.message)}}}'


def _usage(usage: Sequence[int] | None) -> str:
    if usage is None:
        return _NULL
    prompt, completion, truncated, *reasoning = usage
    counts = f'"prompt_tokens": {prompt}, "completion_tokens": {completion}, "truncated_tokens": {truncated}'
    return f'{{{counts}, "reasoning_tokens": {reasoning[0]}}}' if reasoning else f"{{{counts}}}"


class BatchLine:
    """One line of a batch output file as OpenAI's Batch API documents it, for chat or for completions.

    Nothing in it depends on when or where the job ran: `created` is 0, and the ids are made of the job and
    the row. Beyond the documented members a choice has `stop_reason`, and the usage `truncated_tokens` where
    a prompt was cut.
    """

    def __init__(self, labels: BatchLabels) -> None:
        self._job = labels.identity
        kind, name = ("chatcmpl", "chat.completion") if labels.chat else ("cmpl", "text_completion")
        self._body = f'{{"id": "{kind}-{self._job}-%d", "object": "{name}", "created": 0'
        self._body += f', "model": {encode(labels.model).replace("%", "%%")}, "choices": [%s], "usage": %s}}'
        self._chat = labels.chat

    def __call__(self, row: Row, result: RowResult) -> str:
        return self.line(row.ordinal, row.id, result)

    def line(self, row: int, row_id: str, result: RowResult) -> str:
        """The line of a row that is not at hand any more."""
        head = f'{{"id": "batch_req_{self._job}_{row}", "custom_id": {encode(row_id)}'
        if result.status != "ok":
            return f'{head}, "response": null, "error": {_failure(result)}}}'
        # A row with one answer has its only choice in it, one with several those of its samples.
        samples = [result] if isinstance(result.generated_text, str) else exploded(result)
        choices = ", ".join(self._choice(sample) for sample in samples)
        body = self._body % (row, choices, _openai_usage(result.usage or (0, 0, 0)))
        response = f'{{"status_code": 200, "request_id": "req_{self._job}_{row}", "body": {body}}}'
        return f'{head}, "response": {response}, "error": null}}'

    def _choice(self, result: RowResult) -> str:
        text = encode(result.generated_text)
        included = result.included or {}
        packed, reasoning = included.get("logprobs"), included.get("reasoning")
        if reasoning is not None:
            text += f', "reasoning_content": {encode(reasoning)}'
        content = (
            f'"message": {{"role": "assistant", "content": {text}}}' if self._chat else f'"text": {text}'
        )
        reasons = (
            f'"finish_reason": {encode(result.finish_reason)}, "stop_reason": {encode(result.stop_reason)}'
        )
        logprobs = "null"
        if packed is not None:
            unpacked = PackedLogprobs.unpack(packed)
            logprobs = encode(chat_logprobs(unpacked) if self._chat else completion_logprobs(unpacked))
        return f'{{"index": {result.sample or 0}, {content}, "logprobs": {logprobs}, {reasons}}}'


def _failure(result: RowResult) -> str:
    if result.error is None:
        return f'{{"code": {encode(result.status)}, "message": "the row was not run"}}'
    if result.status == Status.SKIPPED:
        why = f"{result.error.error_class.value}: {result.error.message}"
        return f'{{"code": {encode(result.status)}, "message": {encode(why)}}}'
    return _error("code", result.error)


def _openai_usage(usage: Any) -> str:
    prompt, completion, truncated, *reasoning = usage
    more = f', "completion_tokens_details": {{"reasoning_tokens": {reasoning[0]}}}' if reasoning else ""
    more += f', "truncated_tokens": {truncated}' if truncated else ""
    total = prompt + completion
    return f'{{"prompt_tokens": {prompt}, "completion_tokens": {completion}, "total_tokens": {total}{more}}}'
