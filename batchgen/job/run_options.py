"""What a run is given: the job in the form that the supervisor needs, and how to drive it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from batchgen.job.gates import Gate
from batchgen.job.selection import Selection

if TYPE_CHECKING:
    from batchgen.data.results import BatchLabels, OutputPlan
    from batchgen.data.source import InputSet
    from batchgen.job.fingerprints import Fingerprints
    from batchgen.job.ids import DuplicatePolicy
    from batchgen.job.parts import Counts
    from batchgen.job.progress import Progress
    from batchgen.job.retry import Retry
    from batchgen.job.spec.job import JobSpec
    from batchgen.text.prompt_spec import PromptSpec
    from batchgen.types import BatchgenError


class Worker(Protocol):
    """What the supervisor asks of a worker process; `batchgen.dist.handle.WorkerHandle` is it."""

    @property
    def pid(self) -> int: ...
    def send(self, message: Mapping[str, Any]) -> None: ...
    def poll(self) -> int | None: ...
    def wait(self, seconds: float) -> int | None: ...
    def kill(self) -> None: ...
    def close(self) -> None: ...
    def last_lines(self, count: int = 20) -> list[str]: ...


OnMessage = Callable[[dict[str, Any] | None], None]
Launcher = Callable[[Path, OnMessage], Worker]
"""From a log file and what to call with each message (None at the end) to a running worker."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSetup:
    """One job.

    Args:
        output: the folder; of one in an object store, the copy on this machine.
        url: of a folder in an object store.
        inputs: the rows; read here only while the run lasts.
        columns: that the prompt needs.
        fingerprints: of the job as it is now.
        worker_config: `config` of the worker's start message, without `pinned` and `counters`.
        new_plan: decides the output's columns, at the first attempt.
        suffix: of part files.
        compression: of parts.
        part_rows: rows in one part, at the first attempt.
        selection: which rows.
        duplicate_ids: `input.duplicate_ids`.
        grow: `input.grow`: refuse or append.
        resolved_job: text of job.resolved.yaml.
        retry: rows to compute anew, under `worker_config`; None for an ordinary run.
        commits: by name and revision of the model, the commit that it is; empty for local files.
    """

    output: Path
    inputs: InputSet
    columns: tuple[str, ...]
    fingerprints: Fingerprints
    worker_config: Mapping[str, Any]
    new_plan: Callable[[], OutputPlan]
    suffix: str
    compression: str
    part_rows: int
    selection: Selection
    duplicate_ids: DuplicatePolicy = "error"
    grow: str = "refuse"
    resolved_job: str
    url: str | None = None
    retry: Retry | None = None
    commits: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """How to drive a job; nothing here changes a result.

    Args:
        checkpoint_seconds: between group commits of the journal.
        lease_seconds: how long a silent owner elsewhere is waited for.
        grace: seconds from a stop signal to the exit.
        max_time: seconds after which the run stops by itself, resumable.
        min_free_disk: bytes that must stay free on the output's file system.
        max_errors: count (int) or share (float) of error rows above which the exit code is 8.
        fail_fast: stop at the first error row.
        stop_on_bad_row: stop at the first row that cannot be read.
        overwrite: remove what the folder holds and start over.
        accept_drift: keep what is finished and go on under other settings, or with another input behind it.
        workers: worker processes.
        window_parts: most parts that are open at a time; None: as many as keep the workers busy.
        in_flight_bytes: most bytes of rows that are with workers; as many may wait for them.
        order: of the rows in the open window: one of `row_order.ORDERS`.
        shuffle: seed of another order, if the rows are to be shuffled.
        priority: column of the rows' priority.
        poison: find out which row kills the engine and make it an error row; else such a row ends the run.
        hang_seconds: a worker that says nothing for so long while rows are with it is killed.
        gates: what must hold at the end, else the exit code is 8.
        began: time of the monotonic clock from which `max_time` counts.
        gpu_hour: what an hour of one device costs, for the report.
    """

    checkpoint_seconds: float = 5.0
    lease_seconds: float = 60.0
    grace: float = 20.0
    max_time: float | None = None
    min_free_disk: int = 1_000_000_000
    max_errors: int | float | None = None
    fail_fast: bool = False
    stop_on_bad_row: bool = False
    overwrite: bool = False
    accept_drift: bool = False
    workers: int = 1
    window_parts: int | None = None
    in_flight_bytes: int = 64 * 1024 * 1024
    order: str = "prefix"
    shuffle: int | None = None
    priority: str | None = None
    poison: bool = True
    hang_seconds: float = 600.0
    gates: tuple[Gate, ...] = ()
    began: float = field(default_factory=time.monotonic)
    gpu_hour: float | None = None

    def overdue(self, now: float) -> str | None:
        """Why the run must stop by itself at `now`, of the monotonic clock; None while it may go on."""
        if self.max_time is None or now - self.began < self.max_time:
            return None
        return f"run.max_time ({self.max_time:g} s) is over"


def _ignore(told: object) -> None:
    pass


def _nothing_beside(stop: Callable[[BatchgenError], None]) -> AbstractContextManager[None]:
    return nullcontext()


@dataclass(frozen=True, slots=True, kw_only=True)
class RunHooks:
    """What a run calls outside itself.

    Args:
        launch: starts a worker process; `batchgen.dist.handle.launch_worker` is one.
        report: called a few times a second with a snapshot, and at the end.
        say: called with sentences for the user.
        beside: entered while the run lasts, with what ends the run when it is called with an error.
    """

    launch: Launcher
    report: Callable[[Progress], None] = _ignore
    say: Callable[[str], None] = _ignore
    beside: Callable[[Callable[[BatchgenError], None]], AbstractContextManager[None]] = _nothing_beside


@dataclass(frozen=True, slots=True)
class RunResult:
    """How a run ended, when no error ended it.

    Args:
        exit_code: 0 complete, 8 complete but with too many errors, 75 stopped and resumable.
        reason: one sentence.
        counts: of all rows that have a result.
    """

    exit_code: int
    reason: str
    counts: Counts


def setup_from_spec(
    spec: JobSpec,
    inputs: InputSet,
    prompt: PromptSpec,
    fingerprints: Fingerprints,
    worker_config: Mapping[str, Any],
    commit: str | None = None,
    embedding_size: int | None = None,
) -> JobSetup:
    """The setup of a job file.

    Args:
        spec: the job.
        inputs: opened from it.
        prompt: bound to the input's columns.
        fingerprints: of the job as it is now.
        worker_config: as in `JobSetup`.
        commit: what the model's revision was resolved to.
        embedding_size: numbers in the vectors of the model, where its configuration says so.
    """
    from batchgen.data.results import plan_output
    from batchgen.data.sink import part_suffix
    from batchgen.job.manifest import revision_name
    from batchgen.job.resolved import resolved_yaml
    from batchgen.job.spec.job import part_rows_auto
    from batchgen.types import Task

    return JobSetup(
        output=spec.output_folder,
        url=spec.output_url,
        inputs=inputs,
        columns=_in_order(prompt.required_columns(), prompt),
        fingerprints=fingerprints,
        worker_config=worker_config,
        new_plan=lambda: plan_output(
            inputs,
            format=spec.output.format,
            columns=spec.input.columns,
            renames=spec.output.columns,
            include=spec.output.include,
            batch=batch_labels(spec, fingerprints),
            dialogues=spec.sampling.turns is not None,
            samples=spec.samples,
            reasoning=spec.sampling.reasoning_column,
            task=Task(spec.task),
            embedding_size=embedding_size if spec.task == Task.EMBED else None,
        ),
        suffix=part_suffix(spec.output.format, spec.output.compression),
        compression=spec.output.compression,
        part_rows=part_rows_auto(spec),
        selection=Selection.of(spec.input.rows, spec.input.limit),
        duplicate_ids=spec.input.duplicate_ids,
        grow=spec.input.grow,
        resolved_job=resolved_yaml(spec),
        commits={revision_name(spec.model.path, spec.model.revision): commit} if commit else {},
    )


def batch_labels(spec: JobSpec, fingerprints: Fingerprints) -> BatchLabels:
    """What the format openai_batch says of a job: the same for the same job in any folder."""
    from batchgen.data.results import BatchLabels

    digests = fingerprints.digests()
    identity = sha256(f"{digests['input']}/{digests['result']}".encode()).hexdigest()[:16]
    return BatchLabels(identity, model_label(spec), chat=spec.prompt.mode == "chat")


def model_label(spec: JobSpec) -> str:
    """What the model is called: of a local one only its own name; where it lies means nothing to a reader."""
    path = spec.model.path.rstrip("/")
    return path.rpartition("/")[2] if path.startswith("/") else path


def _in_order(columns: frozenset[str], prompt: PromptSpec) -> tuple[str, ...]:
    """Columns in the order in which the prompt shows them: equal beginnings then sort together."""
    text = "".join(prompt.templates().values())
    return tuple(sorted(columns, key=lambda name: (text.find(name) % (len(text) + 1), name)))


def _slurm_seconds(grace: float) -> float | None:
    """Seconds until Slurm ends the job, less the grace; None outside Slurm."""
    end = os.environ.get("SLURM_JOB_END_TIME", "")
    return max(1.0, int(end) - time.time() - grace) if end.isdecimal() else None


def options_from_spec(
    spec: JobSpec, *, overwrite: bool = False, accept_drift: bool = False, began: float | None = None
) -> RunOptions:
    """The options of a job file.

    Args:
        began: when the command began, by the monotonic clock; None for now.
    """
    run = spec.run
    now = time.monotonic()
    began = now if began is None else began
    slurm = _slurm_seconds(run.grace)
    return RunOptions(
        checkpoint_seconds=run.checkpoint_seconds,
        lease_seconds=run.lease_seconds,
        grace=run.grace,
        max_time=slurm + (now - began) if run.max_time is None and slurm is not None else run.max_time,
        min_free_disk=run.min_free_disk,
        max_errors=run.max_errors,
        fail_fast=run.fail_fast,
        stop_on_bad_row=spec.input.on_bad_row == "stop",
        overwrite=overwrite,
        accept_drift=accept_drift,
        # One engine uses every core of a CPU; several are for devices.
        workers=1 if run.workers == "auto" else run.workers,
        order=run.order,
        shuffle=None if spec.input.shuffle is None else spec.input.shuffle["seed"],
        priority=run.priority,
        poison=run.poison == "bisect",
        gates=tuple(Gate.parse(measure, condition) for measure, condition in (run.gates or {}).items()),
        began=began,
        gpu_hour=None if run.cost is None else run.cost["gpu_hour"],
    )
