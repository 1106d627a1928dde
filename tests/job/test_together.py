"""Settings that meet: what each does alone has tests of its own, here two or three of them share a job."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from job_driver import Settings, run_here, setup_of
from job_inputs import data_bytes, read_output
from test_selection_machine import run
from thread_worker import Killed, ThreadLauncher

from batchgen.data.row import Row
from batchgen.job import ids as ids_module
from batchgen.job import unique_ids, window
from batchgen.job.assembly import Assembler
from batchgen.job.folder import JobFolder
from batchgen.job.gates import Gate
from batchgen.job.manifest import require_manifest
from batchgen.job.run import run_job
from batchgen.job.run_options import RunHooks
from batchgen.job.supervisor import Supervisor
from batchgen.job.verify import verify_folder
from batchgen.job.window import OpenPart
from batchgen.types import DriftError, EngineError, InputError, UsageError


def write(path: Path, ids: list[str], prompt: str = "p") -> None:
    rows = [{"prompt": f"{prompt}{i}", "id": row_id} for i, row_id in enumerate(ids)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def job(tmp_path: Path, ids: list[str], **changes: Any) -> Settings:
    write(tmp_path / "in.jsonl", ids)
    given = {"part_rows": 3, "output": str(tmp_path / "out"), "input": str(tmp_path / "in.jsonl"), **changes}
    return Settings(**given)


def found_ids(settings: Settings) -> list[str]:
    return [row["id"] for row in read_output(Path(settings.output))]


def same_as_at_once(settings: Settings, run: Callable[[Settings], Any] = run) -> None:
    once = Settings(**{**vars(settings), "output": settings.output + "-once", "options": {}, "worker": {}})
    run(once)
    assert data_bytes(Path(once.output)) == data_bytes(Path(settings.output))


@pytest.mark.parametrize("policy", ["suffix", "keep_first"])
def test_ids_that_are_suffixed_later_by_a_run_that_is_killed(
    tmp_path: Path, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parts written under `error` follow the later policy, also in the run after the one that began it."""
    ids = ["a", "b", "c", "d", "a", "e", "f", "g", "h"]
    settings = job(tmp_path, ids, rows="3:9")
    run(settings)
    settings.rows = None
    with pytest.raises(UsageError, match="ids must be distinct"):
        run(settings)
    settings.duplicate_ids = policy
    with monkeypatch.context() as patched:
        patched.setattr(Supervisor, "_assemble", lambda self: None)
        with pytest.raises(Killed):
            run(settings, kill_after=0)
    run(settings)
    same_as_at_once(settings)
    assert verify_folder(Path(settings.output)).faults == []


def test_ids_of_an_input_that_changed_behind_the_finished_parts(tmp_path: Path) -> None:
    settings = job(tmp_path, list("abcdefghi"), duplicate_ids="suffix", limit=3)
    run(settings)
    settings.limit = None
    with pytest.raises(Killed):
        run(settings, kill_after=0)
    write(tmp_path / "in.jsonl", list("abcxyazbw"), "p")
    with pytest.raises(DriftError):
        run(settings)
    settings.options = {"accept_drift": True}
    run(settings)
    assert found_ids(settings) == ["a", "b", "c", "x", "y", "a#2", "z", "b#2", "w"]
    settings.options = {}
    same_as_at_once(settings)


@pytest.mark.parametrize("policy", ["suffix", "keep_first"])
@pytest.mark.parametrize("kept_bytes", [0, 2500])
def test_rows_that_do_not_stay_in_memory_are_read_again(
    tmp_path: Path, kept_bytes: int, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ids that are decided about, a condition and a row that cannot be read; all parts, or some."""
    settings = job(tmp_path, list("abcadefaghijk"), duplicate_ids=policy, where="id != 'e'")
    with (tmp_path / "in.jsonl").open("a") as file:
        file.write("{broken\n")
    again: list[int] = []
    read = Assembler._read_again

    def counted(self: Assembler, part: OpenPart) -> Iterator[Row]:
        again.append(part.part)
        return read(self, part)

    with monkeypatch.context() as patched:
        patched.setattr(window, "KEPT_BYTES", kept_bytes)
        patched.setattr(Assembler, "_read_again", counted)
        run(settings)
    assert sorted(set(again)) == [0, 1, 2, 3, 4] if kept_bytes == 0 else again
    same_as_at_once(settings)


def test_an_input_that_changes_before_its_part_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = job(tmp_path, list("abc"), part_rows=10)
    read = Assembler._read_again

    def changed(self: Assembler, part: OpenPart) -> Iterator[Row]:
        write(tmp_path / "in.jsonl", list("abd"))
        return read(self, part)

    monkeypatch.setattr(window, "KEPT_BYTES", 0)
    monkeypatch.setattr(Assembler, "_read_again", changed)
    with pytest.raises(InputError, match="rows 0 to 2 are not what they were"):
        run(settings)


def test_ids_beyond_a_selection_that_became_smaller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ids_module, "HELD_ROWS", 2)
    settings = job(tmp_path, list("abcdefghijkc"), limit=11)
    with pytest.raises(Killed):
        run(settings, kill_after=0)
    settings.limit = 4
    run(settings)
    settings.limit = None
    with pytest.raises(UsageError, match="rows 2 and 11"):
        run(settings)


KILLS = {"step_seconds": 0, "faults": [{"do": "kill", "rows": [8]}]}


@pytest.mark.parametrize("part_rows", [3, 4], ids=["in an open part", "in a part of its own"])
def test_a_poison_row_that_is_the_last_one_left(tmp_path: Path, part_rows: int) -> None:
    """No row can finish in this run, so the row that shows that the engine works is one of an earlier run."""
    settings = job(tmp_path, list("abcdefghi"), limit=8, part_rows=part_rows)
    run_here(settings)
    settings.limit, settings.worker = None, KILLS
    assert run_here(settings).exit_code == 0
    assert [row["status"] for row in read_output(Path(settings.output))] == ["ok"] * 8 + ["error"]
    assert not JobFolder(Path(settings.output)).suspects.exists()


def test_a_poison_row_that_is_retried_and_is_poison_still(tmp_path: Path) -> None:
    settings = job(tmp_path, list("abcdefghi"), worker=KILLS)
    run_here(settings)
    before = data_bytes(Path(settings.output))
    settings.retry = {"where": "engine_crash", "temperature": None}
    assert run_here(settings).exit_code == 0
    assert data_bytes(Path(settings.output)) == before
    settings.retry, settings.worker = None, {}
    assert "already complete" in run_here(settings).reason


def test_an_engine_that_kills_even_rows_that_were_done_blames_no_row(tmp_path: Path) -> None:
    settings = job(tmp_path, list("abcdefghi"), limit=8)
    run_here(settings)
    settings.limit = None
    settings.worker = {"step_seconds": 0, "faults": [{"do": "kill", "rows": list(range(9))}]}
    with pytest.raises(EngineError, match="times in a row without a single new result"):
        run_here(settings)


@pytest.mark.parametrize("policy", ["error", "suffix"])
def test_max_time_ends_also_the_reading_of_ids(
    tmp_path: Path, policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = ids_module.IdLedger.add
    added: list[int] = []

    def slow(self: Any, row_id: str, ordinal: int) -> None:
        time.sleep(0.05)
        added.append(ordinal)
        read(self, row_id, ordinal)

    monkeypatch.setattr(ids_module, "_ROWS_AT_ONCE", 1)
    # Else the ids of these few rows would come from the run's own reading.
    monkeypatch.setattr(unique_ids._Feed, "take", lambda self, ordinal: (None, False))
    monkeypatch.setattr(ids_module.IdLedger, "add", slow)
    settings = job(tmp_path, [str(i) for i in range(400)], duplicate_ids=policy, part_rows=100)
    settings.options = {"max_time": 2.0}
    setup = setup_of(settings)
    with setup.inputs:
        result = run_job(setup, settings.run_options(), RunHooks(launch=ThreadLauncher()))
    assert (result.exit_code, len(added) < 400) == (75, True)
    assert "run.max_time (2 s) is over" in result.reason
    monkeypatch.undo()
    settings.options = {}
    run(settings)
    same_as_at_once(settings)


def test_a_retry_takes_in_no_rows_that_the_input_has_more(tmp_path: Path) -> None:
    failing = {"faults": [{"do": "timeout", "rows": [4]}]}
    settings = job(tmp_path, list("abcdefgh"), grow="append", worker=failing)
    run_here(settings)
    with (tmp_path / "in.jsonl").open("a") as file:
        file.write('{"prompt": "p8", "id": "i"}\n')
    settings.worker, settings.retry = {}, {"where": None, "temperature": 0.5}
    said: list[str] = []
    assert run_here(settings, said).counts.rows == 8
    assert any("`batchgen run` takes that in, after this retry" in sentence for sentence in said)
    settings.retry = None
    assert run_here(settings).counts.rows == 9
    assert len(require_manifest(JobFolder(Path(settings.output))).changes) == 1
    same_as_at_once(settings, run_here)


def test_gates_of_rows_that_cannot_be_read_again_are_not_passed(tmp_path: Path) -> None:
    settings = job(tmp_path, list("abcdef"))
    settings.options = {"gates": (Gate.parse("ok", ">= 3"),)}
    assert run_here(settings).exit_code == 0
    folder = JobFolder(Path(settings.output))
    for path in folder.stats.glob("s*.jsonl"):
        path.unlink()
    part = folder.part(1, ".jsonl")
    stat = part.stat()
    part.write_bytes(b"x" * stat.st_size)
    os.utime(part, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    result = run_here(settings)
    assert result.exit_code == 8
    assert "3 of them can be read again, so run.gates cannot be checked" in result.reason
