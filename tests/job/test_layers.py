"""Failures of one named kind of file: survived once where rows can be written elsewhere, exit 5 else."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from failing_files import FailingFiles, LayeredFiles
from job_driver import Settings, run_here
from job_inputs import data_bytes, write_jsonl

from batchgen.job.files import FileOps, storage_error
from batchgen.job.folder import JobFolder
from batchgen.job.linelog import LineLog, read_folder
from batchgen.job.verify import verify_folder
from batchgen.types import BatchgenError, InputError, StorageError

Decide = Callable[[str, str], int | None]
OPERATIONS = ("create", "write", "fsync", "fsync_folder", "open", "listdir", "replace")


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, bytes]]:
    """An input, and the data/ of a run without failures."""
    root = tmp_path_factory.mktemp("calm")
    path = write_jsonl(root / "in.jsonl", 40)
    run_here(Settings(output=str(root / "out"), input=str(path)))
    return path, data_bytes(root / "out")


def failing(patched: pytest.MonkeyPatch, decide: Decide) -> None:
    """Every operation of every `FileOps` of this process asks `decide` first."""
    files = LayeredFiles(decide)
    for name in OPERATIONS:
        patched.setattr(FileOps, name, _redirect(getattr(LayeredFiles, name), files, getattr(FileOps, name)))


def _redirect(operation: Any, files: FailingFiles, real: Any) -> Any:
    def operate(self: FileOps, *arguments: Any) -> Any:
        # `files` itself calls the real operation through super().
        return real(self, *arguments) if self is files else operation(files, *arguments)

    return operate


def times(count: int, operation: str, layer: str, code: int) -> Decide:
    """Fail the first `count` of one kind."""
    left = [count]

    def decide(this: str, on: str) -> int | None:
        if (this, on) == (operation, layer) and left[0] > 0:
            left[0] -= 1
            return code
        return None

    return decide


def run(settings: Settings, decide: Decide, said: list[str] | None = None) -> int:
    with pytest.MonkeyPatch.context() as patched:
        failing(patched, decide)
        try:
            return run_here(settings, said).exit_code
        except BatchgenError as error:
            if said is not None:
                said.append(str(error))
            return error.exit_code


@pytest.mark.parametrize(
    ("operation", "layer"),
    [("fsync", "journal"), ("write", "journal"), ("fsync", "part"), ("write", "part"), ("fsync", "commits")],
)
def test_one_failure_is_written_elsewhere_and_a_second_is_exit_5(
    tmp_path: Path, calm: tuple[Path, dict[str, bytes]], operation: str, layer: str
) -> None:
    path, expected = calm
    once = Settings(output=str(tmp_path / "once"), input=str(path))
    assert run(once, times(1, operation, layer, errno.EIO)) == 0
    assert data_bytes(tmp_path / "once") == expected
    assert verify_folder(tmp_path / "once").ok
    said: list[str] = []
    for_ever = Settings(output=str(tmp_path / "ever"), input=str(path))
    assert run(for_ever, times(1000, operation, layer, errno.EIO), said) == 5
    assert "Input/output error; check the disk, then run the same command again" in said[-1]
    assert run_here(for_ever).exit_code == 0
    assert data_bytes(tmp_path / "ever") == expected


@pytest.mark.parametrize("layer", ["part", "manifest", "success", "attempts"])
def test_a_rename_that_is_done_and_then_reported_as_failed(
    tmp_path: Path, calm: tuple[Path, dict[str, bytes]], layer: str
) -> None:
    """A network file system sends it again when the first answer was lost."""
    path, expected = calm
    settings = Settings(output=str(tmp_path / "out"), input=str(path))
    assert run(settings, times(1000, "replace", layer, errno.ENOENT)) == 0
    assert data_bytes(tmp_path / "out") == expected


def begun(tmp_path: Path, path: Path) -> Settings:
    fault = {"do": "fatal", "after_tokens": 100, "exit_code": 3, "message": "the card fell out"}
    settings = Settings(output=str(tmp_path / "out"), input=str(path), limit=10)
    run_here(settings)
    settings.limit, settings.worker = None, {"faults": [fault]}
    with pytest.raises(InputError):
        run_here(settings)
    settings.worker = {}
    return settings


def test_a_stale_handle_is_opened_again(tmp_path: Path, calm: tuple[Path, dict[str, bytes]]) -> None:
    path, expected = calm
    settings = begun(tmp_path, path)
    seen: set[str] = set()

    def stale_once(operation: str, layer: str) -> int | None:
        if operation != "open" or layer in seen:
            return None
        seen.add(layer)
        return errno.ESTALE

    assert run(settings, stale_once) == 0
    assert {"journal", "part", "manifest", "commits", "index", "claim.json"} & seen
    assert data_bytes(tmp_path / "out") == expected


def test_a_journal_that_cannot_be_read_is_exit_5_and_nothing_is_lost(
    tmp_path: Path, calm: tuple[Path, dict[str, bytes]]
) -> None:
    path, expected = calm
    settings = begun(tmp_path, path)
    for layer in ("journal", "commits", "index", "manifest"):
        said: list[str] = []
        assert run(settings, times(1000, "open", layer, errno.EIO), said) == 5
        assert "Input/output error" in said[-1]
    assert run_here(settings).exit_code == 0
    assert data_bytes(tmp_path / "out") == expected


def test_files_that_are_listed_late_cost_only_work(
    tmp_path: Path, calm: tuple[Path, dict[str, bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another host made them: what lies in journal and data is not seen at first, the manifest neither."""
    path, expected = calm
    settings = begun(tmp_path, path)
    listdir, opened = FileOps.listdir, FileOps.open
    late = {"journal", "data"}
    hidden = [3]

    def list_late(files: FileOps, place: Path) -> list[str]:
        names = listdir(files, place)
        if place.name in late:
            late.discard(place.name)
            return []
        return names

    def open_late(files: FileOps, place: Path) -> int:
        if place.name == "manifest.json" and hidden[0]:
            hidden[0] -= 1
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
        return opened(files, place)

    with monkeypatch.context() as patched:
        patched.setattr(FileOps, "listdir", list_late)
        patched.setattr(FileOps, "open", open_late)
        assert run_here(settings).exit_code == 0
    assert (late, hidden) == (set(), [0])
    assert data_bytes(tmp_path / "out") == expected
    assert verify_folder(tmp_path / "out").ok
    attempts = list(JobFolder(tmp_path / "out").attempts.glob("????.json"))
    assert len(attempts) == 3


def test_a_log_goes_on_in_another_file(tmp_path: Path) -> None:
    files = LayeredFiles(times(1, "fsync", "e000001.jsonl", errno.EIO))
    log = LineLog(tmp_path / "e000001.jsonl", files)
    log.append([{"n": 1}])
    log.sync()
    log.append([{"n": 2}])
    log.sync()
    log.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["e000001.jsonl", "e000001_again.jsonl"]
    assert [record["n"] for record in read_folder(tmp_path)] == [1, 1, 2]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.ENOSPC, "No space left on device; free at least 1,234 bytes there"),
        (errno.EDQUOT, "Disk quota exceeded; free at least 1,234 bytes there, or have the quota raised"),
        (errno.EROFS, "Read-only file system; mount it for writing or choose another output.path"),
        (errno.EACCES, "Permission denied; allow writing there or choose another output.path"),
        (errno.EIO, "Input/output error; check the disk"),
    ],
)
def test_what_the_system_says_and_what_to_do(code: int, words: str) -> None:
    error: StorageError = storage_error("out", OSError(code, os.strerror(code)), needed=1234)
    assert error.exit_code == 5
    assert words in str(error)
