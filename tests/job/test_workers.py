"""Several workers fed by one supervisor: the same bytes, whatever becomes of one of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from job_driver import Settings, run_here
from job_inputs import data_bytes, read_output, write_jsonl

from batchgen.job.attempts import read_attempts
from batchgen.job.folder import JobFolder
from batchgen.job.run_stats import read_rows


def job(tmp_path: Path, name: str, rows: int = 120, **changes: Any) -> Settings:
    path = tmp_path / "in.jsonl"
    if not path.exists():
        write_jsonl(path, rows)
    return Settings(output=str(tmp_path / name), input=str(path), **changes)


def test_three_workers_write_the_bytes_of_one(tmp_path: Path) -> None:
    one = job(tmp_path, "one")
    run_here(one)
    three = job(tmp_path, "three", options={"workers": 3}, worker={"step_seconds": 0.02})
    assert run_here(three).exit_code == 0
    assert data_bytes(tmp_path / "three") == data_bytes(tmp_path / "one")
    (attempt,) = read_attempts(JobFolder(tmp_path / "three"))
    assert [w["end"] for w in attempt.workers] == ["ended with exit code 0"] * 3
    lines = read_rows(JobFolder(tmp_path / "three"), [])
    assert len({worker for line in lines for worker in line.get("worker", ())}) >= 2


@pytest.mark.parametrize("poison", [True, False])
def test_a_death_of_one_takes_only_its_rows_back(tmp_path: Path, poison: bool) -> None:
    one = job(tmp_path, "one")
    run_here(one)
    (tmp_path / "state").mkdir()
    fault = {"do": "kill", "after_tokens": 60, "times": 1}
    worker = {"faults": [fault], "state": str(tmp_path / "state"), "step_seconds": 0.003}
    three = job(tmp_path, "three", options={"workers": 3, "poison": poison}, worker=worker)
    said: list[str] = []
    assert run_here(three, said).exit_code == 0
    assert data_bytes(tmp_path / "three") == data_bytes(tmp_path / "one")
    (attempt,) = read_attempts(JobFolder(tmp_path / "three"))
    assert sorted(w["end"] for w in attempt.workers)[-1] == "was killed by SIGKILL"
    assert len(attempt.workers) <= 4
    assert sum("SIGKILL" in sentence for sentence in said) == 1


def test_the_job_goes_on_with_the_workers_that_start(tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    # Whoever comes after the first finds no memory.
    first = {"do": "exit", "at_start": True, "spare": 1}
    worker = {"faults": [first], "state": str(tmp_path / "state"), "step_seconds": 0.02}
    settings = job(tmp_path, "out", options={"workers": 2}, worker=worker)
    said: list[str] = []
    assert run_here(settings, said).exit_code == 0
    assert any("a further worker does not start; going on with 1" in sentence for sentence in said)
    assert len(read_output(tmp_path / "out")) == 120


def test_few_rows_start_few_workers(tmp_path: Path) -> None:
    settings = job(tmp_path, "out", rows=2, options={"workers": 8})
    assert run_here(settings).exit_code == 0
    (attempt,) = read_attempts(JobFolder(tmp_path / "out"))
    assert len(attempt.workers) <= 2


def test_later_workers_repeat_the_choices_of_the_first(tmp_path: Path) -> None:
    """Each would choose a length of its own, by the memory that it finds."""
    settings = job(tmp_path, "out", options={"workers": 3}, worker={"unpinned": True, "step_seconds": 0.01})
    assert run_here(settings).exit_code == 0
    (attempt,) = read_attempts(JobFolder(tmp_path / "out"))
    assert len(attempt.workers) == 3
