"""The columns in which a task other than `generate` gives its results. Standard library only.

A worker reports them by name; journal and parts keep them as they are, and vectors as bytes.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from typing import Any

from batchgen.types import Output, Task

TASK_COLUMNS: dict[Task, tuple[str, ...]] = {
    Task.GENERATE: (),
    Task.LOGLIKELIHOOD: ("loglikelihood", "is_greedy", "num_tokens"),
    Task.PERPLEXITY: (
        "loglikelihood",
        "num_tokens",
        "perplexity",
        "num_bytes",
        "num_words",
        "bits_per_byte",
    ),
    Task.EMBED: ("embedding",),
    Task.CLASSIFY: ("label", "score", "scores"),
}
ALL_TASK_COLUMNS = tuple(dict.fromkeys(name for names in TASK_COLUMNS.values() for name in names))
ANSWER = ("generated_text", "finish_reason", "stop_reason")
"""Columns that only rows with an answer have."""


def task_values(task: Task, output: Output, size: tuple[int, int] | None = None) -> dict[str, Any]:
    """What a row's output says in the columns of its task.

    Args:
        task: of the job.
        output: without an error.
        size: bytes and words of the text, where it is known.
    """
    return {key: value for key, value in _values(task, output, size).items() if _is_known(value)}


def _is_known(value: Any) -> bool:
    """What is not finite has no place in JSON, and is null in Parquet too."""
    return not isinstance(value, float) or math.isfinite(value)


def _values(task: Task, output: Output, size: tuple[int, int] | None) -> dict[str, Any]:
    match task:
        case Task.LOGLIKELIHOOD if output.scores is not None:
            scores = output.scores
            return {
                "loglikelihood": scores.loglikelihood,
                "is_greedy": scores.is_greedy,
                "num_tokens": len(scores),
            }
        case Task.PERPLEXITY if output.scores is not None:
            total, tokens = output.scores.loglikelihood, len(output.scores)
            found: dict[str, Any] = {
                "loglikelihood": total,
                "num_tokens": tokens,
                "perplexity": perplexity(total, tokens),
            }
            if size is not None:
                found |= {"num_bytes": size[0], "num_words": size[1]}
                found["bits_per_byte"] = bits_per_byte(total, size[0])
            return found
        case Task.EMBED if output.embedding is not None:
            return {"embedding": output.embedding.tobytes()}
        case Task.CLASSIFY if output.classification is not None:
            known = output.classification
            return {"label": known.label, "score": known.score, "scores": [list(s) for s in known.scores]}
        case _:
            return {}


def perplexity(loglikelihood: float, num_tokens: int) -> float:
    """Of a text, by token; infinite where it is too large for a float, NaN of no tokens."""
    if not num_tokens:
        return math.nan
    try:
        return math.exp(-loglikelihood / num_tokens)
    except OverflowError:
        return math.inf


def bits_per_byte(loglikelihood: float, num_bytes: int | None) -> float:
    """Of a text, by byte of its UTF-8; NaN where that is not known."""
    return -loglikelihood / (num_bytes * math.log(2)) if num_bytes else math.nan


def pack_vector(values: Sequence[float]) -> bytes:
    """Numbers as float32 in the machine's own order, which is little-endian wherever batchgen runs."""
    return array("f", values).tobytes()


def unpack_vector(data: bytes) -> list[float]:
    """What `pack_vector` packed."""
    vector = array("f")
    vector.frombytes(data)
    return vector.tolist()


def pack_prompt_logprobs(output: Output) -> list[Any] | None:
    """`[logprob, rank, [[token id, logprob], …]]` of each token of a prompt, None for the first."""
    found = output.prompt_logprobs
    if found is None:
        return None
    return [one and [one.logprob, one.rank, [[t.token_id, t.logprob] for t in one.top]] for one in found]


def named_logprobs(packed: list[Any] | None) -> list[Any] | None:
    """The same with names for its members, as the output has it."""
    return packed and [one and _named(*one) for one in packed]


def plain_logprobs(named: list[Any]) -> list[Any]:
    """What `named_logprobs` named."""
    return [one and [one["logprob"], one["rank"], _pairs(one["top"])] for one in named]


def _named(logprob: float, rank: int, top: list[Any]) -> dict[str, Any]:
    named = [{"token_id": token_id, "logprob": value} for token_id, value in top]
    return {"logprob": logprob, "rank": rank, "top": named}


def _pairs(top: list[Any]) -> list[Any]:
    return [[one["token_id"], one["logprob"]] for one in top]
