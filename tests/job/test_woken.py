"""C39: a run that is stopped anywhere, loses its folder and wakes changes nothing, on one host or on two.

`BATCHGEN_FREEZES` sets at how many operations it is stopped (2), `BATCHGEN_KILL_SEED` at which.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
from job_driver import Settings, run_here, start
from job_inputs import data_bytes, write_jsonl
from waiting import PATIENCE, wait_until

from batchgen.job.folder import JobFolder
from batchgen.job.status import read_status
from batchgen.job.verify import verify_folder
from batchgen.types import OwnershipError

OWN = re.compile(r"lock$|0001\.|[a-z]000001")
_random = random.Random(int(os.environ.get("BATCHGEN_KILL_SEED", "20260102")))
NUMBERS = [_random.randint(20, 90) for _ in range(int(os.environ.get("BATCHGEN_FREEZES", "2")))]


def stopped(process: subprocess.Popen[str]) -> bool:
    """Whether a process stands still; False if it has ended."""
    return wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED, process)


def snapshot(root: Path) -> dict[str, bytes]:
    """Every file but those that the first attempt keeps of itself: its record, and what is void for all."""
    files = [path for path in root.rglob("*") if path.is_file() and not OWN.match(path.name)]
    return {str(path.relative_to(root)): path.read_bytes() for path in files}


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """An input, and the data/ of a run to which nothing happens."""
    root = tmp_path_factory.mktemp("calm")
    path = write_jsonl(root / "in.jsonl", 60)
    run_here(Settings(output=str(root / "out"), input=str(path)))
    return path, data_bytes(root / "out")


@pytest.mark.parametrize("number", NUMBERS)
def test_nothing_that_a_woken_run_writes_counts(
    tmp_path: Path, calm: tuple[Path, dict[str, bytes]], launched: list[Any], number: int
) -> None:
    path, expected = calm
    quick: dict[str, Any] = {"checkpoint_seconds": 0.02, "lease_seconds": 0.6}
    settings = Settings(output=str(tmp_path / "out"), input=str(path), freeze_at=number, options=quick)
    first = start(settings)
    launched.append(first)
    if not stopped(first):
        pytest.skip("this run has fewer operations")
    settings.freeze_at, settings.elsewhere = None, number % 2 == 0
    second = start(settings)
    launched.append(second)
    said, _ = second.communicate(timeout=PATIENCE)
    assert second.returncode == 0, said
    assert f"owned by process {first.pid}" in said
    assert "has shown no life for 0.6 s; taking over" in said
    before = snapshot(tmp_path / "out")
    first.send_signal(signal.SIGCONT)
    said, _ = first.communicate(timeout=PATIENCE)
    assert first.returncode == 6, said
    after = snapshot(tmp_path / "out")
    assert after == before
    assert data_bytes(tmp_path / "out") == expected
    assert verify_folder(tmp_path / "out").ok
    assert read_status(tmp_path / "out").state == "complete"
    folder = JobFolder(tmp_path / "out")
    assert [p.name for p in folder.root.rglob(".tmp-*")] == []


def test_a_living_owner_on_another_host_is_named(tmp_path: Path, calm: Any, launched: list[Any]) -> None:
    path = calm[0]
    endless = {"faults": [{"do": "stall", "rows": [0]}]}
    settings = Settings(output=str(tmp_path / "out"), input=str(path), worker=endless, elsewhere=True)
    first = start(settings)
    launched.append(first)
    wait_until(JobFolder(tmp_path / "out").lease.exists, first)
    with pytest.raises(OwnershipError, match=rf"process {first.pid} on host faraway is running this job"):
        run_here(Settings(output=str(tmp_path / "out"), input=str(path)))
