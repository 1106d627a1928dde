"""The outcome of one row, as a worker reports it, the journal keeps it and a part holds it.

The assembly makes these from the journal, `part_reader` from parts; the sink writes them. Standard library
only, and tuples, because there is one for every row.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Self, cast

from batchgen.types import ErrorClass, RowError, Status

INCLUDED = (
    *("prompt", "prompt_token_ids", "output_token_ids", "seed"),
    *("logprobs", "prompt_logprobs", "reasoning"),
)
"""What a worker reports of a row only where the job asks for it: `output.include`, `sampling.reasoning`."""
OF_SAMPLES = frozenset({"output_token_ids", "logprobs", "reasoning"})
"""Of `INCLUDED` what each sample has for itself."""
TOKEN_IDS = frozenset({"prompt_token_ids", "output_token_ids"})


class RowResult(NamedTuple):
    """What became of one row; nothing in it depends on scheduling.

    Args:
        status: ok, error or skipped.
        generated_text: of a dialogue, the text of each turn.
        usage: prompt, completion and truncated tokens, and, where the job splits reasoning off, those of the
            completion that are reasoning; None where the engine never saw the row.
        included: those of `INCLUDED` that were asked for, and the columns of the job's task, where they are
            known; token ids and vectors as bytes, see `pack_ids` and `pack_vector`, logprobs as
            `PackedLogprobs.pack` gives them.
        sample: of a record that holds one sample of its row; see `exploded`.

    Where a job asks for several samples of each row, `generated_text`, `finish_reason`, `stop_reason` and
    those of `OF_SAMPLES` that are included are lists with something for each.
    """

    status: str
    generated_text: str | Sequence[str] | None = None
    finish_reason: str | Sequence[str] | None = None
    stop_reason: str | Sequence[str | None] | None = None
    error: RowError | None = None
    usage: Sequence[int] | None = None
    included: Mapping[str, Any] | None = None
    sample: int | None = None

    @classmethod
    def of(
        cls,
        status: str,
        text: str | Sequence[str] | None,
        finish_reason: str | Sequence[str] | None,
        stop_reason: str | int | Sequence[str | None] | None,
        error: Sequence[str] | None,
        usage: Sequence[int] | None,
        included: Mapping[str, Any] | None = None,
    ) -> Self:
        """From the values of a journal record, in their order."""
        return cls(
            status,
            text,
            finish_reason,
            str(stop_reason) if isinstance(stop_reason, int) else stop_reason,
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


def exploded(result: RowResult) -> list[RowResult]:
    """A row with several samples as one record for each; of a row without an answer there is one.

    What is known of the row is in each, its usage only in the first, so that sums over records are right.
    """
    if result.status != Status.OK:
        return [result]
    texts = cast(Sequence[str], result.generated_text)
    included = result.included or {}
    return [
        result._replace(
            generated_text=text,
            finish_reason=result.finish_reason and result.finish_reason[i],
            stop_reason=result.stop_reason and result.stop_reason[i],
            usage=None if i else result.usage,
            included={k: v[i] if k in OF_SAMPLES else v for k, v in included.items()} or None,
            sample=i,
        )
        for i, text in enumerate(texts)
    ]


def imploded(records: Sequence[RowResult]) -> RowResult:
    """What `exploded` has made records of. Raises ValueError: they are not all of one row, in order."""
    first = records[0]
    if first.sample is None and len(records) == 1:
        return first
    places = [record.sample for record in records]
    if places != list(range(len(records))):
        raise ValueError(f"the samples of a row are {', '.join(map(str, places))}, not 0 and so on")

    def each(name: str) -> list[Any]:
        return [getattr(record, name) for record in records]

    included = [record.included or {} for record in records]
    found = {key for one in included for key in one}
    return first._replace(
        generated_text=each("generated_text"),
        # Missing where the output has no such column.
        finish_reason=first.finish_reason and each("finish_reason"),
        stop_reason=first.finish_reason and each("stop_reason"),
        included={
            key: [one.get(key) for one in included] if key in OF_SAMPLES else included[0][key]
            for key in found
        }
        or None,
        sample=None,
    )


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
