"""`batchgen run`: validate what needs no tokenizer, then run or continue the job."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from batchgen.cli.options import JOB, SET

if TYPE_CHECKING:
    from batchgen.job.load import Override
    from batchgen.job.run_options import Launcher


@click.command("run", short_help="Run a job, or continue it where it stopped.")
@JOB
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Only the first N rows (input.limit).")
@click.option(
    "--rows",
    metavar="A:B",
    help="Only rows A to B-1 of the input, from 0 (input.rows); A: and :B too.",
)
@SET
@click.option("--overwrite", is_flag=True, help="Remove what the output folder holds and start over.")
@click.option(
    "--accept-drift",
    is_flag=True,
    help="Where the job has changed: keep what is finished, compute the other rows as the job says now.",
)
@click.option(
    "--workers", type=click.IntRange(min=1), metavar="N", help="Engine processes (run.workers); same output."
)
@click.option("--max-time", metavar="DURATION", help="Stop by then, to be continued (run.max_time): 90m, 8h.")
@click.option(
    "--progress",
    type=click.Choice(["auto", "bar", "plain", "json", "none"]),
    help="How to show progress (run.progress).",
)
@click.pass_obj
def command(
    launch: Launcher | None,
    job: Path,
    limit: int | None,
    rows: str | None,
    sets: tuple[str, ...],
    overwrite: bool,
    accept_drift: bool,
    workers: int | None,
    max_time: str | None,
    progress: str | None,
) -> int:
    """Run a job, or continue it where it stopped. Finished rows are never computed again.

    Results go to the job's output folder, messages to standard error. Exit code 75 means that it stopped
    early, on a signal or at its time limit, and that the same command continues.
    """
    from batchgen.api.job import Job
    from batchgen.job.load import load_job

    flags = _flags(
        ("--limit", "input.limit", limit),
        ("--rows", "input.rows", rows),
        ("--workers", "run.workers", workers),
        ("--max-time", "run.max_time", max_time),
        ("--progress", "run.progress", progress),
    )
    job_run = Job.from_spec(load_job(job, [*sets, *flags]))
    return job_run.run(overwrite=overwrite, accept_drift=accept_drift, launch=launch).exit_code


def _flags(*flags: tuple[str, str, Any]) -> list[Override]:
    """Keys of the job file that were given as flags."""
    from batchgen.job.load import Override

    for flag, _, value in flags:
        if value == "":
            # As of a shell variable that is not set: to run without the limit would be the worst answer.
            raise click.UsageError(f"{flag} has no value; give one, or leave {flag} out")
    return [Override(key, str(value), flag) for flag, key, value in flags if value is not None]
