"""`batchgen report`: what became of a job and why it was as fast as it was, as a page and as JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from batchgen.cli.options import AS_JSON, FOLDER, needs_local


@click.command("report", short_help="How a job went and why it was as fast as it was, as HTML and JSON.")
@FOLDER
@click.option(
    "--compare",
    "other",
    metavar="DIR2",
    type=click.Path(path_type=Path),
    help="Put another output folder beside it: figures with ratios, outputs row by row.",
)
@AS_JSON
def command(folder: Path, other: Path | None, as_json: bool) -> int:
    """Write report.html and report.json into an output folder, of a job that runs, has ended or died.

    With --compare they are called compare.html and compare.json. With --json nothing is written to the
    folder: the report goes to standard output.
    """
    from batchgen.job.report.collect import collect_report
    from batchgen.job.report.compare import compare
    from batchgen.job.report.page import outputs_line, verdict_line
    from batchgen.job.report.write import report_json, write_report
    from batchgen.text.terminal import safe_line
    from batchgen.types import StorageError

    if not as_json:
        needs_local("its run has put report.html there; add --json for a new report on standard output")
    report: dict[str, Any] = collect_report(folder)
    if other is not None:
        report["compare"] = compare(report, collect_report(other))
    if as_json:
        click.echo(report_json(report), nl=False)
        return 0
    try:
        page = write_report(folder, report, "report" if other is None else "compare")
    except StorageError as error:
        raise StorageError(f"{error}; add --json to have it on standard output instead") from error
    click.echo(safe_line(verdict_line(report)))
    if other is not None:
        click.echo(safe_line(outputs_line(report["compare"]["outputs"])))
    click.echo(safe_line(f"report: {page}"))
    return 0
