"""Runs that are killed, stopped, frozen, torn or out of disk, through the command line, named by their cases.

A real worker with the fake engine answers, and counts what it computes. More of each kind, at random moments
and in the middle of operations, is in `tests/job`.
"""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from job_place import Place, lines
from waiting import PATIENCE, wait_until
from work_done import counters_of, sampled

from batchgen.job.folder import JobFolder

ROWS = 200
TOKENS = 2_500
"""About as many as a long job has."""
SLOW = {"tokens_per_step": 1, "step_seconds": 0.004}
NEVER = {"do": "stall", "until": "/nowhere"}
Process = subprocess.Popen[str]
Data = dict[str, bytes]


def long_job(place: Place, **run: Any) -> str:
    """Some thousand tokens in twenty parts."""
    return place.write(
        lines(*({"prompt": f"prompt {row}", "n": row} for row in range(ROWS))),
        output={"part_rows": 10},
        sampling={"max_tokens": 24},
        engine={"max_num_seqs": 8},
        run={"checkpoint_seconds": 0.05, **run},
    )


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Data:
    """The data of a long job to which nothing happens."""
    place = Place(tmp_path_factory.mktemp("calm"))
    place.call(["run", long_job(place)], 0)
    return data_of(place)


def data_of(place: Place) -> Data:
    return {path.name: path.read_bytes() for path in sorted((place.output / "data").iterdir())}


def finish(place: Place, job: str, calm: Data) -> str:
    """Run to the end: every row once, the bytes of a calm run, nothing lies about; what was said."""
    said = place.call(["run", job], 0)
    assert data_of(place) == calm
    assert [row["row"] for row in place.rows()] == list(range(ROWS))
    names = [path.name for path in place.output.rglob("*")]
    assert [name for name in names if name.startswith(".tmp") or name.endswith(".seg")] == []
    return said


def await_tokens(place: Place, count: int, process: Process) -> None:
    assert wait_until(lambda: sampled(place.output) >= count, process)


def killed(process: Process) -> None:
    process.kill()
    assert process.wait(PATIENCE) == -signal.SIGKILL


def check_loss(place: Place) -> None:
    """What was computed and is not in a result is at most what was at risk at each end."""
    useful = sum(row["usage"]["completion_tokens"] for row in place.rows())
    at_risk = sum(counters.at_risk for counters in counters_of(place.output))
    assert 0 <= sampled(place.output) - useful <= at_risk


def status(place: Place) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(place.call(["status", str(place.output), "--json"], 0))
    return found


def test_c21_dup_prompt_killed(place: Place, launched: list[Process]) -> None:
    same = [{"prompt": prompt} for prompt in ("same", "x", "same", "y", "same")]
    job = place.write(lines(*same), sampling={"temperature": 1.0}, run={"checkpoint_seconds": 0.05})
    process = place.start(job, {"faults": [{**NEVER, "rows": [2, 3, 4]}]})
    launched.append(process)
    wait_until(place.output.joinpath("manifest.json").exists, process)
    wait_until(lambda: status(place)["rows_done"] == 2, process)
    killed(process)
    place.call(["run", job], 0)
    found = place.rows()
    assert len({row["generated_text"] for row in found}) == 5
    assert sampled(place.output) == sum(row["usage"]["completion_tokens"] for row in found)


def test_c33_kill9(place: Place, calm: Data, launched: list[Process]) -> None:
    job = long_job(place)
    for share in (0.25, 0.5, 0.75):
        process = place.start(job, SLOW)
        launched.append(process)
        await_tokens(place, int(share * TOKENS), process)
        killed(process)
    finish(place, job, calm)
    check_loss(place)


def stop(place: Place, job: str, name: signal.Signals, launched: list[Process]) -> None:
    """Start the job, stop it half-way by a signal; it finishes or hands over what it has begun."""
    process = place.start(job, SLOW)
    launched.append(process)
    await_tokens(place, sampled(place.output) + 500, process)
    process.send_signal(name)
    said, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 75, said
    assert f"stopped ({name.name}); run the same command to continue" in said
    assert all(counters.at_risk == 0 for counters in counters_of(place.output))


def test_c34_sigterm(place: Place, calm: Data, launched: list[Process]) -> None:
    """One that is heeded, and one whose process is killed before it has ended."""
    job = long_job(place, grace=60)
    stop(place, job, signal.SIGTERM, launched)
    process = place.start(job, {**SLOW, "step_seconds": 0.1})
    launched.append(process)
    await_tokens(place, sampled(place.output) + 100, process)
    process.send_signal(signal.SIGTERM)
    assert process.stdout is not None
    assert any(line.startswith("stopping (SIGTERM)") for line in process.stdout)
    killed(process)
    finish(place, job, calm)
    check_loss(place)


@pytest.mark.slow
def test_c34_other_signals(place: Place, calm: Data, launched: list[Process]) -> None:
    job = long_job(place, grace=60)
    for name in (signal.SIGUSR1, signal.SIGHUP, signal.SIGINT):
        stop(place, job, name, launched)
    finish(place, job, calm)
    check_loss(place)


def test_c35_torn_log(place: Place, calm: Data) -> None:
    """Cut in the middle of a record, and garbage behind it."""
    job = long_job(place)
    fatal = {"do": "fatal", "after_tokens": TOKENS // 2, "exit_code": 3}
    place.call(["run", job], 3, {"tokens_per_step": 1, "faults": [fatal]})
    before = status(place)["rows_done"]
    folder = JobFolder(place.output)
    torn = [*folder.journal.glob("*.seg"), *folder.commits.iterdir()]
    assert len(torn) >= 2
    for log in torn:
        log.write_bytes(log.read_bytes()[:-5] + b"garbage\n" * 5)
    found = status(place)
    lost = before - found["rows_done"]
    assert 0 < lost < before
    assert any("torn or damaged" in message for message in found["messages"])
    assert "torn or damaged, left out" in finish(place, job, calm)
    # Beside what was lost and what was on its way, rows that had ended and waited for their commit.
    assert 0 < sampled(place.output) - TOKENS < 24 * (lost + 8) + TOKENS // 4


def test_c39_two_runs(place: Place, calm: Data, launched: list[Process]) -> None:
    """The second is refused while the first lives, and takes over once it is frozen; then the first wakes."""
    job = long_job(place, lease_seconds=0.8)
    go = place.folder / "go"
    held = {**SLOW, "faults": [{"do": "stall", "rows": [ROWS - 1], "until": str(go)}]}
    first = place.start(job, held)
    launched.append(first)
    await_tokens(place, 300, first)
    said = place.call(["run", job], 6)
    assert f"process {first.pid} on host {socket.gethostname()}" in said
    first.send_signal(signal.SIGSTOP)
    second = place.start(job, held)
    launched.append(second)
    wait_until(lambda: sampled(place.output, "0002") > 300, second)
    first.send_signal(signal.SIGCONT)
    assert first.wait(PATIENCE) == 6
    go.touch()
    assert second.wait(PATIENCE) == 0
    assert data_of(place) == calm
    finish(place, job, calm)


@pytest.fixture
def small_disk(place: Place) -> Iterator[Path]:
    """A file system of 2 MB where the output goes; skipped where mounting is not permitted."""
    disk = place.folder / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(disk)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("mounting a small file system is not permitted here")
    yield disk
    subprocess.run(["umount", str(disk)], check=True)


def test_c40_enospc(place: Place, small_disk: Path) -> None:
    """About 3 MB of output."""
    data = lines(*({"prompt": f"prompt {row}"} for row in range(250)))
    size: dict[str, Any] = {"sampling": {"max_tokens": 4000}, "engine": {"max_num_seqs": 10}}
    place.run(data, **size, output={"part_rows": 20})
    expected = data_of(place)
    place.output = small_disk / "out"
    job = place.write(data, **size, output={"part_rows": 20, "path": str(place.output)})
    said = place.call(["run", job], 5, {"tokens_per_step": 1000, "step_seconds": 0.01})
    assert re.search(r"No space left.*free at least [\d,]+ bytes.*same command", said)
    kept = data_of(place)
    assert kept
    assert kept.items() <= expected.items()
    subprocess.run(["mount", "-o", "remount,size=64m", str(small_disk)], check=True)
    place.call(["run", job], 0)
    assert data_of(place) == expected


def test_s7_a_row_that_always_kills_the_engine(place: Place, calm: Data) -> None:
    place.call(["run", long_job(place)], 0, {"faults": [{"do": "kill", "rows": [77]}]})
    found = place.rows()
    assert [row["row"] for row in found if row["status"] != "ok"] == [77]
    assert found[77]["error"]["class"] == "engine_crash"
    others = {name: part for name, part in data_of(place).items() if name != "part-000007.jsonl"}
    assert others.items() <= calm.items()
    assert len(others) == len(calm) - 1
