"""Runs a job with the fake engine, in this process or as a program that tests can kill.

As a program: `python job_driver.py SETTINGS.json`; prints what `run_job` says, exits with its code.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fake_engine import launcher

from batchgen.data.results import DEFAULT_INCLUDE, BatchLabels, plan_output
from batchgen.data.row_result import INCLUDED
from batchgen.data.sink import part_suffix
from batchgen.data.source import open_input
from batchgen.job import lease
from batchgen.job.files import FileOps
from batchgen.job.fingerprints import Fingerprints
from batchgen.job.retry import Retry
from batchgen.job.run import run_job
from batchgen.job.run_options import JobSetup, Launcher, RunHooks, RunOptions, RunResult
from batchgen.job.selection import Selection
from batchgen.types import BatchgenError, Task

CRASHED = 99


@dataclass(kw_only=True)
class Settings:
    """A job with the fake engine; JSON-able. `worker` holds arguments of `fake_engine.Behaviour`."""

    output: str
    input: str
    task: str = "generate"
    format: str = "jsonl"
    compression: str = "none"
    part_rows: int = 10
    limit: int | None = None
    rows: str | None = None
    where: str | None = None
    duplicate_ids: str = "error"
    grow: str = "refuse"
    temperature: float = 0.0
    include: list[str] = field(default_factory=lambda: list(DEFAULT_INCLUDE))
    renames: dict[str, str] = field(default_factory=dict)
    seed: int = 1
    max_tokens: int = 20
    n: int = 1
    samples: str = "list"
    max_num_seqs: int = 8
    scored: dict[str, int] = field(default_factory=dict)
    row_timeout: float | None = None
    worker: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    crash_at: int | None = None
    freeze_at: int | None = None
    elsewhere: bool = False
    retry: dict[str, Any] | None = None
    weights: dict[str, Any] = field(default_factory=dict)
    layout: dict[str, Any] = field(default_factory=dict)

    def worker_config(self) -> dict[str, Any]:
        return {
            "model": "fake",
            "prompt": {"mode": "completion", "task": self.task},
            "sampling": {"max_tokens": self.max_tokens, "seed": self.seed, **self.several, **self.scored},
            "samples": self.n > 1,
            "order": "input",
            "row_timeout": self.row_timeout,
            "engine": {"max_num_seqs": self.max_num_seqs},
            "include": [key for key in INCLUDED if key in self.include],
        }

    @property
    def several(self) -> dict[str, Any]:
        """What `sampling` says of samples."""
        return {"n": self.n, "temperature": 1.0} if self.n > 1 else {}

    def launcher(self) -> Launcher:
        return launcher({"tokens_per_step": 1, "step_seconds": 0.0005, **self.worker})

    def run_options(self) -> RunOptions:
        quick: dict[str, Any] = {"checkpoint_seconds": 0.05, "min_free_disk": 0, "lease_seconds": 2.0}
        return RunOptions(**{**quick, **self.options})


def setup_of(settings: Settings) -> JobSetup:
    inputs = open_input([settings.input], where=settings.where)
    result = {**result_of(settings.temperature), "weights": settings.weights, "output": settings.layout}
    fingerprints = Fingerprints(
        input={"format": 1, "files": inputs.fingerprint(), "where": settings.where},
        result=result,
        engine={"workers": 1},
    )
    return JobSetup(
        output=Path(settings.output),
        inputs=inputs,
        columns=("prompt", "continuation") if settings.task == "loglikelihood" else ("prompt",),
        fingerprints=fingerprints,
        worker_config=settings.worker_config(),
        new_plan=lambda: plan_output(
            inputs,
            format=settings.format,
            include=settings.include,
            renames=settings.renames,
            task=Task(settings.task),
            embedding_size=2,
            batch=BatchLabels("0123456789abcdef", "fake", chat=True),
            samples=settings.samples if settings.n > 1 else None,
        ),
        suffix=part_suffix(settings.format, settings.compression),
        compression=settings.compression,
        part_rows=settings.part_rows,
        selection=Selection.of(settings.rows, settings.limit),
        grow=settings.grow,
        duplicate_ids=settings.duplicate_ids,  # type: ignore[arg-type]
        resolved_job="model: fake\n",
        retry=retry_of(settings),
    )


def result_of(temperature: float) -> dict[str, Any]:
    return {"model": {"dtype": "auto", "max_model_len": None}, "sampling": {"temperature": temperature}}


def retry_of(settings: Settings) -> Retry | None:
    if settings.retry is None:
        return None
    temperature = settings.retry["temperature"]
    sets = () if temperature is None else (f"sampling.temperature={temperature}",)
    result = {
        **result_of(settings.temperature if temperature is None else temperature),
        "weights": settings.weights,
        "output": settings.layout,
    }
    return Retry(where=settings.retry["where"], sets=sets, result=result)


def run_here(settings: Settings, said: list[str] | None = None) -> RunResult:
    """Run in this process."""
    setup = setup_of(settings)
    try:
        say = (lambda sentence: None) if said is None else said.append
        return run_job(setup, settings.run_options(), RunHooks(launch=settings.launcher(), say=say))
    finally:
        setup.inputs.close()


def start(settings: Settings) -> subprocess.Popen[str]:
    """Run as a process of its own."""
    return subprocess.Popen(
        [sys.executable, __file__, json.dumps(asdict(settings))],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def crash_at(number: int) -> None:
    """End this process, as a kill would, in its n-th operation on files; a write is cut in half."""
    at_operation(number, lambda: os._exit(CRASHED), half_written=True)


def freeze_at(number: int) -> None:
    """Stop this process, until somebody wakes it, right before its n-th operation on files."""
    at_operation(number, lambda: os.kill(os.getpid(), signal.SIGSTOP), half_written=False)


def elsewhere() -> None:
    """Let this process be on another host, as far as leases can tell: no lock, no process ids in common."""
    lease._boot_id = lambda: "another boot"  # type: ignore[assignment]
    lease.socket.gethostname = lambda: "faraway"
    lease._try_lock = lambda path: lease._NO_LOCKS


def at_operation(number: int, act: Callable[[], None], *, half_written: bool) -> None:
    """Call `act` before the n-th operation on files."""
    remaining = itertools.count(number, -1)

    def dying(real: Any, half: Any = None) -> Any:
        def operate(*arguments: Any) -> Any:
            if next(remaining) == 1:
                if half is not None and half_written:
                    *rest, data = arguments
                    half(*rest, data[: len(data) // 2])
                act()
            return real(*arguments)

        return operate

    for name in ("create", "fsync", "fsync_folder"):
        setattr(FileOps, name, dying(getattr(FileOps, name)))
    # Journal, logs and parts all write with it.
    os.write = dying(os.write, half=os.write)
    os.replace = dying(os.replace)


def main() -> int:
    # Whoever started this may have ignored them.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    settings = Settings(**json.loads(sys.argv[1]))
    if settings.crash_at is not None:
        crash_at(settings.crash_at)
    if settings.freeze_at is not None:
        freeze_at(settings.freeze_at)
    if settings.elsewhere:
        elsewhere()
    setup = setup_of(settings)
    try:
        hooks = RunHooks(launch=settings.launcher(), say=lambda sentence: print(sentence, flush=True))
        result = run_job(setup, settings.run_options(), hooks)
        print(result.reason, flush=True)
        return result.exit_code
    except BatchgenError as error:
        print(error, flush=True)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
