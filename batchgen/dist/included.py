"""What a worker reports of a row beyond its answer, where `output.include` asks for it, and only that."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from batchgen.data.packed_logprobs import PackedLogprobs
from batchgen.data.row_result import pack_ids
from batchgen.data.task_columns import TASK_COLUMNS, pack_prompt_logprobs, task_values
from batchgen.text.prompt import PreparedRow
from batchgen.text.task_request import count_bytes, count_words
from batchgen.types import Output, Sample, Task


class Included:
    """Keeps what was asked for of each row from its rendering to its result.

    Args:
        asked: those of `batchgen.data.row_result.INCLUDED` that the job wants.
        text_of: from a token id to the bytes that it stands for.
        task: of the job; what it gives is reported beside them.
        lists: whether what each sample has is a list, of one sample too.
    """

    def __init__(
        self,
        asked: Collection[str],
        text_of: Callable[[int], bytes],
        task: Task = Task.GENERATE,
        *,
        lists: bool = False,
    ) -> None:
        self._asked = asked
        self._text_of = text_of
        self._task = task
        self._lists = lists
        self._reports = bool(asked) or bool(TASK_COLUMNS[task])
        self._keeps = not {"prompt", "prompt_token_ids", "seed"}.isdisjoint(asked)
        self._sizes: dict[int, tuple[int, int]] = {}
        self._rows: dict[int, tuple[PreparedRow, int]] = {}

    def usage(self, output: Output) -> tuple[int, ...]:
        """Prompt, completion and truncated tokens; and those of reasoning, where a job splits it off."""
        counts = output.prompt_tokens, output.completion_tokens, output.truncated_tokens
        return (*counts, output.reasoning_tokens) if "reasoning" in self._asked else counts

    def prepared(self, row: PreparedRow, seed: int) -> None:
        """A row was rendered. Called by the thread that does; the engine's loop calls the rest."""
        if self._task is Task.PERPLEXITY and row.text is not None:
            self._sizes[row.row] = count_bytes(row.text), count_words(row.text)
        if self._keeps:
            self._rows[row.row] = (row, seed)

    def of(self, output: Output) -> dict[str, Any] | None:
        """What goes into the result of a row; None where nothing was asked for.

        A row that could not be rendered has no prompt, and one that failed no output.
        """
        if not self._reports:
            return None
        size = self._sizes.pop(output.request_id, None)
        values = task_values(self._task, output, size) if output.ok else {}
        if not self._asked:
            return values or None
        row, seed = self._rows.pop(output.request_id, (None, None))
        found: dict[str, Any] = {}
        if row is not None:
            found = {"prompt": row.text, "prompt_token_ids": pack_ids(row.token_ids)}
        if output.ok:
            found |= {
                "output_token_ids": self._each(output.samples, lambda sample: pack_ids(sample.token_ids)),
                "seed": seed,
                "logprobs": self._each(output.samples, self._logprobs),
                "prompt_logprobs": pack_prompt_logprobs(output),
                "reasoning": self._reasoning(output),
            }
        asked = {key: value for key, value in found.items() if key in self._asked and value is not None}
        return asked | values

    def _logprobs(self, sample: Sample) -> list[Any] | None:
        if sample.scores is None or "logprobs" not in self._asked:
            return None
        return PackedLogprobs.of(sample.scores, self._text_of).pack()

    def _reasoning(self, output: Output) -> Any:
        if output.turns:
            return [sample.reasoning for sample in output.turns]
        return self._each(output.samples, lambda sample: sample.reasoning)

    def _each(self, samples: Sequence[Sample], value: Callable[[Sample], Any]) -> Any:
        """Of the only sample, or a list of those of all; None where there is none."""
        if self._lists:
            return [value(sample) for sample in samples]
        return value(samples[0]) if samples else None
