"""`retry`: which rows run anew, which stay, and that a killed retry ends like one that ran through."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from job_driver import CRASHED, Settings, run_here, start
from job_inputs import data_bytes, read_output, write_jsonl
from waiting import PATIENCE

from batchgen.data.results import RowResult
from batchgen.job.condition import DEFAULT, Condition
from batchgen.job.folder import JobFolder
from batchgen.job.manifest import require_manifest
from batchgen.job.part_reader import PartRow
from batchgen.job.parts import recognise_parts
from batchgen.job.verify import verify_folder
from batchgen.types import DriftError, ErrorClass, RowError, UsageError

FAILED = [3, 27, 44]


def failing(*rows: int) -> dict[str, Any]:
    """An engine that is too slow for some rows."""
    return {"faults": [{"do": "timeout", "rows": rows}]}


def job(tmp_path: Path, **changes: Any) -> Settings:
    """60 rows of which three fail; rows 16, 33 and 50 cannot be read."""
    path = tmp_path / "in.jsonl"
    if not path.exists():
        write_jsonl(path, 60)
    settings = Settings(output=str(tmp_path / "out"), input=str(path), worker=failing(*FAILED), **changes)
    assert run_here(settings).exit_code == 0
    settings.worker = {}
    return settings


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, bytes]]:
    """By output format, the data/ of a run in which no row failed."""

    @cache
    def made(output_format: str) -> dict[str, bytes]:
        root = tmp_path_factory.mktemp("calm")
        path = write_jsonl(root / "in.jsonl", 60)
        run_here(Settings(output=str(root / "out"), input=str(path), format=output_format))
        return data_bytes(root / "out")

    return made


def retry(settings: Settings, where: str | None = None, temperature: float | None = None) -> Any:
    settings.retry = {"where": where, "temperature": temperature}
    return run_here(settings)


def code_of(settings: Settings) -> int:
    """Exit code of the job as a process of its own."""
    with start(settings) as process:
        process.communicate(timeout=PATIENCE)
        return process.returncode


def readable_rows(data: Path) -> int:
    """Rows of the parts, without what a killed run left half-written."""
    return sum(path.read_bytes().count(b"\n") for path in data.glob("part-*"))


def failed_rows(settings: Settings) -> list[int]:
    return [r["row"] for r in read_output(Path(settings.output)) if r["status"] == "error"]


@pytest.mark.parametrize("output_format", ["jsonl", "parquet"])
def test_failed_rows_run_anew_and_nothing_else_changes(tmp_path: Path, output_format: str, calm: Any) -> None:
    settings = job(tmp_path, format=output_format)
    before = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out/data").iterdir()}
    result = retry(settings)
    assert (result.exit_code, result.counts.ok, result.counts.error) == (0, 57, 3)
    assert failed_rows(settings) == [16, 33, 50]
    assert data_bytes(Path(settings.output)) == calm(output_format)
    after = {p.name: p.stat().st_mtime_ns for p in (tmp_path / "out/data").iterdir()}
    touched = [name for name in before if before[name] != after[name]]
    assert [int(name[5:11]) for name in sorted(touched)] == [0, 2, 4]
    report = verify_folder(Path(settings.output))
    assert report.faults == []
    assert any("3 rows: retry of 3 rows" in note for note in report.notes)
    settings.retry = None
    assert "already complete" in run_here(settings).reason


def test_nothing_to_retry_leaves_the_folder_alone(tmp_path: Path) -> None:
    settings = job(tmp_path)
    manifest = (tmp_path / "out/manifest.json").read_bytes()
    result = retry(settings, "nonfinite,engine_oom")
    assert result.exit_code == 0
    assert "no row meets nonfinite,engine_oom; nothing to retry" in result.reason
    assert (tmp_path / "out/manifest.json").read_bytes() == manifest
    assert (tmp_path / "out/_SUCCESS").exists()


def test_rows_under_other_settings_are_recorded(tmp_path: Path) -> None:
    settings = job(tmp_path)
    retry(settings, "row=10:12", temperature=0.5)
    retry(settings, "row=11,row=59")
    folder = JobFolder(tmp_path / "out")
    manifest = require_manifest(folder)
    assert [c.rows for c in manifest.changes] == [2, 2]
    assert [line.split() for line in "\n".join(manifest.changes[0].differences).splitlines()] == [
        ["sampling.temperature"],
        ["-", "0.0"],
        ["+", "0.5"],
    ]
    settings_of = {
        part: commit.settings for part, commit in recognise_parts(folder).items() if commit.settings
    }
    assert settings_of == {1: ((10, 1, 1), (11, 1, 2)), 5: ((59, 1, 2),)}
    report = verify_folder(folder.root)
    assert report.faults == []
    assert any("1 row: retry of 2 rows (row=10:12)" in note for note in report.notes)


def test_a_job_that_is_not_complete_is_not_retried(tmp_path: Path) -> None:
    settings = job(tmp_path)
    (tmp_path / "out/data/part-000001.jsonl").unlink()
    with pytest.raises(UsageError, match=r"50 rows of 60 are in parts; only a complete job is retried"):
        retry(settings)


def test_a_retry_that_goes_on_is_not_mixed_with_another_or_with_a_run(tmp_path: Path) -> None:
    settings = job(tmp_path)
    settings.crash_at, settings.retry = 40, {"where": None, "temperature": None}
    assert code_of(settings) == CRASHED
    assert require_manifest(JobFolder(tmp_path / "out")).open_retry is not None
    settings.crash_at = None
    with pytest.raises(UsageError, match="was begun and has not ended; finish it first"):
        retry(settings, "row=1")
    settings.retry = None
    with pytest.raises(DriftError, match=r"finish it with `batchgen retry"):
        run_here(settings)
    assert "a retry of 3 rows" in "\n".join(verify_folder(tmp_path / "out").faults)
    retry(settings)
    assert failed_rows(settings) == [16, 33, 50]
    assert verify_folder(tmp_path / "out").ok


@pytest.mark.parametrize("first", [38, 66])
def test_a_retry_killed_anywhere_ends_in_the_same_bytes(tmp_path: Path, first: int, calm: Any) -> None:
    settings = job(tmp_path)
    names = {path.name for path in (tmp_path / "out/data").iterdir()}
    settings.retry = {"where": None, "temperature": None}
    for crash_at in (first, 31):
        settings.crash_at = crash_at
        assert code_of(settings) in (CRASHED, 0)
        assert readable_rows(tmp_path / "out/data") == 60
    settings.crash_at = None
    run_here(settings)
    assert data_bytes(tmp_path / "out") == calm("jsonl")
    assert {path.name for path in (tmp_path / "out/data").iterdir()} == names


def test_rows_that_fail_again_are_not_retried_for_ever(tmp_path: Path) -> None:
    settings = job(tmp_path)
    settings.worker = failing(27)
    assert retry(settings).counts.error == 4
    assert failed_rows(settings) == [16, 27, 33, 50]


ROW = PartRow(7, "a", RowResult("error", None, None, None, RowError(ErrorClass.TIMEOUT, "late"), None))
LONG = PartRow(12, "b", RowResult("ok", "text", "length", None, None, None))


@pytest.mark.parametrize(
    ("text", "of_row", "of_long"),
    [
        ("timeout", True, False),
        ("engine_oom,timeout", True, False),
        ("errors", True, False),
        ("context_length", False, False),
        ("finish_reason=length", False, True),
        ("finish_reason = length, timeout", True, True),
        ("status=ok", False, True),
        ("row=7", True, False),
        ("row=8:13", False, True),
        ("id=b", False, True),
        (DEFAULT, True, False),
    ],
)
def test_conditions(text: str, of_row: bool, of_long: bool) -> None:
    condition = Condition.parse(text)
    assert (condition(ROW), condition(LONG)) == (of_row, of_long)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("timeot", r"'timeot' is no condition; did you mean timeout\? Or use error classes, errors"),
        ("finish_reason=long", "finish_reason=long"),
        ("", "'' is no condition"),
        ("row=a", "row=a is no row"),
        ("row=3:", "row=3: is no row"),
    ],
)
def test_conditions_that_are_none(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Condition.parse(text)
