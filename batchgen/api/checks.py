"""What can be wrong with a job before any weights are loaded. Called by `validate`, `run` and `show`.

Each check looks at one thing and says what it found; all are run, so that everything is reported at once.
`run` leaves out those that need the tokenizer, because its process stays small.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from batchgen.api.check_output import check_is_folder, check_output_columns, check_store
from batchgen.api.check_report import Report
from batchgen.api.check_rows import check_priority, check_rows
from batchgen.api.job_input import bind_prompt, open_job_input
from batchgen.api.job_model import find_model, find_tokenizer, recorded_commit

if TYPE_CHECKING:
    from batchgen.data.source import InputSet
    from batchgen.job.spec.job import JobSpec
    from batchgen.models.source import ModelSource
    from batchgen.text.prompt_spec import PromptSpec

ROWS_FOR_IDS = 100_000


@dataclass(slots=True)
class Prepared:
    """What the checks opened on the way; None where that failed. Close it."""

    inputs: InputSet | None = None
    prompt: PromptSpec | None = None
    source: ModelSource | None = None
    tokenizer_source: ModelSource | None = None

    def close(self) -> None:
        """Close the input's files."""
        if self.inputs is not None:
            self.inputs.close()


def check_job(spec: JobSpec, report: Report, *, rows_for_ids: int, resume: bool = True) -> Prepared:
    """Every check that needs no tokenizer.

    Args:
        spec: the job; what has a fault in it is not looked at.
        report: gets faults, notes and facts.
        rows_for_ids: how many rows to look at for ids that occur twice, where a column holds them.
        resume: whether what the output folder holds will be continued.
    """
    report.spec = spec
    found = Prepared()
    if spec.sound("input.path", "input.format"):
        with report.check("input", "path"):
            found.inputs = open_job_input(spec)
    if found.inputs is not None:
        _check_input(spec, report, found, rows_for_ids)
    if spec.sound("model.path", "model.revision"):
        with report.check("model", "path"):
            found.source = find_model(
                spec, recorded_commit(spec) if resume and spec.sound("output.path") else None
            )
            found.source.check_weights()
    if spec.sound("model.tokenizer"):
        with report.check("model", "tokenizer"):
            found.tokenizer_source = find_tokenizer(spec)
    if spec.sound("output.path"):
        with report.check("output", "path"):
            check_is_folder(spec.output_folder)
            if spec.output_url is not None:
                check_store(spec.output_url)
    if spec.sound("output") and spec.output.push_to_hub is not None:
        from batchgen.job.push import require_token

        with report.check("output", "push_to_hub"):
            require_token()
    return found


def _check_input(spec: JobSpec, report: Report, found: Prepared, rows_for_ids: int) -> None:
    assert found.inputs is not None
    if spec.sound("prompt"):
        with report.check("prompt"):
            found.prompt = bind_prompt(spec, found.inputs)
    if spec.sound("input.columns", "output"):
        with report.check("output"):
            report.notes += check_output_columns(spec, found.inputs)
    if spec.sound("run.priority"):
        with report.check("run", "priority"):
            check_priority(spec, found.inputs)
    if spec.sound("input"):
        with report.check("input", "path"):
            check_rows(spec, found.inputs, report, rows_for_ids)
