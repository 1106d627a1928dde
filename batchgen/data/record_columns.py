"""Rows and results as the Arrow arrays of one row group, column by column. The sink and `export` call it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import pyarrow as pa

from batchgen.data.exact_json import clean_text
from batchgen.data.packed_logprobs import PackedLogprobs
from batchgen.data.passthrough import ColumnPassthrough
from batchgen.data.row import Row
from batchgen.data.row_result import OF_SAMPLES, RowResult, exploded
from batchgen.data.task_columns import ALL_TASK_COLUMNS, named_logprobs, unpack_vector
from batchgen.types import RowError, Status

if TYPE_CHECKING:
    from batchgen.data.results import OutputPlan

ERROR_TYPE = pa.struct([("class", pa.string()), ("message", pa.string())])
USAGE_TYPE = pa.struct(
    [("prompt_tokens", pa.int64()), ("completion_tokens", pa.int64()), ("truncated_tokens", pa.int64())]
)
USAGE_WITH_REASONING = pa.struct([*USAGE_TYPE, ("reasoning_tokens", pa.int64())])
_LIKELIEST = pa.struct([("token", pa.string()), ("id", pa.int32()), ("logprob", pa.float32())])
LOGPROBS_TYPE = pa.list_(
    pa.struct(
        [
            ("token", pa.string()),
            ("id", pa.int32()),
            ("logprob", pa.float32()),
            ("rank", pa.int32()),
            ("top", pa.list_(_LIKELIEST)),
        ]
    )
)
BEFORE = {"row": pa.int64(), "id": pa.string(), "sample": pa.int32()}
PROMPT_LOGPROBS = pa.list_(
    pa.struct(
        [
            ("logprob", pa.float64()),
            ("rank", pa.int64()),
            ("top", pa.list_(pa.struct([("token_id", pa.int32()), ("logprob", pa.float64())]))),
        ]
    )
)
AFTER = {
    "loglikelihood": pa.float64(),
    "is_greedy": pa.bool_(),
    "num_tokens": pa.int64(),
    "perplexity": pa.float64(),
    "num_bytes": pa.int64(),
    "num_words": pa.int64(),
    "bits_per_byte": pa.float64(),
    "embedding": pa.list_(pa.float32()),
    "label": pa.string(),
    "score": pa.float64(),
    "scores": pa.list_(pa.struct([("label", pa.string()), ("score", pa.float64())])),
    "generated_text": pa.string(),
    "finish_reason": pa.string(),
    "stop_reason": pa.string(),
    "status": pa.string(),
    "error": ERROR_TYPE,
    "usage": USAGE_TYPE,
    "prompt": pa.string(),
    "prompt_token_ids": pa.list_(pa.int32()),
    "output_token_ids": pa.list_(pa.int32()),
    "seed": pa.int64(),
    "logprobs": LOGPROBS_TYPE,
    "prompt_logprobs": PROMPT_LOGPROBS,
    "reasoning": pa.string(),
}
OF_DIALOGUES = {"generated_text": pa.list_(pa.string()), "reasoning": pa.list_(pa.string())}
"""Types of columns that hold something for each turn."""
LISTS_OF_SAMPLES = {
    key: pa.list_(AFTER[key])
    for key in AFTER
    if key in ("generated_text", "finish_reason", "stop_reason") or key in OF_SAMPLES
}
"""Types of columns that hold a list with something for each sample."""


def result_arrays(
    plan: OutputPlan, rows: Sequence[Row], results: Sequence[RowResult]
) -> list[pa.ChunkedArray | pa.Array]:
    """Columns of a Parquet row group, in the order of `OutputPlan.schema`; at least one row."""
    of_turns = {"generated_text": _answers, "reasoning": _included_answers}
    ours = {**_OURS, **of_turns} if plan.dialogues else dict(_OURS)
    if plan.samples == "explode":
        rows, results = _one_sample_each(rows, results)
    elif plan.samples == "list":
        ours |= dict.fromkeys(LISTS_OF_SAMPLES, _ListsOfSamples(results))
    fields = _fields(results)
    ours |= {"embedding": _vectors(plan.embedding_size), "usage": _usages(plan.usage_type)}
    fields["row"], fields["id"] = [row.ordinal for row in rows], [row.id for row in rows]
    return [
        *(_OURS[key](key, fields) for key in BEFORE if key in plan.names),
        *cast(ColumnPassthrough, plan.passthrough).arrays(rows),
        *(ours[key](key, fields) for key in AFTER if key in plan.names),
    ]


def _fields(results: Sequence[RowResult]) -> dict[str, Sequence[Any]]:
    """Columns of results, which may be none."""
    values = zip(*results, strict=True) if results else ((),) * len(RowResult._fields)
    return dict(zip(RowResult._fields, values, strict=True))


def _one_sample_each(rows: Sequence[Row], results: Sequence[RowResult]) -> tuple[list[Row], list[RowResult]]:
    """Every row as often as it has records in an output of one sample a record, and those records."""
    records = [(row, one) for row, result in zip(rows, results, strict=True) for one in exploded(result)]
    return [row for row, _ in records], [one for _, one in records]


class _ListsOfSamples:
    """What makes columns with a list for each row, of what the column of one sample a record would hold."""

    def __init__(self, results: Sequence[RowResult]) -> None:
        samples = [exploded(result) if result.status == Status.OK else None for result in results]
        self._offsets = _offsets([len(one or ()) for one in samples])
        self._missing = pa.array([one is None for one in samples], pa.bool_())
        self._fields = _fields([record for one in samples for record in one or ()])

    def __call__(self, key: str, _: dict[str, Sequence[Any]]) -> pa.Array:
        flat = _OURS[key](key, self._fields)
        type_ = LISTS_OF_SAMPLES[key]
        return pa.ListArray.from_arrays(self._offsets, flat, type=type_, mask=self._missing)


def texts(values: Sequence[str | None]) -> pa.Array:
    """A string array; lone surrogates become U+FFFD."""
    try:
        return pa.array(values, pa.string())
    except UnicodeEncodeError:
        return pa.array([value if value is None else clean_text(value) for value in values], pa.string())


def _text(key: str, fields: dict[str, Sequence[Any]]) -> pa.Array:
    return texts(fields[key])


def _answers(key: str, fields: dict[str, Sequence[Any]]) -> pa.Array:
    """Texts of the turns of dialogues."""
    return _lists_of_texts(fields[key])


def _lists_of_texts(values: Sequence[Sequence[str | None] | None]) -> pa.Array:
    flat = texts([text for value in values for text in value or ()])
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum([len(value or ()) for value in values], out=offsets[1:])
    missing = pa.array([value is None for value in values], pa.bool_())
    return pa.ListArray.from_arrays(pa.array(offsets), flat, type=pa.list_(pa.string()), mask=missing)


def _errors(_: str, fields: dict[str, Sequence[Any]]) -> pa.Array:
    errors: Sequence[RowError | None] = fields["error"]
    if not any(errors):
        return pa.nulls(len(errors), ERROR_TYPE)
    classes = pa.array([None if e is None else e.error_class.value for e in errors], pa.string())
    messages = texts([None if e is None else e.message for e in errors])
    return _struct(ERROR_TYPE, [classes, messages], errors)


def _usages(type_: pa.StructType) -> Callable[[str, dict[str, Sequence[Any]]], pa.Array]:
    none = (0,) * type_.num_fields

    def arrays(_: str, fields: dict[str, Sequence[Any]]) -> pa.Array:
        usages: Sequence[Sequence[int] | None] = fields["usage"]
        # Journals of earlier versions do not count reasoning.
        counts = np.array([[*(usage or ()), *none][: len(none)] for usage in usages], np.int64)
        return _struct(type_, [pa.array(column) for column in counts.T.copy()], usages)

    return arrays


def _struct(type_: pa.StructType, columns: list[pa.Array], values: Sequence[Any]) -> pa.Array:
    missing = None
    if not all(values):
        missing = pa.array([value is None for value in values], pa.bool_())
    return pa.StructArray.from_arrays(columns, fields=list(type_), mask=missing)


def _included(key: str, fields: dict[str, Sequence[Any]]) -> list[Any]:
    return [included and included.get(key) for included in fields["included"]]


def _included_text(key: str, fields: dict[str, Sequence[Any]]) -> pa.Array:
    return texts(_included(key, fields))


def _included_answers(key: str, fields: dict[str, Sequence[Any]]) -> pa.Array:
    return _lists_of_texts(_included(key, fields))


def _token_ids(key: str, fields: dict[str, Sequence[Any]]) -> pa.Array:
    """One list array over the bytes of all rows; nothing becomes a Python integer."""
    values: list[bytes | None] = _included(key, fields)
    lengths = np.fromiter((len(value or b"") // 4 for value in values), np.int32, len(values))
    offsets = np.zeros(len(values) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    flat = pa.array(np.frombuffer(b"".join(value or b"" for value in values), np.int32))
    missing = pa.array([value is None for value in values], pa.bool_())
    return pa.ListArray.from_arrays(pa.array(offsets), flat, type=AFTER[key], mask=missing)


def _logprobs(key: str, fields: dict[str, Sequence[Any]]) -> pa.Array:
    """Nested arrays over the numbers of all rows; only texts of tokens become Python objects."""
    values = [packed and PackedLogprobs.unpack(packed) for packed in _included(key, fields)]
    known = [value for value in values if value is not None]
    likeliest = pa.StructArray.from_arrays(
        [
            texts([t for value in known for t in value.texts_of(value.top_ids)]),
            pa.array(_joined([value.top_ids for value in known], np.int32)),
            pa.array(_joined([value.top_logprobs for value in known], np.float32)),
        ],
        fields=list(_LIKELIEST),
    )
    counts = [value.top_k for value in known for _ in value.ids]
    tokens = pa.StructArray.from_arrays(
        [
            texts([t for value in known for t in value.texts_of(value.ids)]),
            pa.array(_joined([value.ids for value in known], np.int32)),
            pa.array(_joined([value.logprobs for value in known], np.float32)),
            pa.array(_joined([value.ranks for value in known], np.int32)),
            pa.ListArray.from_arrays(_offsets(counts), likeliest, type=pa.list_(_LIKELIEST)),
        ],
        fields=list(LOGPROBS_TYPE.value_type),
    )
    missing = pa.array([value is None for value in values], pa.bool_())
    lengths = [0 if value is None else len(value.ids) for value in values]
    return pa.ListArray.from_arrays(_offsets(lengths), tokens, type=LOGPROBS_TYPE, mask=missing)


def _joined(arrays: Sequence[Any], kind: Any) -> Any:
    return np.frombuffer(b"".join(one.tobytes() for one in arrays), kind)


def _offsets(lengths: Sequence[int]) -> pa.Array:
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(np.asarray(lengths, np.int32), out=offsets[1:])
    return pa.array(offsets)


def _numbers(key: str, fields: dict[str, Sequence[Any]]) -> pa.Array:
    return pa.array(_included(key, fields), AFTER[key])


def _vectors(size: int | None) -> Callable[[str, dict[str, Sequence[Any]]], pa.Array]:
    """Vectors of a fixed size, from their bytes; rows without one are null."""

    def vectors(key: str, fields: dict[str, Sequence[Any]]) -> pa.Array:
        values: list[bytes | None] = _included(key, fields)
        if size is None:
            return pa.array([value and unpack_vector(value) for value in values], AFTER[key])
        empty = bytes(4 * size)
        flat = pa.array(np.frombuffer(b"".join(value or empty for value in values), np.float32))
        missing = pa.array([value is None for value in values], pa.bool_())
        return pa.FixedSizeListArray.from_arrays(flat, type=vector_type(size), mask=missing)

    return vectors


def vector_type(size: int | None) -> pa.DataType:
    """Of a column of embeddings."""
    return pa.list_(pa.float32()) if size is None else pa.list_(pa.float32(), size)


def _scores(key: str, fields: dict[str, Sequence[Any]]) -> pa.Array:
    values: list[Any] = _included(key, fields)
    named = [v and [{"label": label, "score": score} for label, score in v] for v in values]
    return pa.array(named, AFTER[key])


def _prompt_logprobs(key: str, fields: dict[str, Sequence[Any]]) -> pa.Array:
    return pa.array([named_logprobs(value) for value in _included(key, fields)], AFTER[key])


def _integers(key: str, fields: dict[str, Sequence[Any]]) -> pa.Array:
    return pa.array(fields[key], BEFORE[key])


_OURS: dict[str, Callable[[str, dict[str, Sequence[Any]]], pa.Array]] = {
    "row": _integers,
    "id": _text,
    "sample": _integers,
    "generated_text": _text,
    "finish_reason": _text,
    "stop_reason": _text,
    "status": _text,
    "error": _errors,
    "usage": _usages(USAGE_TYPE),
    "prompt": _included_text,
    "prompt_token_ids": _token_ids,
    "output_token_ids": _token_ids,
    "seed": _numbers,
    "logprobs": _logprobs,
    "reasoning": _included_text,
    "prompt_logprobs": _prompt_logprobs,
    **dict.fromkeys(ALL_TASK_COLUMNS, _numbers),
    "label": _included_text,
    "scores": _scores,
}
