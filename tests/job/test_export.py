"""Exported files hold the final rows as they are in the parts, whatever the formats and whoever runs."""

from __future__ import annotations

import csv
import io
import json
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from job_driver import Settings, run_here
from job_inputs import read_output, write_jsonl, write_parquet

from batchgen.cli.main import main
from batchgen.data.csv_lines import CsvLines
from batchgen.data.passthrough import AsTheyAre
from batchgen.data.row import Position, Row
from batchgen.data.row_result import RowResult
from batchgen.data.source import open_input
from batchgen.job.export import FORMATS, ExportOptions, export_to_file, export_to_folder
from batchgen.job.folder import JobFolder
from batchgen.job.folder_rows import FolderRows
from batchgen.job.parts import recognise_parts
from batchgen.types import ErrorClass, RowError, StorageError, UsageError

ROWS = 45
HALF_WAY = {"faults": [{"do": "fatal", "exit_code": 2, "after_tokens": 250}]}
JOBS = ("jsonl-jsonl", "jsonl-parquet", "parquet-parquet", "parquet-jsonl", "jsonl-openai_batch")


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Complete jobs, by input and output format."""
    root = tmp_path_factory.mktemp("jobs")
    write_jsonl(root / "in.jsonl", ROWS)
    write_parquet(root / "in.parquet", ROWS)
    for kind in JOBS:
        source, format = kind.split("-")
        settings = Settings(output=str(root / kind), input=str(root / f"in.{source}"), format=format)
        assert run_here(settings).exit_code == 0
    return root


def exported(folder: Path, path: Path, format: str, **options: Any) -> Path:
    with closing(FolderRows(folder)) as source:
        export_to_file(source, ExportOptions(format=format, **options), path, force=True)
    return path


def whole(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted((folder / "data").iterdir()))


@pytest.mark.parametrize("kind", ["jsonl-jsonl", "parquet-jsonl", "jsonl-openai_batch"])
def test_the_same_format_gives_the_same_lines(jobs: Path, tmp_path: Path, kind: str) -> None:
    format = kind.split("-")[1]
    assert exported(jobs / kind, tmp_path / "out", format).read_bytes() == whole(jobs / kind)


def test_other_formats_are_what_the_job_would_have_written(jobs: Path, tmp_path: Path) -> None:
    lines = exported(jobs / "parquet-parquet", tmp_path / "a", "jsonl").read_bytes()
    assert lines == whole(jobs / "parquet-jsonl")
    table = pq.read_table(exported(jobs / "jsonl-jsonl", tmp_path / "b", "parquet"))
    assert table.equals(pq.read_table(jobs / "jsonl-parquet/data"))
    table = pq.read_table(exported(jobs / "parquet-parquet", tmp_path / "c", "parquet"))
    assert table.equals(pq.read_table(jobs / "parquet-parquet/data"), check_metadata=True)


@pytest.mark.parametrize("kind", JOBS[:4])
def test_batch_lines_from_any_format(jobs: Path, tmp_path: Path, kind: str) -> None:
    path = exported(jobs / kind, tmp_path / "out", "openai_batch", model="m", chat=False)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    rows = read_output(jobs / kind)
    assert [line["custom_id"] for line in lines] == [row["id"] for row in rows]
    texts = [line["response"] and line["response"]["body"]["choices"][0]["text"] for line in lines]
    assert texts == [row["generated_text"] for row in rows]
    errors = [line["error"] and line["error"]["code"] for line in lines]
    assert errors == [row["error"] and row["error"]["class"] for row in rows]


@pytest.mark.parametrize("kind", JOBS)
def test_csv_holds_every_row(jobs: Path, tmp_path: Path, kind: str) -> None:
    path = exported(jobs / kind, tmp_path / "out.csv", "csv")
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["row"] for row in rows] == [str(i) for i in range(ROWS)]
    assert rows[2]["status"] == "ok"
    if kind.startswith("jsonl"):
        assert (rows[16]["error.class"], rows[16]["usage.prompt_tokens"]) == ("invalid_json", "")
    if not kind.endswith("openai_batch"):
        assert (rows[2]["prompt"], rows[2]["n"]) == ("prompt 2", "2")


@pytest.mark.parametrize("kind", JOBS[:4])
@pytest.mark.parametrize("format", ["jsonl", "parquet", "csv"])
def test_columns(jobs: Path, tmp_path: Path, kind: str, format: str) -> None:
    path = exported(jobs / kind, tmp_path / "out", format, columns=("n", "generated_text", "error"))
    if format == "parquet":
        names = set(pq.read_schema(path).names)
    elif format == "csv":
        names = set(path.read_text().splitlines()[0].split(","))
    else:
        names = set(json.loads(path.read_text().splitlines()[0]))
    errors = {"error.class", "error.message"} if format == "csv" else {"error"}
    assert names - {"extra"} == {"n", "generated_text", *errors}
    with pytest.raises(UsageError, match=r"--columns: the output has no column 'generated'; did you mean"):
        exported(jobs / kind, path, format, columns=("generated",))


@pytest.mark.parametrize("kind", JOBS)
def test_rows_of_the_journal_are_as_they_will_be_in_their_part(jobs: Path, tmp_path: Path, kind: str) -> None:
    source, format = kind.split("-")
    settings = Settings(
        output=str(tmp_path / "out"),
        input=str(jobs / f"in.{source}"),
        format=format,
        worker=HALF_WAY,
    )
    with pytest.raises(UsageError, match="chokes"):
        run_here(settings)
    with open_input(settings.input) as inputs, closing(FolderRows(tmp_path / "out", inputs)) as found:
        rows = export_to_file(found, ExportOptions(format="jsonl"), tmp_path / "partial", force=False)
    assert rows > sum(commit.rows for commit in recognise_parts(JobFolder(tmp_path / "out")).values())
    complete = exported(jobs / kind, tmp_path / "complete", "jsonl").read_bytes().splitlines()
    partial = (tmp_path / "partial").read_bytes().splitlines()
    assert [line for line in complete if line in set(partial)] == partial
    without = exported(tmp_path / "out", tmp_path / "without", "jsonl").read_bytes().splitlines()
    # Parts need not be committed in order.
    assert [line for line in partial if line in set(without)] == without


def test_bad_rows_outside_the_selection_are_not_exported(tmp_path: Path) -> None:
    broken = ["{broken"] * 3
    rows = [json.dumps({"prompt": f"prompt {row}"}) for row in range(27)]
    (tmp_path / "in.jsonl").write_text("\n".join([*broken, *rows, ""]))
    settings = Settings(
        output=str(tmp_path / "out"),
        input=str(tmp_path / "in.jsonl"),
        rows="3:",
        worker=HALF_WAY,
        part_rows=30,
    )
    with pytest.raises(UsageError, match="chokes"):
        run_here(settings)
    with open_input(settings.input) as inputs, closing(FolderRows(tmp_path / "out", inputs)) as found:
        exported_rows = [row.ordinal for part in found.numbers() for row, _ in found.records(part)]
    assert exported_rows
    assert min(exported_rows) >= 3


def test_a_row_that_moves_from_the_journal_to_a_part_meanwhile_is_there_once(
    jobs: Path, tmp_path: Path
) -> None:
    settings = Settings(
        output=str(tmp_path / "out"),
        input=str(jobs / "in.jsonl"),
        worker=HALF_WAY,
    )
    with pytest.raises(UsageError, match="chokes"):
        run_here(settings)
    with open_input(settings.input) as inputs, closing(FolderRows(tmp_path / "out", inputs)) as found:
        assert run_here(Settings(output=settings.output, input=settings.input)).exit_code == 0
        rows = [row.ordinal for part in found.numbers() for row, _ in found.records(part)]
    assert len(rows) == len(set(rows))
    assert rows == sorted(rows)


def test_a_damaged_part_is_named(jobs: Path, tmp_path: Path) -> None:
    folder = tmp_path / "out"
    shutil.copytree(jobs / "jsonl-jsonl", folder)
    with closing(FolderRows(folder)) as found:
        path = folder / "data/part-000001.jsonl"
        path.write_bytes(b"x" * path.stat().st_size)
        with pytest.raises(StorageError, match=r"not what a part holds .* `batchgen verify` says more"):
            list(found.records(1))


def line(text: str | None, safe: bool, **values: Any) -> list[str]:
    row = Row(0, "i", values, None, 0, "", b"", Position())
    names = {"generated_text": "text"}
    lines = CsvLines(names, AsTheyAre().members, list(values), None, safe)
    written = "".join(lines.lines(iter([(row, RowResult("ok", text))])))
    _, cells = csv.reader(io.StringIO(written, newline=""))
    return cells


@pytest.mark.parametrize(
    "text", ["=1+1", "+1", "-1", "@x", "\tx", "\rx", "\nx", "＝1", "a=b", 'q"q', "a,b", "l\r\nl", " s ", "é"]
)
def test_csv_cells(text: str) -> None:
    assert line(text, safe=False) == [text]
    guarded = text[0] in "=+-@\t\r\n＝"
    assert line(text, safe=True) == [f"'{text}" if guarded else text]
    assert line(None, safe=True, v=text) == [f"'{text}" if guarded else text, ""]


def test_csv_controls_numbers_and_nested_values() -> None:
    assert line("a\0b\x1b[2J\x85", safe=False) == ["a\ufffdb\x1b[2J\x85"]
    assert line("a\0b\x1b[2J\x85", safe=True) == ["a\ufffdb\ufffd[2J\ufffd"]
    values = {"n": -5, "f": float("nan"), "b": b"\x00", "l": ["=x", None], "t": True, "big": 10**30}
    assert line("x", safe=True, **values) == ["-5", "null", "AA==", '["=x", null]', "true", str(10**30), "x"]


def test_csv_tells_null_from_an_empty_text() -> None:
    lines = CsvLines({"generated_text": "t", "stop_reason": "s"}, AsTheyAre().members, [], None, False)
    row = Row(0, "i", {}, None, 0, "", b"", Position())
    assert lines.line(row, RowResult("ok", "")) == '"",\r\n'


def test_csv_errors_and_ids() -> None:
    names = {key: key for key in ("row", "id", "error", "output_token_ids")}
    lines = CsvLines(names, AsTheyAre().members, [], "extra", False)
    row = Row(3, "a,b", {"later": 1}, None, 0, "", b"", Position())
    result = RowResult(
        "error", error=RowError(ErrorClass.TIMEOUT, "late"), included={"output_token_ids": b""}
    )
    written = "".join(lines.lines(iter([(row, result)])))
    assert written.split("\r\n")[:2] == [
        "row,id,extra,error.class,error.message,output_token_ids",
        '3,"a,b","{""later"": 1}",timeout,late,[]',
    ]


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> Iterator[Any]:
    def run(*arguments: str) -> tuple[int, str]:
        code = main(["export", *arguments])
        return code, capsys.readouterr().err

    return run


def test_the_verb_replaces_nothing_unasked(jobs: Path, tmp_path: Path, said: Any) -> None:
    folder, path = str(jobs / "jsonl-jsonl"), tmp_path / "a.jsonl.gz"
    assert said(folder, "--format", "jsonl", "--output", str(path)) == (0, f"{path}: {ROWS} rows\n")
    assert path.read_bytes()[:2] == b"\x1f\x8b"
    code, message = said(folder, "--format", "jsonl", "--output", str(path))
    assert (code, message) == (
        2,
        f"batchgen: {path} exists; choose another --output, or replace it with --force\n",
    )
    assert said(folder, "--format", "jsonl", "--output", str(path), "--force")[0] == 0
    assert sorted(tmp_path.iterdir()) == [path]


def test_the_verb_writes_folders_and_says_what_is_wrong(jobs: Path, tmp_path: Path, said: Any) -> None:
    folder = str(jobs / "jsonl-jsonl")
    assert said(folder, "--format", "csv", "--output", f"{tmp_path}/new/")[0] == 0
    names = [path.name for path in sorted((tmp_path / "new").iterdir())]
    assert names == [f"part-{part:06d}.csv" for part in range(5)]
    assert said(str(tmp_path), "--format", "csv")[0] == 2
    assert said(folder, "--format", "jsonl", "--csv-safe")[0] == 2
    code, message = said(folder, "--format", "csv", "--output", str(tmp_path / "none/x.csv"))
    assert (code, "No such file" in message) == (5, True)


def test_each_format_has_a_file_name_of_its_own() -> None:
    """Else an export in one format would be in the way of the next."""
    assert len(set(FORMATS.values())) == len(FORMATS)


OWN_FILES = ["data/part-000000.jsonl", ".batchgen/index/x", "manifest.json", "report.json", "_SUCCESS"]
# Whoever reads the data set would take them for parts.
AMONG_PARTS = ["data/extra.jsonl", "data/deeper/x.csv"]


@pytest.mark.parametrize("place", OWN_FILES + AMONG_PARTS)
def test_an_export_never_touches_what_a_job_keeps(jobs: Path, place: str) -> None:
    """Not even by force: the results themselves would be gone."""
    folder = jobs / "jsonl-jsonl"
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with pytest.raises(UsageError, match="is where a job keeps its own files; choose another --output"):
        exported(jobs / "jsonl-parquet", folder / place, "jsonl")
    with closing(FolderRows(folder)) as rows, pytest.raises(UsageError, match="its own files"):
        export_to_folder(rows, ExportOptions(format="parquet"), folder / "data", force=True)
    assert before == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_export_under_a_file_is_refused(jobs: Path) -> None:
    with pytest.raises(StorageError, match="Not a directory"):
        exported(jobs / "jsonl-jsonl", jobs / "in.jsonl" / "x", "jsonl")
