"""`batchgen run`: what flags mean, what is refused before a worker starts."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import batchgen.job.remote
from batchgen.cli.main import main
from batchgen.job.parts import Counts
from batchgen.job.run_options import JobSetup, RunHooks, RunOptions, RunResult

Write = Callable[..., str]
Captured = pytest.CaptureFixture[str]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[JobSetup, RunOptions]]:
    """Runs end at once; what they were asked to do is kept."""
    made: list[tuple[JobSetup, RunOptions]] = []

    def run_job(setup: JobSetup, options: RunOptions, hooks: RunHooks) -> RunResult:
        made.append((setup, options))
        return RunResult(75, "stopped (SIGTERM)", Counts())

    monkeypatch.setattr(batchgen.job.remote, "run_job", run_job)
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


@pytest.mark.parametrize("flag", ["--rows", "--max-time"])
def test_a_flag_without_a_value_is_not_a_flag_that_is_absent(
    write_job: Write, calls: list[Any], capsys: Captured, flag: str
) -> None:
    assert main(["run", write_job(), flag, ""]) == 2
    assert f"{flag} has no value" in capsys.readouterr().err
    assert not calls


def test_a_pattern_passes_over_what_the_job_itself_writes(
    write_job: Write, calls: list[tuple[JobSetup, RunOptions]]
) -> None:
    job = write_job()
    own = ["data/part-000000.jsonl", ".batchgen/commits/e000001.jsonl"]
    for name in [*own, "data/mine.jsonl", "other/data/part-000000.jsonl"]:
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text('{"prompt": "x"}\n')
    assert main(["run", job, "--set", "output=.", "--set", "input=.*/*/*.jsonl"]) == 3
    assert main(["run", job, "--set", "output=.", "--set", "input=**/*.jsonl"]) == 75
    files = [Path(file.path).relative_to(Path.cwd()) for file in calls[0][0].inputs.files]
    assert list(map(str, files)) == ["data/mine.jsonl", "other/data/part-000000.jsonl", "prompts.jsonl"]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("output=loop", "output.path: {here}/loop cannot be a folder (Too many levels of symbolic links)"),
        ("output=nowhere/x", "output.path: {here}/nowhere is a symbolic link to nothing"),
        ("output=" + "x" * 300, "cannot be a folder (File name too long)"),
        ('output="a\\0b"', "output.path: 'a\\x00b' holds a zero byte"),
        ('input="a\\0b"', "input.path: 'a\\x00b' holds a zero byte"),
        ('model="a\\0b"', "model.path: 'a\\x00b' holds a zero byte"),
        ('model.tokenizer="a\\0b"', "model.tokenizer: 'a\\x00b' holds a zero byte"),
    ],
)
def test_paths_that_cannot_be(
    write_job: Write, calls: list[Any], capsys: Captured, settings: str, said: str
) -> None:
    job = write_job()
    Path("loop").symlink_to("loop")
    Path("nowhere").symlink_to("gone")
    assert main(["run", job, "--set", settings]) == 2
    assert said.format(here=Path.cwd()) in capsys.readouterr().err


@pytest.mark.parametrize("verb", ["run", "validate"])
def test_a_place_that_takes_no_files(write_job: Write, calls: list[Any], capsys: Captured, verb: str) -> None:
    """Permissions say nothing of it, at least to root."""
    assert main([verb, write_job(), "--set", "output.path=/proc/out"]) == 5
    said = capsys.readouterr().err
    assert re.search(r"output\.path: no .* in /proc", said)
    assert calls == []


def test_a_place_that_is_read_only(
    write_job: Write, calls: list[Any], capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = write_job()
    monkeypatch.setattr(os, "statvfs", lambda place: SimpleNamespace(f_flag=os.ST_RDONLY, f_blocks=1))
    assert main(["run", job]) == 5
    assert f"output.path: {Path.cwd()} is on a read-only file system" in capsys.readouterr().err
