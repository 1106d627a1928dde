"""A whole job with the fake engine: every row once, in order, and how runs end."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from fake_engine import MAX_MODEL_LEN, answer, prompt_ids, text_of
from job_driver import Settings, run_here
from job_inputs import data_bytes, read_output, write_jsonl, write_parquet

from batchgen.data.results import INCLUDABLE
from batchgen.job.attempts import read_attempts
from batchgen.job.folder import JobFolder
from batchgen.job.parts import Counts
from batchgen.job.run import _complete
from batchgen.job.run_options import RunOptions
from batchgen.types import BatchgenError, DriftError, InputError, StorageError, UsageError


def job(tmp_path: Path, rows: int = 60, name: str = "out", **changes: Any) -> Settings:
    path = tmp_path / "in.jsonl"
    if not path.exists():
        write_jsonl(path, rows)
    return Settings(output=str(tmp_path / name), input=str(path), **changes)


def faulty(do: str, **changes: Any) -> dict[str, Any]:
    """An engine with one fault."""
    return {"faults": [{"do": do, **changes}]}


def failing(*rows: int) -> dict[str, Any]:
    """An engine that makes errors of rows."""
    return faulty("context_length", rows=rows, message="too long")


def check_rows(settings: Settings, rows: int) -> list[dict[str, Any]]:
    """Every row once, in order, with the right text."""
    read = read_output(Path(settings.output))
    assert [r["row"] for r in read] == list(range(rows))
    for r in read:
        if r["status"] == "ok":
            prompt = prompt_ids(f"prompt {r['row']}")
            assert r["generated_text"] == text_of(
                answer(settings.seed, r["row"], prompt, settings.max_tokens)
            )
    return read


def leftovers(settings: Settings) -> list[str]:
    root = Path(settings.output)
    return [str(p) for p in root.rglob("*") if p.name.startswith(".tmp") or p.suffix == ".seg"]


@pytest.mark.parametrize("output_format", ["jsonl", "parquet"])
def test_every_row_has_one_result_in_order(tmp_path: Path, output_format: str) -> None:
    settings = job(tmp_path, format=output_format, compression="zstd")
    result = run_here(settings)
    read = check_rows(settings, 60)
    assert (result.exit_code, result.counts.rows, result.counts.error) == (0, 60, 3)
    assert [r["row"] for r in read if r["status"] == "error"] == [16, 33, 50]
    assert leftovers(settings) == []
    assert json.loads((tmp_path / "out/_SUCCESS").read_text()) == {
        "rows": 60,
        "parts": 6,
        "first": 0,
        "stop": 60,
        "whole_input": True,
    }


def test_a_job_whose_rows_are_answered_does_not_wait_for_a_checkpoint(tmp_path: Path) -> None:
    result = run_here(job(tmp_path, options={"checkpoint_seconds": 86400.0}))
    assert (result.exit_code, result.counts.rows) == (0, 60)


def test_a_complete_folder_says_so_and_starts_nothing(tmp_path: Path) -> None:
    settings = job(tmp_path)
    run_here(settings)
    again = run_here(settings)
    assert again.exit_code == 0
    assert again.reason == (
        f"{settings.output} is already complete: all 60 rows have a result, 3 of them an error"
    )
    assert len(list(read_attempts(JobFolder(Path(settings.output))))) == 1


def test_a_missing_part_is_made_again_with_the_same_bytes(tmp_path: Path) -> None:
    settings = job(tmp_path)
    run_here(settings)
    before = data_bytes(tmp_path / "out")
    (tmp_path / "out/data/part-000002.jsonl").unlink()
    assert run_here(settings).exit_code == 0
    assert data_bytes(tmp_path / "out") == before


EVERYTHING = {"include": list(INCLUDABLE), "renames": {"prompt": "rendered"}}


@pytest.mark.parametrize("more", [{}, EVERYTHING], ids=["", "everything"])
@pytest.mark.parametrize("output_format", ["jsonl", "parquet", "openai_batch"])
def test_enlarging_the_limit_reopens_the_last_part_only(
    tmp_path: Path, output_format: str, more: dict[str, Any]
) -> None:
    if output_format == "openai_batch":
        more = {}
    write_parquet(tmp_path / "in.parquet", 60)
    changes: dict[str, Any] = {"input": str(tmp_path / "in.parquet"), "format": output_format, **more}
    whole = Settings(output=str(tmp_path / "whole"), **changes)
    run_here(whole)
    settings = Settings(output=str(tmp_path / "out"), limit=25, **changes)
    assert run_here(settings).counts.rows == 25
    stamps = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out/data").iterdir()}
    settings.limit = None
    assert run_here(settings).counts.rows == 60
    assert data_bytes(tmp_path / "out") == data_bytes(tmp_path / "whole")
    after = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out/data").iterdir()}
    assert [name for name in stamps if stamps[name] != after[name]] == [sorted(stamps)[-1]]
    attempts = list(read_attempts(JobFolder(tmp_path / "out")))
    assert sum(a.counters["ok"] for a in attempts) == 25 + 60


@pytest.mark.parametrize("output_format", ["jsonl", "parquet"])
def test_what_is_included_is_the_same_when_rows_resume_half_way(tmp_path: Path, output_format: str) -> None:
    write_parquet(tmp_path / "in.parquet", 40)
    changes: dict[str, Any] = {
        "input": str(tmp_path / "in.parquet"),
        "format": output_format,
        "options": {"checkpoint_seconds": 0.01},
        **EVERYTHING,
    }
    whole = Settings(output=str(tmp_path / "whole"), worker=failing(3), **changes)
    run_here(whole)
    said: list[str] = []
    killed = Settings(
        output=str(tmp_path / "out"),
        worker={
            "step_seconds": 0.003,
            "state": str(tmp_path),
            "faults": [*failing(3)["faults"], {"do": "kill", "after_tokens": 150, "times": 1}],
        },
        **changes,
    )
    assert run_here(killed, said).exit_code == 0
    assert any("SIGKILL" in sentence for sentence in said)
    assert data_bytes(tmp_path / "out") == data_bytes(tmp_path / "whole")
    rows = read_output(tmp_path / "out")
    assert rows[5]["rendered"] == "prompt 5"
    assert rows[5]["prompt_token_ids"] == prompt_ids("prompt 5")
    assert rows[5]["output_token_ids"] == answer(1, 5, prompt_ids("prompt 5"), 20)
    assert (rows[5]["seed"], rows[3]["seed"], rows[3]["rendered"]) == (1, None, "prompt 3")


def test_a_smaller_limit_than_what_is_there_is_refused(tmp_path: Path) -> None:
    settings = job(tmp_path)
    run_here(settings)
    settings.limit = 30
    with pytest.raises(DriftError, match=r"holds the results of 60 rows, and input\.limit asks for 30"):
        run_here(settings)
    assert (tmp_path / "out/_SUCCESS").exists()
    assert json.loads((tmp_path / "out/manifest.json").read_text())["limit"] is None


def test_another_job_is_refused_and_overwrite_starts_over(tmp_path: Path) -> None:
    settings = job(tmp_path)
    run_here(settings)
    settings.temperature = 0.5
    with pytest.raises(DriftError, match=r"sampling.temperature\n.*- 0.0\n.*\+ 0.5"):
        run_here(settings)
    settings.options = {"overwrite": True}
    settings.seed = 2
    assert run_here(settings).exit_code == 0
    check_rows(settings, 60)
    assert [a.number for a in read_attempts(JobFolder(tmp_path / "out"))] == [2]


def test_the_end_waits_for_no_checkpoint(tmp_path: Path) -> None:
    """The last part is made final by what is received, and not hours later."""
    settings = job(tmp_path, options={"checkpoint_seconds": 1e6})
    assert run_here(settings).exit_code == 0
    check_rows(settings, 60)


def test_errors_and_skipped_rows_alone_are_exit_8(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"id": "a"}\n{"id": "a", "prompt": "x"}\n')
    result = run_here(job(tmp_path, duplicate_ids="keep_first"))
    assert (result.exit_code, result.counts.error, result.counts.skipped) == (8, 1, 1)
    assert result.reason.endswith("every one is an error or skipped (1)")


def test_no_worker_starts_when_nothing_has_to_run(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("{broken\n" * 25)
    settings = job(tmp_path)
    result = run_here(settings)
    assert result.exit_code == 8
    assert "every one is an error" in result.reason
    assert run_here(settings).exit_code == 8
    (attempt,) = read_attempts(JobFolder(tmp_path / "out"))
    assert attempt.workers == []
    path.write_text("")
    empty = job(tmp_path, name="empty")
    assert run_here(empty).exit_code == 0
    assert (tmp_path / "empty/_SUCCESS").exists()


@pytest.mark.parametrize(("most", "code"), [(None, 0), (10, 0), (4, 8), (0.5, 0), (0.01, 8), (1.0, 0)])
def test_max_errors_finishes_and_exits_8(tmp_path: Path, most: float | None, code: int) -> None:
    settings = job(tmp_path, worker=failing(1, 2), options={"max_errors": most})
    assert run_here(settings).exit_code == code
    assert len(read_output(tmp_path / "out")) == 60


def test_a_bad_row_can_stop_the_run_with_what_was_done_kept(tmp_path: Path) -> None:
    settings = job(tmp_path, options={"stop_on_bad_row": True}, max_num_seqs=1, part_rows=4)
    with pytest.raises(InputError, match=r"row 16 is bad .*in.jsonl line 17.*--accept-drift"):
        run_here(settings)
    settings.options = {}
    assert run_here(settings).exit_code == 0
    check_rows(settings, 60)


def test_fail_fast_stops_at_the_first_failed_row(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(f'{{"prompt": "prompt {row}"}}\n' for row in range(60)))
    settings = job(tmp_path, worker=failing(30), options={"fail_fast": True})
    with pytest.raises(InputError, match="row 30 failed"):
        run_here(settings)
    settings.options = {}
    run_here(settings)
    assert len(check_rows(settings, 60)) == 60


def test_a_worker_that_dies_is_replaced(tmp_path: Path) -> None:
    settings = job(tmp_path, worker=faulty("kill", after_tokens=300))
    said: list[str] = []
    assert run_here(settings, said).exit_code == 0
    check_rows(settings, 60)
    (attempt,) = read_attempts(JobFolder(tmp_path / "out"))
    assert len(attempt.workers) > 1
    assert attempt.workers[0]["end"] == "was killed by SIGKILL"
    assert any("was killed by SIGKILL; starting another" in s for s in said)


def test_an_engine_that_fails_is_started_anew_while_it_gets_on(tmp_path: Path) -> None:
    worker = faulty("fatal", after_tokens=300, exit_code=7, message="out of luck")
    settings = job(tmp_path, worker=worker)
    said: list[str] = []
    run_here(settings, said)
    check_rows(settings, 60)
    assert any("ended with exit code 7; starting another" in s for s in said)


@pytest.mark.parametrize(("code", "kind"), [(2, UsageError), (3, InputError)])
def test_a_fatal_message_ends_the_run(tmp_path: Path, code: int, kind: type[BatchgenError]) -> None:
    worker = faulty("fatal", after_tokens=100, exit_code=code, message="out of luck")
    settings = job(tmp_path, worker=worker)
    with pytest.raises(kind, match=r"^out of luck$"):
        run_here(settings)
    (attempt,) = read_attempts(JobFolder(tmp_path / "out"))
    assert (attempt.exit_code, attempt.error) == (code, "out of luck")


def test_the_first_worker_pins_numeric_choices(tmp_path: Path) -> None:
    settings = job(tmp_path, worker=faulty("kill", after_tokens=300))
    run_here(settings)
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    assert manifest["pinned"] == {
        "dtype": "float32",
        "max_model_len": MAX_MODEL_LEN,
        "generation_defaults": {},
    }
    (tmp_path / "out/data/part-000000.jsonl").unlink()
    settings.worker = {"pinned": {"dtype": "bfloat16"}}
    with pytest.raises(DriftError, match=r"computes otherwise.*\n.*dtype\n.*float32.*\n.*bfloat16"):
        run_here(settings)


def test_a_changed_input_is_noticed_when_it_is_read_again(tmp_path: Path) -> None:
    settings = job(tmp_path, worker=faulty("fatal", after_tokens=100, exit_code=2))
    with pytest.raises(UsageError):
        run_here(settings)
    path = Path(settings.input)
    stat, content = path.stat(), path.read_bytes()
    path.write_bytes(content.replace(b'"prompt 3"', b'"prompt E"'))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    settings.worker = {}
    with pytest.raises(InputError, match=r"in.jsonl: rows 0 to 9 are not what they were"):
        run_here(settings)
    path.write_bytes(content)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert run_here(settings).exit_code == 0
    check_rows(settings, 60)


def test_max_time_stops_resumable(tmp_path: Path) -> None:
    slow = {"step_seconds": 0.02}
    settings = job(tmp_path, rows=200, worker=slow, options={"max_time": 0.5, "grace": 1.0})
    result = run_here(settings)
    assert result.exit_code == 75
    assert "max_time" in result.reason
    settings.worker, settings.options = {}, {}
    assert run_here(settings).exit_code == 0
    check_rows(settings, 200)


def test_no_permission_is_found_before_a_worker_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = job(tmp_path)

    def refuse(path: Path, *args: Any, **kwargs: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(StorageError, match=r"out: cannot be written: Permission denied; allow writing"):
        run_here(settings)


def test_too_little_space_is_found_before_a_worker_starts(tmp_path: Path) -> None:
    settings = job(tmp_path, options={"min_free_disk": 1 << 60})
    with pytest.raises(StorageError, match="min_free_disk"):
        run_here(settings)
    assert not list(read_attempts(JobFolder(tmp_path / "out")))


def test_a_torn_manifest_or_one_of_a_later_version_is_explained(tmp_path: Path) -> None:
    settings = job(tmp_path)
    run_here(settings)
    manifest = tmp_path / "out/manifest.json"
    data = json.loads(manifest.read_text())
    manifest.write_text(json.dumps({**data, "format": 99, "batchgen": "9.9"}))
    with pytest.raises(UsageError, match=r"written by batchgen 9\.9 in format 99"):
        run_here(settings)
    manifest.write_text('{"format')
    with pytest.raises(StorageError, match="not a manifest"):
        run_here(settings)


def test_memory_holds_only_the_open_window(tmp_path: Path) -> None:
    """20,000 rows in a process of its own: the peak does not grow with the rows."""
    peaks = [peak_of(tmp_path, rows) for rows in (2_000, 20_000)]
    assert peaks[1] < peaks[0] + 12_000


def peak_of(tmp_path: Path, rows: int) -> int:
    """Peak resident kilobytes of the supervisor's process."""
    folder = tmp_path / str(rows)
    folder.mkdir()
    size = {"rows": rows, "part_rows": 100, "max_tokens": 1, "max_num_seqs": 200}
    settings = job(folder, worker={"step_seconds": 0}, options={"checkpoint_seconds": 0.2}, **size)
    program = (
        "import sys, json, resource; sys.path.insert(0, sys.argv[2]); import job_driver;"
        "job_driver.run_here(job_driver.Settings(**json.loads(sys.argv[1])));"
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(asdict(settings)), str(Path(__file__).parent)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    check_rows(settings, rows)
    return int(done.stdout)


def test_a_half_finished_overwrite_never_mixes_two_jobs(tmp_path: Path) -> None:
    """Killed after the manifest was removed: what the old job left must not count for the new one."""
    run_here(job(tmp_path, seed=2))
    (tmp_path / "out/manifest.json").unlink()
    (tmp_path / "out/_SUCCESS").unlink()
    next(iter(sorted((tmp_path / "out/data").iterdir()))).unlink()
    settings = job(tmp_path)
    run_here(settings)
    check_rows(settings, 60)
    calm = job(tmp_path, name="calm")
    run_here(calm)
    assert data_bytes(Path(settings.output)) == data_bytes(Path(calm.output))


def test_fail_fast_is_not_forgotten_by_the_second_run() -> None:
    """An error row that an earlier attempt recorded still says that the job is not well."""
    options = RunOptions(fail_fast=True)
    counts = Counts()
    counts.count("ok", None)
    counts.count("error", None)
    assert _complete(counts, options, "complete").exit_code == 3
