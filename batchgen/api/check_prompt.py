"""What can be wrong with a job's prompt that only the tokenizer knows. For `validate`, `plan` and `run`."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from batchgen.api.check_report import Report
from batchgen.api.job_input import where_of
from batchgen.grammar import counted
from batchgen.types import UsageError

if TYPE_CHECKING:
    from batchgen.data.row import Row
    from batchgen.data.source import InputSet
    from batchgen.job.spec.job import JobSpec
    from batchgen.text.prompt import PromptRenderer
    from batchgen.text.prompt_spec import PromptSpec
    from batchgen.text.tokenizer import Tokenizer

ROWS_TO_RENDER = 100


def check_prompt(
    spec: JobSpec, prompt: PromptSpec, tokenizer: Tokenizer, report: Report, inputs: InputSet | None = None
) -> None:
    """Render the job's own roles, and look at what only the tokenizer knows.

    Args:
        spec: the job.
        prompt: its prompt section, bound to the input's columns.
        tokenizer: the model's.
        report: gets faults and notes.
        inputs: whose first rows are tried too.
    """
    from batchgen.text.prompt import PromptRenderer

    with report.check():
        renderer = PromptRenderer(prompt, tokenizer)
        faults = list(renderer.faults())
        report.faults += faults
        report.notes += renderer.notes
        if inputs is not None and not faults:
            _try_rows(spec, renderer, inputs, report)
    for key in ("stop_token_ids", "logit_bias", "allowed_token_ids"):
        for token_id in map(int, getattr(spec.sampling, key)):
            if token_id >= tokenizer.vocab_size:
                report.faults.append(
                    UsageError(
                        f"sampling.{key}: {token_id} is not a token id of this tokenizer; "
                        f"use ids from 0 to {tokenizer.vocab_size - 1}"
                    )
                )


def _try_rows(spec: JobSpec, renderer: PromptRenderer, inputs: InputSet, report: Report) -> None:
    """Render the first rows, and say what would become of those that cannot run."""
    from batchgen.data.prompt_values import prompt_values
    from batchgen.sampling.overrides import RowSampling
    from batchgen.types import RowError, RowFailure

    sampling = RowSampling(spec.sampling.model_dump(), {}, renderer.spec.per_row)
    failed: list[tuple[Row, RowError]] = []
    tried = 0
    readable = (row for row in inputs.window() if row.selected and row.error is None)
    for row in islice(readable, min(spec.input.limit or ROWS_TO_RENDER, ROWS_TO_RENDER)):
        tried += 1
        columns = prompt_values(row, renderer.required_columns())
        try:
            sampled = sampling.of_row(columns)
        except RowFailure as failure:
            failed.append((row, failure.error))
            continue
        explained = renderer.explain(columns, spec.model.max_model_len, sampled)
        if explained.error is not None:
            failed.append((row, explained.error))
    if failed:
        row, error = failed[0]
        report.notes.append(
            f"{len(failed)} of the first {counted(tried, 'row')} cannot run and each becomes a row with "
            f"status {error.status}; {where_of(row)}: {error.error_class}: {error.message}"
        )
