"""Rows that kill the engine, and engines that die whatever the rows.

One through the command line is in `tests/cases/test_hard_endings.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from job_driver import Settings, run_here
from job_inputs import read_output

from batchgen.job.folder import JobFolder
from batchgen.job.poison import GUILTY
from batchgen.types import EngineError

ROWS = 200


def job(tmp_path: Path, rows: int = ROWS, name: str = "out", **changes: Any) -> Settings:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"prompt {row}"}) + "\n" for row in range(rows)))
    (tmp_path / "state").mkdir(exist_ok=True)
    return Settings(output=str(tmp_path / name), input=str(path), **{"max_num_seqs": 8, **changes})


def poison(tmp_path: Path, *rows: int, do: str = "kill", **changes: Any) -> dict[str, Any]:
    faults = [{"do": do, "rows": [row], **changes} for row in rows]
    return {"step_seconds": 0, "faults": faults, "state": str(tmp_path / "state")}


def check(settings: Settings, guilty: set[int], rows: int = ROWS) -> None:
    """Exactly the guilty rows are errors; every other byte is that of an engine without faults."""
    read = read_output(Path(settings.output))
    assert [r["row"] for r in read] == list(range(rows))
    crashed = {r["row"] for r in read if r["status"] == "error"}
    assert crashed == guilty
    assert {r["error"]["message"] for r in read if r["row"] in guilty} <= {GUILTY}
    assert {r["error"]["class"] for r in read if r["row"] in guilty} <= {"engine_crash"}
    calm = Settings(output=settings.output + "-calm", input=settings.input, worker={"step_seconds": 0})
    run_here(calm)
    expected = read_output(Path(calm.output))
    assert [r for r in read if r["row"] not in guilty] == [e for e in expected if e["row"] not in guilty]
    assert not JobFolder(Path(settings.output)).suspects.exists()


@pytest.mark.parametrize(("rows", "workers", "do"), [((0,), 1, "segfault"), ((5, 90, 199), 3, "exit")])
def test_a_row_that_always_kills_the_engine_is_found(
    tmp_path: Path, rows: tuple[int, ...], workers: int, do: str
) -> None:
    settings = job(tmp_path, worker=poison(tmp_path, *rows, do=do), options={"workers": workers})
    result = run_here(settings)
    assert (result.exit_code, result.counts.error) == (0, len(rows))
    check(settings, set(rows))


def test_a_row_that_kills_now_and_then_finishes(tmp_path: Path) -> None:
    settings = job(tmp_path, worker=poison(tmp_path, 40, 150, times=2))
    said: list[str] = []
    assert run_here(settings, said).exit_code == 0
    check(settings, set())
    assert any("apart from others" in sentence for sentence in said)


def test_without_bisection_the_run_ends_and_keeps_what_was_done(tmp_path: Path) -> None:
    settings = job(tmp_path, worker=poison(tmp_path, 77), options={"poison": False})
    with pytest.raises(EngineError, match=r"SIGKILL, 4 times in a row.*last words:\s+the fake engine chokes"):
        run_here(settings)
    settings.worker = {"step_seconds": 0}
    assert run_here(settings).exit_code == 0
    check(settings, set())


@pytest.mark.parametrize(
    "fault",
    [
        {"do": "exit", "at_start": True},
        {"do": "kill", "rows": list(range(ROWS))},
        {"do": "fatal", "exit_code": 7, "message": "the card fell off the bus", "rows": list(range(ROWS))},
    ],
)
@pytest.mark.parametrize("workers", [1, 2])
def test_an_engine_that_always_dies_blames_no_row(
    tmp_path: Path, fault: dict[str, Any], workers: int
) -> None:
    settings = job(tmp_path, worker={"step_seconds": 0, "faults": [fault]}, options={"workers": workers})
    with pytest.raises(EngineError, match="times in a row without a single new result"):
        run_here(settings)
    settings.worker = {"step_seconds": 0}
    settings.options = {}
    assert run_here(settings).exit_code == 0
    check(settings, set())


def test_an_engine_that_breaks_half_way_blames_no_row(tmp_path: Path) -> None:
    """Rows finished before; then every process dies in its first step, the canary's."""
    broken = {"do": "kill", "rows": list(range(100, ROWS))}
    canary = {"do": "kill", "rows": list(range(100)), "times": 1000}
    settings = job(tmp_path, worker=poison(tmp_path, 100, times=1), limit=100)
    run_here(settings)
    settings.limit = None
    settings.worker = {"step_seconds": 0, "faults": [broken, canary], "state": str(tmp_path / "state")}
    with pytest.raises(EngineError, match="times in a row"):
        run_here(settings)
    settings.worker = {"step_seconds": 0}
    assert run_here(settings).exit_code == 0
    check(settings, set())


@pytest.mark.parametrize("find_guilty", [True, False])
def test_a_worker_that_dies_before_it_has_rows(tmp_path: Path, find_guilty: bool) -> None:
    dies = {"faults": [{"do": "exit", "at_start": True, "times": 1}], "state": str(tmp_path / "state")}
    settings = job(tmp_path, 20, worker=dies, options={"poison": find_guilty})
    said: list[str] = []
    assert run_here(settings, said).exit_code == 0
    assert said[0].endswith("exit code 11; it had no rows yet; starting another")
    check(settings, set(), 20)


def test_a_worker_that_hangs_in_a_row_is_killed_and_the_row_found(tmp_path: Path) -> None:
    settings = job(
        tmp_path, worker=poison(tmp_path, 33, do="hang"), options={"hang_seconds": 0.4}, max_num_seqs=4
    )
    said: list[str] = []
    assert run_here(settings, said).exit_code == 0
    check(settings, {33})
    assert any("hangs: it has said nothing for 0.4 s" in sentence for sentence in said)
