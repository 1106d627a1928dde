"""A disk that fills up or fails: exit 5, committed rows stay readable, and the job goes on afterwards.

One that is really full is in `tests/cases/test_hard_endings.py`.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from failing_files import FailingFiles
from job_driver import Settings, run_here
from job_inputs import data_bytes, write_jsonl

from batchgen.job.files import FileOps
from batchgen.job.window import Window
from batchgen.types import StorageError


def long_text_job(tmp_path: Path, output: Path) -> Settings:
    """About 2 MB of output."""
    path = write_jsonl(tmp_path / "in.jsonl", 250)
    size: dict[str, Any] = {"part_rows": 20, "max_tokens": 3000, "max_num_seqs": 40}
    return Settings(output=str(output), input=str(path), worker={"step_seconds": 0}, **size)


def test_running_low_on_space_stops_before_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    free = iter([usage, usage, usage])
    monkeypatch.setattr(shutil, "disk_usage", lambda _: next(free, usage._replace(free=10)))
    settings = long_text_job(tmp_path, tmp_path / "out")
    settings.options = {"min_free_disk": 1000}
    with pytest.raises(StorageError, match=r"10 bytes are free, less than run\.min_free_disk \(1,000\)"):
        run_here(settings)


CODES = (errno.ENOSPC, errno.EIO, errno.EACCES)


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """An input, and the data/ of a run without failures."""
    root = tmp_path_factory.mktemp("golden")
    path = write_jsonl(root / "in.jsonl", 50)
    run_here(Settings(output=str(root / "out"), input=str(path)))
    return path, data_bytes(root / "out")


@pytest.mark.parametrize("first", [1, 2, 5, 9, 12, 14, 17, 21, 26, 30, 40, 50])
def test_a_disk_that_fails_at_any_operation_is_exit_5_and_then_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Any, first: int
) -> None:
    """From the n-th operation on everything fails; once the disk works the job ends as if nothing had."""
    path, expected = golden
    settings = Settings(output=str(tmp_path / "out"), input=str(path))
    code = CODES[first % len(CODES)]
    failing = FailingFiles(lambda _, number: code if number >= first else None)
    with monkeypatch.context() as patched:
        fail_everywhere(patched, failing)
        with pytest.raises(StorageError, match=os.strerror(code)):
            run_here(settings)
    assert run_here(settings).exit_code == 0
    assert data_bytes(tmp_path / "out") == expected


@pytest.mark.parametrize("every", [7, 13])
def test_a_disk_that_fails_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, golden: Any, every: int
) -> None:
    """Single failures of the journal are survived; any other ends the run, and running again goes on."""
    path, expected = golden
    settings = Settings(output=str(tmp_path / "out"), input=str(path))
    failing = FailingFiles(lambda _, number: errno.EIO if number % every == 0 else None)
    with monkeypatch.context() as patched:
        fail_everywhere(patched, failing)
        for _ in range(5):
            with contextlib.suppress(StorageError):
                run_here(settings)
    assert run_here(settings).exit_code == 0
    assert data_bytes(tmp_path / "out") == expected


@pytest.mark.parametrize(
    ("error", "raised", "said"),
    [
        (
            OSError(errno.EIO, "Input/output error"),
            StorageError,
            r"a file that the run in .*/out needs: .* Input/output error",
        ),
        (OSError(errno.EMFILE, "Too many open files", "/x"), StorageError, r"^/x: .* \(ulimit -n\)"),
        (
            FileNotFoundError(errno.ENOENT, "No such file or directory", "/x"),
            FileNotFoundError,
            "No such file",
        ),
    ],
    ids=["without a name", "open files", "a bug"],
)
def test_an_error_of_a_disk_that_nothing_expected(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    golden: Any,
    error: OSError,
    raised: type[Exception],
    said: str,
) -> None:
    """One of a disk or a limit is a fault of storage wherever it comes from; the attempt says what it was."""
    path, expected = golden
    settings = Settings(output=str(tmp_path / "out"), input=str(path))

    def fails(window: Window) -> None:
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(Window, "take", fails)
        with pytest.raises(raised, match=said):
            run_here(settings)
    attempt = json.loads(next((tmp_path / "out" / ".batchgen" / "attempts").glob("*.json")).read_text())
    assert attempt["exit_code"] == (5 if raised is StorageError else 1)
    assert error.strerror in attempt["error"]
    assert run_here(settings).exit_code == 0
    assert data_bytes(tmp_path / "out") == expected


def fail_everywhere(patched: pytest.MonkeyPatch, failing: FailingFiles) -> None:
    """Every operation of every `FileOps` asks `failing` first."""
    for name in ("create", "write", "fsync", "fsync_folder"):
        operation: Any = getattr(type(failing), name)
        patched.setattr(FileOps, name, redirect(operation, failing, getattr(FileOps, name)))


def redirect(operation: Any, failing: FailingFiles, real: Any) -> Any:
    def operate(files: FileOps, *arguments: Any) -> Any:
        # `failing` itself calls the real operation through super().
        if files is failing:
            return real(files, *arguments)
        return operation(failing, *arguments)

    return operate
