"""`batchgen status`: how far a job is and who works on it, from its output folder alone."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from batchgen.cli.options import AS_JSON, FOLDER, print_json

if TYPE_CHECKING:
    from batchgen.job.status import JobStatus

MESSAGES = 5


@click.command("status", short_help="How far a job is, who works on it, its last error; from any host.")
@FOLDER
@AS_JSON
def command(folder: Path, as_json: bool) -> int:
    """Show how far the job of an output folder is and who works on it, running or dead, from any host."""
    from batchgen.cli.terminal import safe
    from batchgen.job.status import read_status

    status = read_status(folder)
    eta = _seconds_left(status)
    if as_json:
        print_json({**status.to_json(), "eta_seconds": eta})
    else:
        click.echo(safe("\n".join(_lines(status, eta))))
    return 0


def _seconds_left(status: JobStatus) -> float | None:
    """At this attempt's speed in tokens, rows that are left being as long as those before them."""
    from batchgen.cli.progress import tokens_left
    from batchgen.job.progress import Progress

    if status.state != "running" or status.progress is None:
        return None
    progress = Progress(**status.progress)
    left, tokens = tokens_left(progress), progress.prompt_tokens + progress.output_tokens
    return left * progress.seconds / tokens if left is not None and tokens else None


def _lines(status: JobStatus, eta: float | None) -> list[str]:
    from batchgen.cli.progress import clock

    total = "an unknown number of" if status.rows_total is None else f"{status.rows_total:,}"
    skipped = f", {status.skipped:,} skipped" if status.skipped else ""
    lines = [
        f"{status.folder}: {status.state}",
        f"rows      {status.rows_done:,} of {total}: {status.ok:,} ok, {status.error:,} failed{skipped}",
        f"parts     {status.parts:,} with {status.rows_in_parts:,} rows; the journal holds the rest",
        f"tokens    {status.tokens_sampled:,} sampled, {status.tokens_lost:,} to be computed again",
        f"attempts  {status.attempts:,}",
    ]
    if status.state == "running":
        lines.append(f"rate      {status.rows_per_second:,.2f} rows/s, ETA {clock(eta)}")
    if status.owner is not None:
        released = "released" if status.owner["released"] else f"beat {status.owner['beat']}"
        lines.append(f"lease     process {status.owner['pid']} on {status.owner['host']}, {released}")
    last = status.last_attempt["number"] if status.last_attempt is not None else None
    for worker in status.workers:
        if worker.attempt == last:
            end = worker.end or ("running" if status.state == "running" else "end not seen")
            lines.append(
                f"worker    {worker.number}, process {worker.pid}: {end}, {worker.sampled:,} tokens sampled"
            )
    if status.last_error is not None:
        lines.append(f"error     {status.last_error}")
    lines += [f"note      {message}" for message in status.messages[-MESSAGES:]]
    return lines
