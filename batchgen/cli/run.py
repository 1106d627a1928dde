"""`batchgen run`: validate what needs no tokenizer, then run or continue the job."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import click

from batchgen.cli.options import JOB, SET

if TYPE_CHECKING:
    from batchgen.cli.checks import Prepared
    from batchgen.cli.progress import Display
    from batchgen.job.load import Override
    from batchgen.job.run_options import JobSetup, Launcher
    from batchgen.job.spec import JobSpec

ROWS_FOR_IDS = 10_000
"""`validate` looks at ten times as many; a run must begin within seconds on any input."""


@click.command("run", short_help="Run a job, or continue it where it stopped.")
@JOB
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Only the first N rows (input.limit).")
@SET
@click.option("--overwrite", is_flag=True, help="Remove what the output folder holds and start over.")
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
    sets: tuple[str, ...],
    overwrite: bool,
    max_time: str | None,
    progress: str | None,
) -> int:
    """Run a job, or continue it where it stopped. Finished rows are never computed again.

    Results go to the job's output folder, messages to standard error. Exit code 75 means that it stopped
    early, on a signal or at its time limit, and that the same command continues.
    """
    from batchgen.cli import checks
    from batchgen.cli.progress import make_progress
    from batchgen.job.load import load_job

    spec = load_job(job, [*sets, *_flags(limit, max_time, progress)])
    report = checks.Report()
    with closing(checks.check_job(spec, report, rows_for_ids=ROWS_FOR_IDS)) as found:
        report.raise_faults()
        setup = _setup(spec, found)
        with closing(make_progress(spec.run.progress)) as display:
            for note in (*spec.notes, *report.notes):
                display.note(f"note: {note}")
            return _run(spec, setup, display, launch, overwrite=overwrite)


def _flags(limit: int | None, max_time: str | None, progress: str | None) -> list[Override]:
    from batchgen.job.load import Override

    given = {
        "--limit": ("input.limit", limit),
        "--max-time": ("run.max_time", max_time),
        "--progress": ("run.progress", progress),
    }
    return [Override(key, str(value), flag) for flag, (key, value) in given.items() if value is not None]


def _setup(spec: JobSpec, found: Prepared) -> JobSetup:
    from batchgen.cli.checks import model_files
    from batchgen.job.fingerprints import fingerprint
    from batchgen.job.run_options import setup_from_spec
    from batchgen.job.worker_config import worker_config

    assert found.inputs is not None
    assert found.prompt is not None
    assert found.source is not None
    files = model_files(found.source, found.tokenizer_source)
    prints = fingerprint(spec, files, found.inputs.fingerprint())
    return setup_from_spec(spec, found.inputs, found.prompt, prints, worker_config(spec, found.prompt))


def _run(
    spec: JobSpec, setup: JobSetup, display: Display, launch: Launcher | None, *, overwrite: bool
) -> int:
    from batchgen.cli.progress import Tally
    from batchgen.dist.handle import launch_worker
    from batchgen.job.run import run_job
    from batchgen.job.run_options import options_from_spec

    tally = Tally(display)
    options = options_from_spec(spec, overwrite=overwrite)
    result = run_job(setup, options, launch=launch or launch_worker, report=tally.update, say=display.note)
    display.note(result.reason)
    if spoken := tally.lines():
        for line in (*spoken, f"results: {setup.output / 'data'}"):
            display.note(line)
    return result.exit_code
