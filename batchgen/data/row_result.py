"""The outcome of one row, as a worker reports it, the journal keeps it and a part holds it.

The assembly makes these from the journal, `part_reader` from parts; the sink writes them. Standard library
only, and tuples, because there is one for every row.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self

from batchgen.types import ErrorClass, RowError, Status

INCLUDED = (
    *("prompt", "prompt_token_ids", "output_token_ids", "seed"),
    *("logprobs", "prompt_logprobs", "reasoning"),
)
"""What a worker reports of a row only where the job asks for it: `output.include`, `sampling.reasoning`."""
TOKEN_IDS = frozenset({"prompt_token_ids", "output_token_ids"})


class RowResult(NamedTuple):
    """What became of one row; nothing in it depends on scheduling.

    Args:
        status: ok, error or skipped.
        generated_text: of a dialogue, the text of each turn.
        usage: prompt, completion and truncated tokens; None where the engine never saw the row.
        included: those of `INCLUDED` that were asked for, and the columns of the job's task, where they are
            known; token ids and vectors as bytes, see `pack_ids` and `pack_vector`, logprobs as
            `PackedLogprobs.pack` gives them.
    """

    status: str
    generated_text: str | Sequence[str] | None = None
    finish_reason: str | None = None
    stop_reason: str | None = None
    error: RowError | None = None
    usage: Sequence[int] | None = None
    included: Mapping[str, Any] | None = None

    @classmethod
    def of(
        cls,
        status: str,
        text: str | Sequence[str] | None,
        finish_reason: str | None,
        stop_reason: str | int | None,
        error: Sequence[str] | None,
        usage: Sequence[int] | None,
        included: Mapping[str, Any] | None = None,
    ) -> Self:
        """From the values of a journal record, in their order."""
        return cls(
            status,
            text,
            finish_reason,
            stop_reason if stop_reason is None else str(stop_reason),
            RowError(ErrorClass(error[0]), error[1]) if error else None,
            tuple(usage) if usage else None,
            included or None,
        )

    @classmethod
    def from_error(cls, error: RowError) -> Self:
        """The result of a row that failed before it reached the engine."""
        return cls(Status.ERROR.value, error=error)

    @property
    def included_size(self) -> int:
        """Characters and bytes of what is included."""
        values = (self.included or {}).values()
        return sum(map(_size, values))


def _size(value: Any) -> int:
    if isinstance(value, list):
        return sum(map(_size, value))
    return len(value) if isinstance(value, str | bytes) else 0


def pack_ids(ids: Sequence[int]) -> bytes:
    """Token ids as int32 in the machine's own order, which is little-endian wherever batchgen runs."""
    return array("i", ids).tobytes()


def unpack_ids(data: bytes) -> list[int]:
    """What `pack_ids` packed."""
    ids = array("i")
    ids.frombytes(data)
    return ids.tolist()
