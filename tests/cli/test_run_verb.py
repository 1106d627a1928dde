"""`batchgen run`: what flags mean, what is refused before a worker starts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import batchgen.job.run
from batchgen.cli.main import main
from batchgen.job.parts import Counts
from batchgen.job.run_options import JobSetup, RunOptions, RunResult

Write = Callable[..., str]
Captured = pytest.CaptureFixture[str]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[JobSetup, RunOptions]]:
    """Runs end at once; what they were asked to do is kept."""
    made: list[tuple[JobSetup, RunOptions]] = []

    def run_job(setup: JobSetup, options: RunOptions, **_: Any) -> RunResult:
        made.append((setup, options))
        return RunResult(75, "stopped (SIGTERM)", Counts())

    monkeypatch.setattr(batchgen.job.run, "run_job", run_job)
    return made


def test_flags_are_keys_of_the_job_file(
    write_job: Write, calls: list[tuple[JobSetup, RunOptions]], capsys: Captured
) -> None:
    job = write_job()
    flags = [
        "--limit",
        "1",
        "--rows",
        "5:",
        "--max-time",
        "1h30m",
        "--progress",
        "none",
        "--overwrite",
        "--set",
        "run.grace=3",
    ]
    assert main(["run", job, *flags]) == 75
    setup, options = calls[0]
    assert (setup.selection.limit, setup.selection.rows) == (1, "5:")
    assert (setup.columns, setup.part_rows) == (("prompt",), 1000)
    assert (options.max_time, options.grace, options.overwrite) == (5400.0, 3.0, True)
    assert capsys.readouterr().err == "stopped (SIGTERM)\n"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--max-time", "soon"], 2, "--max-time: run.max_time: 'soon' is not allowed"),
        (["--limit", "0"], 2, "0 is not in the range"),
        (["--gpus", "2"], 2, "No such option"),
        (["--set", "input=gone.jsonl"], 3, "gone.jsonl"),
        (["--set", "prompt.messages=chat"], 2, "the input has no column 'chat'"),
        (["--set", "model=./gone"], 2, "model.path"),
        (["--set", "output.path=prompts.jsonl"], 2, "is a file; give a folder"),
    ],
)
def test_what_is_wrong_is_said_before_a_worker_starts(
    write_job: Write,
    calls: list[tuple[JobSetup, RunOptions]],
    capsys: Captured,
    arguments: list[str],
    code: int,
    said: str,
) -> None:
    assert main(["run", write_job(), *arguments]) == code
    assert said in capsys.readouterr().err
    assert calls == []
    assert not Path("out").exists()


def test_several_faults_are_said_together(
    write_job: Write, calls: list[tuple[JobSetup, RunOptions]], capsys: Captured
) -> None:
    arguments = ["--set", "input=gone.jsonl", "--set", "model=./gone"]
    assert main(["run", write_job(), *arguments]) == 2
    said = capsys.readouterr().err
    assert "model.path" in said
    assert "gone.jsonl" in said
    assert calls == []
