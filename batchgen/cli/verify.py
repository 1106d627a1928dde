"""`batchgen verify`: prove that an output folder holds every row once, in order and undamaged."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

import click

from batchgen.cli.options import AS_JSON, FOLDER, print_json

if TYPE_CHECKING:
    from batchgen.data.source import InputSet
    from batchgen.job.fingerprints import Fingerprints
    from batchgen.job.run_options import Launcher
    from batchgen.job.spec.job import JobSpec
    from batchgen.job.verify import VerifyReport

FAULTY = 8


@click.command("verify", short_help="Prove that a folder holds every row once, in order and undamaged.")
@FOLDER
@click.option(
    "--deep",
    type=click.IntRange(min=1),
    metavar="N",
    help="Also compute N random rows again and compare text, finish reason and usage.",
)
@AS_JSON
@click.pass_obj
def command(launch: Launcher | None, folder: Path, deep: int | None, as_json: bool) -> int:
    """Read a whole output folder and prove that it holds every row of its job once, in order and undamaged.

    Input and model are compared with what they were, where they are still there. Exit code 8 means that
    something is wrong.
    """
    from batchgen.text.terminal import safe

    report = _verify(folder)
    if deep is not None:
        from batchgen.api.deep import verify_deep

        verify_deep(folder, deep, report, launch)
    if as_json:
        print_json(report.to_json())
    else:
        for sentence in (*(f"note: {note}" for note in report.notes), *report.faults):
            click.echo(safe(sentence))
        verdict = "nothing is wrong" if report.ok else _count(len(report.faults), "fault")
        held = f"{_count(report.rows, 'row')} in {_count(report.parts, 'part')}"
        click.echo(f"{safe(report.folder)}: {held}, {verdict}")
    return 0 if report.ok else FAULTY


def _count(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def _verify(folder: Path) -> VerifyReport:
    from batchgen.job.verify import verify_folder

    notes: list[str] = []
    spec = _resolved_job(folder, notes)
    inputs = None if spec is None else _inputs(spec, notes)
    if spec is None or inputs is None:
        report = verify_folder(folder)
    else:
        with closing(inputs):
            report = verify_folder(folder, inputs, _fingerprints(spec, inputs, notes))
    report.notes += notes
    return report


def _resolved_job(folder: Path, notes: list[str]) -> JobSpec | None:
    from batchgen.job.folder import JobFolder
    from batchgen.job.load import load_job
    from batchgen.types import BatchgenError

    try:
        return load_job(JobFolder(folder).resolved_job)
    except BatchgenError as error:
        notes.append(f"input and model were not compared: {error}")
        return None


def _inputs(spec: JobSpec, notes: list[str]) -> InputSet | None:
    from batchgen.api.job_input import open_job_input
    from batchgen.types import BatchgenError

    try:
        return open_job_input(spec)
    except BatchgenError as error:
        notes.append(f"input and model were not compared: {error}")
        return None


def _fingerprints(spec: JobSpec, inputs: InputSet, notes: list[str]) -> Fingerprints | None:
    from batchgen.api.job_model import find_model, find_tokenizer, model_files, recorded_commit
    from batchgen.job.fingerprints import fingerprint
    from batchgen.types import BatchgenError

    try:
        files = model_files(find_model(spec, recorded_commit(spec)), find_tokenizer(spec))
        return fingerprint(spec, files, inputs.fingerprint())
    except BatchgenError as error:
        notes.append(f"the model was not compared: {error}")
        return None
