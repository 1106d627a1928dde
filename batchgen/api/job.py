"""`batchgen.Job`: a job file, or the same keys as a dict, run from Python. The `run` verb uses it too."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from batchgen.api.arguments import local_path
from batchgen.api.results import Results
from batchgen.job.faults import show_value
from batchgen.job.load import job_from_values, load_job
from batchgen.job.python_values import overrides_of, plain_values
from batchgen.types import BatchgenError, UsageError

if TYPE_CHECKING:
    from batchgen.api.checks import Prepared
    from batchgen.api.progress import Display
    from batchgen.job.progress import Progress
    from batchgen.job.run_options import JobSetup, Launcher, RunOptions, RunResult
    from batchgen.job.spec.job import JobSpec

ROWS_FOR_IDS = 10_000
"""`validate` looks at ten times as many; a run must begin within seconds on any input."""


class JobResult(Results):
    """How a run ended, and the rows that are final.

    Args:
        folder: the output folder.
        run: how it ended.

    Attributes:
        exit_code: 0 complete, 8 complete but with too many errors, 75 stopped and to be continued.
        reason: one sentence.
    """

    def __init__(self, folder: Path, run: RunResult) -> None:
        super().__init__(folder)
        self.exit_code = run.exit_code
        self.reason = run.reason

    @property
    def ok(self) -> bool:
        """Whether every row is final and the job's gates hold."""
        return self.exit_code == 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """What is asked of one run; the arguments of `Job.run`."""

    overwrite: bool = False
    accept_drift: bool = False
    on_progress: Callable[[Progress], None] | None = None
    display: Display | None = None
    launch: Launcher | None = None


class Job:
    """A job to be run, or continued, as often as needed.

    Args:
        values: the keys of a job file, nested as there; relative paths are relative to the working folder.
            A path may be an `os.PathLike`.

    Raises:
        UsageError: lists every fault.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        if not isinstance(values, Mapping):
            raise UsageError(
                f"Job: {show_value(values)} is not a dict with the keys of a job file; give one, or load a "
                "job file with bg.Job.from_yaml(path)"
            )
        self.spec = job_from_values(plain_values(values), Path.cwd())

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str], overrides: Mapping[str, Any] | None = None) -> Self:
        """A job file.

        Args:
            path: of the file.
            overrides: dotted keys to values, as with `--set`; a path may be an `os.PathLike`.

        Raises:
            UsageError: lists every fault.
        """
        return cls.from_spec(load_job(local_path("path", path), overrides_of(overrides)))

    @classmethod
    def from_spec(cls, spec: JobSpec) -> Self:
        """A job that is loaded already."""
        job = cls.__new__(cls)
        job.spec = spec
        return job

    def validate(self) -> list[BatchgenError]:
        """What is wrong with the job, as far as it can be known without the model's weights."""
        from batchgen.api import checks
        from batchgen.api.check_model import check_model
        from batchgen.api.check_output import check_output_writable
        from batchgen.api.check_prompt import check_prompt
        from batchgen.api.check_report import Report
        from batchgen.api.job_model import load_tokenizer

        report = Report()
        with closing(checks.check_job(self.spec, report, rows_for_ids=checks.ROWS_FOR_IDS)) as found:
            with report.check("output", "path"):
                check_output_writable(self.spec)
            if found.prompt is not None and found.source is not None:
                with report.check():
                    tokenizer = load_tokenizer(found.tokenizer_source or found.source)
                    check_prompt(self.spec, found.prompt, tokenizer, report, found.inputs)
            if found.source is not None:
                check_model(self.spec, found.source, report)
        return report.faults

    def run(
        self,
        *,
        overwrite: bool = False,
        accept_drift: bool = False,
        on_progress: Callable[[Progress], None] | None = None,
        display: Display | None = None,
        launch: Launcher | None = None,
    ) -> JobResult:
        """Run the job, or continue it where it stopped; finished rows are never computed again.

        In the main thread, signals that ask to stop (Ctrl-C too) end the run gracefully: the result then
        has exit code 75, and the same call continues.

        Args:
            overwrite: remove what the output folder holds and start over.
            accept_drift: where the job differs from the one that the folder belongs to, keep what is finished
                and compute the other rows as the job says now.
            on_progress: called a few times a second.
            display: shows progress; None: as `run.progress` says, on standard error.
            launch: starts a worker process; None: one of this machine.

        Raises:
            BatchgenError: what ended the run; its `exit_code` is that of the command line. Finished rows are
                on disk.
        """
        request = RunRequest(
            overwrite=overwrite,
            accept_drift=accept_drift,
            on_progress=on_progress,
            display=display,
            launch=launch,
        )
        return drive(self.spec, lambda found: setup_of(self.spec, found), request)


def drive(spec: JobSpec, prepare: Callable[[Prepared], JobSetup], request: RunRequest) -> JobResult:
    """Check a job, run it, and say how it ended. Errors as of `Job.run`.

    Args:
        spec: the job.
        prepare: from what the checks opened to what the supervisor needs.
        request: how it is to be run.
    """
    from batchgen.api import checks
    from batchgen.api.check_model import check_model
    from batchgen.api.check_output import check_output_permission
    from batchgen.api.check_report import Report
    from batchgen.api.progress import make_progress
    from batchgen.job.metrics import serve_metrics
    from batchgen.job.run_options import options_from_spec
    from batchgen.job.stop_signals import stoppable

    began = time.monotonic()
    report = Report()
    checked = checks.check_job(spec, report, rows_for_ids=ROWS_FOR_IDS, resume=not request.overwrite)
    with stoppable(), closing(checked) as found:
        with report.check():
            check_output_permission(spec)
        # Whoever brings workers brings what they can run.
        if request.launch is None and found.source is not None:
            check_model(spec, found.source, report)
        report.raise_faults()
        setup = prepare(found)
        options = options_from_spec(
            spec, overwrite=request.overwrite, accept_drift=request.accept_drift, began=began
        )
        with closing(request.display or make_progress(spec.run.progress)) as shown:
            for note in (*spec.notes, *report.notes):
                shown.note(f"note: {note}")
            with serve_metrics(spec.run.metrics, spec.name or setup.output.name, shown.note) as count:
                observers = [observe for observe in (count, request.on_progress) if observe is not None]
                result = _run(setup, shown, options, observers, request.launch)
            if spec.output.push_to_hub is not None:
                _push(spec, setup, result, shown)
    return JobResult(setup.output, result)


def _push(spec: JobSpec, setup: JobSetup, result: RunResult, display: Display) -> None:
    """Push what is complete and within its gates."""
    from batchgen.job.push import push_folder

    assert spec.output.push_to_hub is not None
    if result.exit_code == 0:
        push_folder(setup.output, spec.output.push_to_hub, spec.output.format, display.note)


def _run(
    setup: JobSetup,
    display: Display,
    options: RunOptions,
    observers: Sequence[Callable[[Progress], None]],
    launch: Launcher | None,
) -> RunResult:
    from batchgen.api.progress import Tally
    from batchgen.dist.handle import launch_worker
    from batchgen.job.remote import run_job_anywhere
    from batchgen.job.run_options import RunHooks

    tally = Tally(display)

    def report(snapshot: Progress) -> None:
        tally.update(snapshot)
        for observe in observers:
            observe(snapshot)

    hooks = RunHooks(launch=launch or launch_worker, report=report, say=display.note)
    result = run_job_anywhere(setup, options, hooks)
    display.note(result.reason)
    place = setup.output / "data" if setup.url is None else f"{setup.url.rstrip('/')}/data"
    if spoken := tally.lines():
        for line in (*spoken, f"results: {place}"):
            display.note(line)
    return result


def setup_of(spec: JobSpec, found: Prepared) -> JobSetup:
    """From a job that was checked to what the supervisor needs."""
    from batchgen.api.job_model import model_files
    from batchgen.job.fingerprints import fingerprint
    from batchgen.job.run_options import setup_from_spec
    from batchgen.job.worker_config import worker_config
    from batchgen.models.pooling import embedding_size

    assert found.inputs is not None
    assert found.prompt is not None
    assert found.source is not None
    found.source.fetch_weights()
    commit = found.source.commit
    files = model_files(found.source, found.tokenizer_source)
    prints = fingerprint(spec, files, found.inputs.fingerprint())
    config = worker_config(spec, found.prompt, commit)
    size = embedding_size(found.source.tokenizer_folder())
    return setup_from_spec(spec, found.inputs, found.prompt, prints, config, commit, size)
