"""Output folders in an object store: the bytes of a local run, whatever is lost, whoever wakes late."""

import contextlib
import json
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec
import pytest
from job_driver import Settings, run_here, setup_of
from waiting import wait_until

import batchgen.job.object_store
import batchgen.job.remote
from batchgen.job.folder import JobFolder
from batchgen.job.manifest import require_manifest
from batchgen.job.mirror import Mirror
from batchgen.job.object_store import ObjectStore
from batchgen.job.parts import recognise_parts
from batchgen.job.progress import Progress
from batchgen.job.remote import fetched, run_remote
from batchgen.job.run_options import RunHooks, RunResult
from batchgen.job.status import read_status
from batchgen.job.verify import verify_folder
from batchgen.types import OwnershipError, StorageError, UsageError

URL = "memory://bucket/results"
ROWS = 35


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """A store in memory that is sent to all the time."""
    monkeypatch.setattr(batchgen.job.object_store, "PROTOCOLS", {"memory": "fsspec"})
    monkeypatch.setattr(batchgen.job.remote, "SEND_SECONDS", 0.05)
    filesystem = fsspec.filesystem("memory")
    filesystem.store.clear()
    yield filesystem
    filesystem.store.clear()


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    rows = ({"prompt": f"row {i}" if i != 7 else None, "i": i} for i in range(ROWS))
    (tmp_path / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Settings(output=str(tmp_path / "copy"), input=str(tmp_path / "in.jsonl"), max_tokens=6)


@pytest.fixture
def expected(settings: Settings, tmp_path: Path) -> dict[str, bytes]:
    """Parts of a local run."""
    local = replace(settings, output=str(tmp_path / "local"))
    run_here(local)
    return {path.name: path.read_bytes() for path in sorted((tmp_path / "local" / "data").iterdir())}


def run(
    settings: Settings,
    said: list[str] | None = None,
    report: Callable[[Progress], None] = lambda progress: None,
    **options: Any,
) -> RunResult:
    setup = setup_of(settings)
    try:
        chosen = replace(settings.run_options(), **options)
        say = (lambda sentence: None) if said is None else said.append
        return run_remote(setup, URL, chosen, RunHooks(launch=settings.launcher(), report=report, say=say))
    finally:
        setup.inputs.close()


def parts() -> dict[str, bytes]:
    found = ObjectStore(URL)
    names = sorted(found.sizes("data"))
    return {name.removeprefix("data/"): found.read(name) or b"" for name in names}


def stop_once_rows_are_done(progress: Progress) -> None:
    if progress.rows_done:
        os.kill(os.getpid(), signal.SIGTERM)


def lose_machine(settings: Settings) -> None:
    shutil.rmtree(settings.output, ignore_errors=True)


def test_the_store_holds_what_a_local_folder_would(settings: Settings, expected: dict[str, bytes]) -> None:
    said: list[str] = []
    result = run(settings, said)
    assert result.exit_code == 0
    assert parts() == expected
    objects = ObjectStore(URL).sizes()
    assert {"manifest.json", "job.resolved.yaml", "_SUCCESS", "report.html"} <= objects.keys()
    assert not any(".tmp-" in name or name.startswith(".batchgen/logs/.batchgen/journal") for name in objects)
    assert settings.output not in "".join([*said, result.reason])
    with fetched(URL) as copy:
        assert read_status(copy).state == "complete"
        assert verify_folder(copy).faults == []


def test_running_again_computes_nothing_even_elsewhere(
    settings: Settings, expected: dict[str, bytes]
) -> None:
    run(settings)
    lose_machine(settings)
    never = replace(settings, worker={"faults": [{"do": "exit", "rows": list(range(ROWS))}]})
    assert "already complete" in run(never).reason
    assert parts() == expected


def test_a_stopped_run_goes_on_from_another_machine(settings: Settings, expected: dict[str, bytes]) -> None:
    held_open = replace(settings, worker={"faults": [{"do": "stall", "rows": [ROWS - 1]}]})
    first = run(held_open, report=stop_once_rows_are_done, grace=0.1)
    assert first.exit_code == 75
    assert 0 < first.counts.rows < ROWS
    lose_machine(settings)
    assert run(settings).exit_code == 0
    assert parts() == expected
    with fetched(URL) as copy:
        assert read_status(copy).attempts == 2


class Lost(BaseException):
    """The machine is gone."""


@contextlib.contextmanager
def cut_off(monkeypatch: pytest.MonkeyPatch, cut: int) -> Iterator[None]:
    """From its `cut`-th change of the store on, the machine changes nothing any more."""
    changes = 0
    with monkeypatch.context() as patched:
        for name in ("write", "create", "upload", "delete"):
            real = getattr(ObjectStore, name)

            def counted(*args: Any, real: Any = real, **kwargs: Any) -> Any:
                nonlocal changes
                changes += 1
                if changes >= cut:
                    raise StorageError("the network is gone")
                return real(*args, **kwargs)

            patched.setattr(ObjectStore, name, counted)
        yield


@pytest.mark.parametrize("cut", [1, 2, 4, 7, 11, 16, 22, 29, 37])
def test_a_machine_lost_at_any_moment_loses_no_row(
    settings: Settings, expected: dict[str, bytes], cut: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # How many changes there are depends on how often a run sends; the last cuts may come after its end.
    with contextlib.suppress(StorageError), cut_off(monkeypatch, cut):
        run(replace(settings, worker={"step_seconds": 0.005}))
    lose_machine(settings)
    said: list[str] = []
    assert run(settings, said, lease_seconds=0.3).exit_code == 0
    assert parts() == expected
    with fetched(URL) as copy:
        assert verify_folder(copy).faults == []


def test_a_live_owner_is_left_alone_and_named(settings: Settings) -> None:
    stall = {"do": "stall", "rows": [ROWS - 1], "until": f"{settings.output}-go"}
    held_open = replace(settings, worker={"faults": [stall]})
    ended: list[Any] = []
    thread = threading.Thread(target=lambda: ended.append(run(held_open, lease_seconds=0.4)))
    thread.start()
    wait_until(lambda: ended or ".batchgen/lease.json" in ObjectStore(URL).sizes())
    elsewhere = replace(settings, output=settings.output + "-elsewhere")
    with pytest.raises(OwnershipError, match=r"process \d+ on host .* is running this job"):
        run(elsewhere, lease_seconds=5)
    Path(stall["until"]).touch()
    thread.join()
    assert ended[0].exit_code == 0


def test_who_was_taken_over_changes_nothing(settings: Settings, expected: dict[str, bytes]) -> None:
    run(replace(settings, worker={"step_seconds": 0.3}), max_time=2.0, grace=0.1)
    frozen = ObjectStore(URL)
    epochs = list(frozen.sizes(".batchgen/claims"))
    epoch = int(Path(max(epochs)).stem)

    def check() -> None:
        batchgen.job.remote._check_claim(frozen, epoch)

    sleeper = Mirror(Path(settings.output), frozen, epoch, check, {}, {}, frozen.sizes())
    saved = Path(settings.output + "-frozen")
    shutil.copytree(settings.output, saved)
    assert run(settings).exit_code == 0
    before = {name: frozen.read(name) for name in frozen.sizes()}
    shutil.rmtree(settings.output)
    shutil.copytree(saved, settings.output)
    with pytest.raises(OwnershipError, match="another run took over"):
        sleeper.push()
    assert {name: frozen.read(name) for name in frozen.sizes()} == before
    assert parts() == expected


def test_overwrite_begins_anew(settings: Settings, expected: dict[str, bytes]) -> None:
    run(replace(settings, seed=5))
    assert parts() != expected
    assert run(settings, overwrite=True).exit_code == 0
    assert parts() == expected
    lose_machine(settings)
    assert "already complete" in run(settings).reason


@pytest.mark.parametrize("cut", [2, 5, 8, 12, 20])
def test_a_machine_lost_while_it_begins_anew_mixes_no_two_jobs(
    settings: Settings, expected: dict[str, bytes], cut: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run before had other results, which a job that knew their records would take for its own."""
    monkeypatch.setattr(batchgen.job.remote, "SEND_SECONDS", 1000.0)
    run(replace(settings, seed=5))
    before = parts()
    with contextlib.suppress(StorageError), cut_off(monkeypatch, cut):
        run(settings, overwrite=True)
    lose_machine(settings)
    run(settings, lease_seconds=0.3)
    # The claim is the second thing that is written; without it nothing has happened.
    assert parts() == (before if cut <= 2 else expected)


@pytest.mark.parametrize("cut", [5, 8, 14, 23])
def test_a_machine_lost_in_a_retry(
    settings: Settings, expected: dict[str, bytes], cut: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batchgen.job.remote, "SEND_SECONDS", 1000.0)
    run(replace(settings, worker={"faults": [{"do": "timeout", "rows": [5, 22]}]}))
    retried = replace(settings, retry={"where": None, "temperature": 0.5})
    with contextlib.suppress(StorageError), cut_off(monkeypatch, cut):
        run(retried)
    lose_machine(settings)
    run(retried, lease_seconds=0.3)
    assert parts() == expected
    with fetched(URL) as copy:
        assert verify_folder(copy).faults == []
        changes = require_manifest(JobFolder(copy)).changes
        of_rows = [runs for c in recognise_parts(JobFolder(copy)).values() for runs in c.settings]
    # A retry whose end was sent before its parts is done once more.
    assert [change.open for change in changes] in ([False], [False, False])
    assert [(row, count) for row, count, _ in of_rows] == [(5, 1), (22, 1)]


def test_a_store_that_cannot_be_written_is_exit_5(
    settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        fsspec.filesystem("memory").__class__,
        "pipe_file",
        lambda *a, **k: (_ for _ in ()).throw(PermissionError("Access Denied")),
    )
    with pytest.raises(StorageError, match=r"memory://bucket/results/.*cannot be written.*Access Denied"):
        run(settings)


def test_what_is_no_store_or_no_folder_is_said() -> None:
    with pytest.raises(UsageError, match="results cannot be written to https://; use a local folder"):
        ObjectStore("https://user:secret@example.org/x")
    with pytest.raises(UsageError, match="not the output folder"), fetched("memory://bucket/nothing"):
        pass
