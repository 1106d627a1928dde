"""Jobs that are killed, stopped and run twice end with the bytes of one that ran through.

The same through the command line is in `tests/cases/test_hard_endings.py`.

`BATCHGEN_KILLS` sets how many kills the storm makes (7), `BATCHGEN_KILL_SEED` which.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from job_driver import CRASHED, Settings, run_here, start
from job_inputs import data_bytes, read_output, write_jsonl, write_parquet
from waiting import PATIENCE, wait_until
from work_done import counters_of, sampled

KILLS = int(os.environ.get("BATCHGEN_KILLS", "7"))
SEED = int(os.environ.get("BATCHGEN_KILL_SEED", "20260101"))
KILLS_PER_JOB = 3
ROWS = 200
MAX_TOKENS = 24
SLOW = {"step_seconds": 0.004}


def worker_pids(process: subprocess.Popen[str]) -> list[int]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(process.pid).children()]
    return []


def alive(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, bytes]]]:
    """For each kind of job its input and the data/ of a run without accidents."""
    root = tmp_path_factory.mktemp("golden")
    write_jsonl(root / "in.jsonl", ROWS)
    write_parquet(root / "in.parquet", ROWS)
    made = {}
    for kind in ("jsonl-jsonl", "jsonl-parquet", "parquet-parquet"):
        input_format, output_format = kind.split("-")
        path = root / f"in.{input_format}"
        settings = Settings(
            output=str(root / kind), input=str(path), format=output_format, max_tokens=MAX_TOKENS
        )
        assert run_here(settings).exit_code == 0
        made[kind] = (path, data_bytes(root / kind))
    return made


@pytest.fixture
def launched() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that are ended, and their pipes closed, whatever the test does."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        for pid in worker_pids(process):
            kill(pid)
        process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


def finish(settings: Settings, expected: dict[str, bytes]) -> None:
    """Run to the end in this process and compare every byte."""
    settings.worker = {**settings.worker, "step_seconds": 0}
    assert run_here(settings).exit_code == 0
    root = Path(settings.output)
    assert data_bytes(root) == expected
    assert [r["row"] for r in read_output(root)] == list(range(ROWS))
    left = [p.name for p in root.rglob("*") if p.name.startswith(".tmp") or p.suffix == ".seg"]
    assert left == []


def storm() -> list[tuple[int, str, list[str]]]:
    """Jobs with the kills that each suffers."""
    rng = random.Random(SEED)
    modes = [rng.choice(["all", "supervisor", "worker"]) for _ in range(KILLS)]
    kinds = ("jsonl-jsonl", "parquet-parquet", "jsonl-parquet")
    cuts = range(0, KILLS, KILLS_PER_JOB)
    return [(n, kinds[n % len(kinds)], modes[i : i + KILLS_PER_JOB]) for n, i in enumerate(cuts)]


@pytest.mark.parametrize(("number", "kind", "modes"), storm())
def test_killed_at_random_moments(
    tmp_path: Path, golden: Any, launched: Any, number: int, kind: str, modes: list[str]
) -> None:
    rng = random.Random(SEED * 1000 + number)
    path, expected = golden[kind]
    settings = Settings(
        output=str(tmp_path / "out"),
        input=str(path),
        format=kind.split("-")[1],
        max_tokens=MAX_TOKENS,
        worker=dict(SLOW),
    )
    for mode in modes:
        process = start(settings)
        launched.append(process)
        await_tokens(tmp_path / "out", rng.randint(1, 600), process)
        time.sleep(rng.random() * 0.05)
        strike(process, mode)
    finish(settings, expected)
    check_lost_tokens(tmp_path / "out")


def await_tokens(root: Path, more: int, process: subprocess.Popen[str]) -> None:
    """Wait until so many more tokens were sampled, or the job is done."""
    target = sampled(root) + more
    wait_until(lambda: sampled(root) >= target, process, every=0.003)


def held_open(go: Path) -> dict[str, Any]:
    """A worker that does not end the last row before the file `go` is there."""
    return {**SLOW, "faults": [{"do": "stall", "rows": [ROWS - 1], "until": str(go)}]}


def strike(process: subprocess.Popen[str], mode: str) -> None:
    """Kill the supervisor, its worker or both; none may be left."""
    workers = worker_pids(process)
    if mode in ("all", "supervisor"):
        kill(process.pid)
    if mode in ("all", "worker"):
        for pid in workers:
            kill(pid)
    code = process.wait(PATIENCE)
    assert mode != "worker" or code == 0
    wait_until(lambda: not any(map(alive, workers)))


@pytest.mark.parametrize("number", range(-(-KILLS // 4)))
def test_killed_in_the_middle_of_an_operation(
    tmp_path: Path, golden: Any, launched: Any, number: int
) -> None:
    """At random writes, fsyncs, renames and creations; the last time while recovering from the others."""
    rng = random.Random(SEED * 77 + number)
    path, expected = golden["jsonl-parquet"]
    settings = Settings(
        output=str(tmp_path / "out"), input=str(path), format="parquet", max_tokens=MAX_TOKENS
    )
    for most in (1200, 800, 60):
        settings.crash_at = rng.randint(1, most)
        settings.worker = {"step_seconds": 0.001}
        process = start(settings)
        launched.append(process)
        assert process.wait(PATIENCE) in (CRASHED, 0)
    finish(settings, expected)


def check_lost_tokens(root: Path) -> None:
    """What was sampled and is not in a result is at most what was at risk at each kill."""
    useful = sum(r["usage"]["completion_tokens"] for r in read_output(root) if r["usage"])
    at_risk = sum(c.at_risk for c in counters_of(root))
    assert 0 <= sampled(root) - useful <= at_risk


def test_long_rows_are_cut_at_the_grace_and_continued(tmp_path: Path, launched: Any) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", 8)
    slow = {"step_seconds": 0.05}
    settings = Settings(
        output=str(tmp_path / "out"), input=str(path), max_tokens=5000, worker=slow, options={"grace": 4.0}
    )
    process = start(settings)
    launched.append(process)
    wait_until(lambda: sampled(tmp_path / "out") > 60, process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 75
    done = sampled(tmp_path / "out")
    settings.worker = {**slow, "step_seconds": 0}
    assert run_here(settings).exit_code == 0
    useful = sum(r["usage"]["completion_tokens"] for r in read_output(tmp_path / "out"))
    assert done > 60
    assert sampled(tmp_path / "out") == useful


def test_a_second_interrupt_ends_at_once(tmp_path: Path, golden: Any, launched: Any) -> None:
    path, expected = golden["jsonl-jsonl"]
    endless = {**SLOW, "step_seconds": 0.2}
    settings = Settings(output=str(tmp_path / "out"), input=str(path), max_tokens=MAX_TOKENS, worker=endless)
    process = start(settings)
    launched.append(process)
    wait_until(lambda: sampled(tmp_path / "out") > 10, process)
    workers = worker_pids(process)
    process.send_signal(signal.SIGINT)
    assert any(line.startswith("stopping (SIGINT)") for line in iter(process.stdout.readline, ""))
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE) == 130
    wait_until(lambda: not any(map(alive, workers)))
    finish(settings, expected)


def test_a_stop_while_the_model_loads_is_immediate(tmp_path: Path, launched: Any) -> None:
    path = write_jsonl(tmp_path / "in.jsonl", 8)
    settings = Settings(output=str(tmp_path / "out"), input=str(path), worker={"load_seconds": 300})
    process = start(settings)
    launched.append(process)
    wait_until(lambda: bool(worker_pids(process)), process)
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE) == 75


def test_many_runs_started_together(tmp_path: Path, golden: Any, launched: Any) -> None:
    path, expected = golden["jsonl-parquet"]
    settings = Settings(
        output=str(tmp_path / "out"),
        input=str(path),
        format="parquet",
        max_tokens=MAX_TOKENS,
        worker=held_open(tmp_path / "go"),
    )
    launched += [start(settings) for _ in range(3)]
    wait_until(lambda: sum(process.poll() is not None for process in launched) == 2)
    (tmp_path / "go").touch()
    codes = sorted(process.wait(PATIENCE) for process in launched)
    assert codes == [0, 6, 6]
    assert data_bytes(tmp_path / "out") == expected
