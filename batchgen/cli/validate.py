"""`batchgen validate`: everything that can be known to be wrong before weights are loaded, in seconds."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import click

from batchgen.cli.options import AS_JSON, JOB, SET, print_json

if TYPE_CHECKING:
    from batchgen.api.check_report import Report


@click.command("validate", short_help="Check a job: file, paths, columns, template, permissions; no weights.")
@JOB
@SET
@AS_JSON
def command(job: Path, sets: tuple[str, ...], as_json: bool) -> int:
    """Check a job in seconds, without loading any weights.

    Looks at the job file, the input and its columns, the model's files and whether such a model can run
    here, the chat template with the job's own roles, and whether the output folder can be written. Reports
    everything that is wrong at once.
    """
    teller = _Teller()
    report = _report(job, sets, (lambda report: None) if as_json else teller.tell)
    if as_json:
        print_json(_to_json(report))
    elif not report.faults:
        click.echo("valid: nothing found that would stop this job", err=True)
    return report.exit_code


def _report(job: Path, sets: tuple[str, ...], tell: Callable[[Report], None]) -> Report:
    from batchgen.api import checks
    from batchgen.api.check_model import check_model
    from batchgen.api.check_output import check_output_writable
    from batchgen.api.check_prompt import check_prompt
    from batchgen.api.check_report import Report
    from batchgen.api.job_model import load_tokenizer
    from batchgen.job.load import load_as_far_as_possible

    report = Report()
    with report.check():
        spec, faults = load_as_far_as_possible(job, sets)
        report.faults += [faults] if faults is not None else []
        report.notes += spec.notes
        with closing(checks.check_job(spec, report, rows_for_ids=checks.ROWS_FOR_IDS)) as found:
            if spec.sound("output.path", "run.min_free_disk"):
                with report.check("output", "path"):
                    check_output_writable(spec)
            source = found.tokenizer_source or found.source
            # What comes now may have to load transformers, which takes seconds.
            tell(report)
            if source is not None and found.prompt is not None:
                with report.check():
                    check_prompt(spec, found.prompt, load_tokenizer(source), report, found.inputs)
            if found.source is not None:
                check_model(spec, found.source, report)
    tell(report)
    return report


def _to_json(report: Report) -> dict[str, object]:
    from batchgen.job.faults import dotted, remedy

    faults = [
        {
            "exit_code": error.exit_code,
            "file": fault.origin.source or None,
            "line": fault.origin.line or None,
            "column": fault.origin.column or None,
            "key": dotted(fault.key) or None,
            "message": fault.message,
            "remedy": remedy(fault.message),
        }
        for error in report.faults
        for fault in report.located(error)
    ]
    return {
        "ok": not faults,
        "exit_code": report.exit_code,
        "faults": faults,
        "notes": report.notes,
        **report.facts,
    }


class _Teller:
    """Says what was found, each thing once."""

    def __init__(self) -> None:
        self._notes = self._faults = 0

    def tell(self, report: Report) -> None:
        """Say what has been found since the last call."""
        from batchgen.text.terminal import safe

        for note in report.notes[self._notes :]:
            click.echo(safe(f"note: {note}"), err=True)
        for fault in report.faults[self._faults :]:
            click.echo(safe(f"batchgen: {report.sentence(fault)}"), err=True)
        self._notes, self._faults = len(report.notes), len(report.faults)
