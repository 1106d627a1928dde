"""Jobs with several samples of a row: one row in journal and counts, lists or records in the output."""

from __future__ import annotations

import csv
import json
from array import array
from collections.abc import Sequence
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from fake_engine import answer, prompt_ids, text_of
from job_driver import CRASHED, Settings, run_here, start
from job_inputs import data_bytes, read_output, write_jsonl
from waiting import PATIENCE

from batchgen.data.packed_logprobs import PackedLogprobs
from batchgen.data.results import BatchLabels, plan_output
from batchgen.data.row_result import RowResult, exploded, imploded, pack_ids
from batchgen.data.sink import write_part
from batchgen.data.source import open_input
from batchgen.job.condition import Condition
from batchgen.job.export import ExportOptions, export_to_file
from batchgen.job.folder import JobFolder
from batchgen.job.folder_rows import FolderRows
from batchgen.job.gates import Gate
from batchgen.job.manifest import require_manifest
from batchgen.job.part_reader import PartRow, read_part
from batchgen.job.part_summary import PartSummary, add_results
from batchgen.job.parts import recognise_parts
from batchgen.job.status import read_status
from batchgen.job.verify import verify_folder
from batchgen.scores import TokenScores
from batchgen.types import ErrorClass, RowError

ROWS = 45
BROKEN = [row for row in range(ROWS) if row % 17 == 16]
N = 3
LAYOUTS = [
    ("jsonl", "list"),
    ("parquet", "list"),
    ("jsonl", "explode"),
    ("parquet", "explode"),
    ("openai_batch", "list"),
]
layouts = pytest.mark.parametrize(
    ("format", "samples"), LAYOUTS, ids=["-".join(layout) for layout in LAYOUTS]
)


def job(root: Path, format: str, samples: str, **changes: Any) -> Settings:
    path = root / "in.jsonl"
    if not path.exists():
        write_jsonl(path, ROWS)
    included = [] if format == "openai_batch" else ["output_token_ids", "prompt_token_ids"]
    fields = {"include": ["usage", "finish_reason", *included], "n": N, "samples": samples, "format": format}
    return Settings(output=str(root / "out"), input=str(path), **{**fields, **changes})


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By layout, the folder of a run without accidents."""

    @cache
    def made(format: str, samples: str) -> Path:
        root = tmp_path_factory.mktemp("calm")
        assert run_here(job(root, format, samples)).exit_code == 0
        return root / "out"

    return made


def wanted(row: int) -> list[list[int]]:
    """Token ids of all samples of a row."""
    return [answer(1, row, prompt_ids(f"prompt {row}"), 20, sample=sample) for sample in range(N)]


def reasons(samples: Sequence[Sequence[int]]) -> list[str]:
    return ["length" if len(ids) == 20 else "stop" for ids in samples]


def usage(row: int) -> dict[str, int]:
    prompt = len(f"prompt {row}")
    completion = sum(map(len, wanted(row)))
    return {"prompt_tokens": prompt, "completion_tokens": completion, "truncated_tokens": 0}


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_lists_hold_something_for_each_sample(calm: Any, format: str) -> None:
    rows = read_output(calm(format, "list"))
    assert [row["row"] for row in rows] == list(range(ROWS))
    for row in rows:
        if row["row"] in BROKEN:
            assert row["status"] == "error"
            assert [row[key] for key in ("generated_text", "finish_reason", "stop_reason")] == [None] * 3
            continue
        samples = wanted(row["row"])
        assert row["generated_text"] == [text_of(ids) for ids in samples]
        assert row["finish_reason"] == reasons(samples)
        assert row["stop_reason"] == [None] * N
        assert row["output_token_ids"] == samples
        assert row["usage"] == usage(row["row"])
        assert "sample" not in row


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_exploded_rows_have_a_record_for_each_sample(calm: Any, format: str) -> None:
    rows = read_output(calm(format, "explode"))
    places = [(row, sample) for row in range(ROWS) for sample in ([None] if row in BROKEN else range(N))]
    assert [(row["row"], row["sample"]) for row in rows] == places
    assert list(rows[0])[:3] == ["row", "id", "sample"]
    for row in rows:
        if row["row"] in BROKEN:
            assert (row["status"], row["generated_text"]) == ("error", None)
            continue
        ids = wanted(row["row"])[row["sample"]]
        assert (row["generated_text"], row["output_token_ids"]) == (text_of(ids), ids)
        assert [row["finish_reason"]] == reasons([ids])
        assert row["prompt_token_ids"] == prompt_ids(f"prompt {row['row']}")
        assert row["n"] == row["row"]
        # So that a sum over records counts every token once.
        assert row["usage"] == (None if row["sample"] else usage(row["row"]))


def test_a_batch_line_has_a_choice_for_each_sample(calm: Any) -> None:
    for row, line in enumerate(read_output(calm("openai_batch", "list"))):
        if row in BROKEN:
            assert line["response"] is None
            continue
        choices = line["response"]["body"]["choices"]
        assert [choice["index"] for choice in choices] == list(range(N))
        assert [choice["message"]["content"] for choice in choices] == [text_of(ids) for ids in wanted(row)]
        assert line["response"]["body"]["usage"]["completion_tokens"] == sum(map(len, wanted(row)))


@layouts
def test_counts_are_of_rows_and_verify_finds_every_one(calm: Any, format: str, samples: str) -> None:
    folder = calm(format, samples)
    report = verify_folder(folder)
    assert (report.faults, report.rows) == ([], ROWS)
    status = read_status(folder)
    assert (status.rows_done, status.error) == (ROWS, len(BROKEN))
    commits = recognise_parts(JobFolder(folder)).values()
    assert sum(commit.rows for commit in commits) == ROWS
    assert sum(commit.counts.completion_tokens for commit in commits) == sum(
        usage(row)["completion_tokens"] for row in range(ROWS) if row not in BROKEN
    )


@layouts
def test_killed_workers_and_a_stopped_job_change_no_byte(
    tmp_path: Path, calm: Any, format: str, samples: str
) -> None:
    settings = job(tmp_path, format, samples)
    (tmp_path / "state").mkdir()
    faults = [
        {"do": "kill", "after_tokens": 150, "times": 2},
        {"do": "fatal", "after_tokens": 400, "exit_code": 3, "times": 1, "message": "away"},
    ]
    settings.worker = {"faults": faults, "state": str(tmp_path / "state"), "step_seconds": 0.002}
    with pytest.raises(Exception, match="away"):
        run_here(settings)
    assert run_here(settings).exit_code == 0
    assert data_bytes(tmp_path / "out") == data_bytes(calm(format, samples))


@pytest.mark.parametrize("crash_at", [60, 150, 400])
def test_a_supervisor_that_dies_at_any_write_changes_no_byte(
    tmp_path: Path, calm: Any, crash_at: int
) -> None:
    settings = job(tmp_path, "jsonl", "explode", crash_at=crash_at)
    settings.worker = {"step_seconds": 0.001}
    process = start(settings)
    process.communicate(timeout=PATIENCE)
    assert process.returncode in (CRASHED, 0)
    settings.crash_at = None
    assert run_here(settings).exit_code == 0
    assert data_bytes(tmp_path / "out") == data_bytes(calm("jsonl", "explode"))


def test_a_long_row_goes_on_from_the_tokens_of_each_sample(tmp_path: Path) -> None:
    settings = job(tmp_path, "jsonl", "list", max_tokens=400, limit=4)
    slow = {"step_seconds": 0.004, "tokens": 400}
    settings.worker = {**slow, "faults": [{"do": "fatal", "after_tokens": 2400, "exit_code": 3}]}
    with pytest.raises(Exception, match="chokes"):
        run_here(settings)
    kept = read_status(tmp_path / "out").tokens_kept
    assert kept > 1000
    settings.worker = {
        "tokens": 400,
        "faults": [{"do": "fatal", "after_tokens": 4 * N * 400 - kept + 1, "exit_code": 3}],
    }
    assert run_here(settings).exit_code == 0
    assert all(len(ids) == 400 for row in read_output(tmp_path / "out") for ids in row["output_token_ids"])


@layouts
def test_a_retry_replaces_rows_with_all_their_samples(
    tmp_path: Path, calm: Any, format: str, samples: str
) -> None:
    settings = job(tmp_path, format, samples, worker={"faults": [{"do": "timeout", "rows": [3, 27]}]})
    assert run_here(settings).exit_code == 0
    assert len(read_output(tmp_path / "out")) == len(read_output(calm(format, samples))) - (
        2 * (N - 1) if samples == "explode" else 0
    )
    settings.worker, settings.retry = {}, {"where": None, "temperature": None}
    result = run_here(settings)
    assert (result.exit_code, result.counts.error) == (0, len(BROKEN))
    assert data_bytes(tmp_path / "out") == data_bytes(calm(format, samples))


@pytest.mark.parametrize("target", ["jsonl", "parquet", "csv", "openai_batch"])
@layouts
def test_exports_hold_all_samples(tmp_path: Path, calm: Any, format: str, samples: str, target: str) -> None:
    path = tmp_path / f"out.{target}"
    with closing(FolderRows(calm(format, samples))) as source:
        assert export_to_file(source, ExportOptions(format=target), path, force=True) == ROWS
    if target == "parquet":
        rows = pq.read_table(path).to_pylist()
    elif target == "csv":
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
    else:
        rows = [json.loads(line) for line in path.read_text().splitlines()]
    texts = [text_of(ids) for row in range(ROWS) if row not in BROKEN for ids in wanted(row)]
    if target == "openai_batch":
        bodies = [row["response"]["body"] for row in rows if row["response"]]
        found = [choice["message"]["content"] for body in bodies for choice in body["choices"]]
    elif samples == "explode":
        found = [row["generated_text"] for row in rows if row["status"] == "ok"]
        assert {str(row["sample"]) for row in rows if row["status"] == "ok"} == {"0", "1", "2"}
    else:
        lists = [row["generated_text"] for row in rows if row["status"] == "ok"]
        found = [text for one in lists for text in (json.loads(one) if target == "csv" else one)]
    assert found == texts


@pytest.mark.parametrize("samples", ["list", "explode"])
def test_what_is_only_in_the_journal_is_exported_alike(tmp_path: Path, calm: Any, samples: str) -> None:
    settings = job(tmp_path, "parquet", samples, worker={"faults": [{"do": "fatal", "after_tokens": 500}]})
    settings.worker["faults"][0]["exit_code"] = 3
    with pytest.raises(Exception, match="chokes"):
        run_here(settings)
    inputs = open_input([settings.input])
    with closing(FolderRows(tmp_path / "out", inputs)) as source:
        rows = export_to_file(source, ExportOptions(format="jsonl"), tmp_path / "a.jsonl", force=True)
    inputs.close()
    with closing(FolderRows(calm("parquet", samples))) as source:
        export_to_file(source, ExportOptions(format="jsonl"), tmp_path / "b.jsonl", force=True)
    whole = (tmp_path / "b.jsonl").read_text().splitlines()
    assert 0 < rows < ROWS
    assert set((tmp_path / "a.jsonl").read_text().splitlines()) < set(whole)


def test_verify_sees_a_sample_that_is_missing_or_there_twice(tmp_path: Path, calm: Any) -> None:
    folder = calm("jsonl", "explode")
    part = folder / "data/part-000001.jsonl"
    plan = require_manifest(JobFolder(folder)).output_plan
    lines = part.read_text().splitlines(keepends=True)
    for wrong in (lines[:1] + lines[2:], lines[:1] + lines, lines[1:]):
        (tmp_path / part.name).write_text("".join(wrong))
        with pytest.raises(ValueError, match="the samples of a row are"):
            list(read_part(tmp_path / part.name, plan))
    assert len(list(read_part(part, plan, only=("status",)))) == 10


RESULT = RowResult("ok", ["a", "b"], ["stop", "length"], ["x", None], None, (1, 2, 0), {"prompt": "p"})


@pytest.mark.parametrize(
    "result",
    [
        RESULT,
        RESULT._replace(
            included={"prompt": "p", "reasoning": [None, "r"], "output_token_ids": [b"", b"1234"]}
        ),
        RowResult("ok", ["a"], ["stop"], [None], None, (1, 2, 0)),
        RowResult("ok", ["a", "b"], usage=(1, 2, 0)),
        RowResult("error", error=RowError(ErrorClass.TIMEOUT, "late"), usage=(1, 0, 0)),
        RowResult("skipped"),
    ],
)
def test_records_of_samples_make_the_row_again(result: RowResult) -> None:
    assert imploded(exploded(result)) == result


@layouts
def test_all_that_samples_have_is_written_and_read_again(tmp_path: Path, format: str, samples: str) -> None:
    scores = [
        TokenScores(array("q", [65, 66 + i]), array("d", [-0.5, -1.5]), array("q", [1, 3])) for i in range(2)
    ]
    logprobs = [PackedLogprobs.of(one, lambda token: bytes([token])).pack() for one in scores]
    included = {"logprobs": logprobs, "reasoning": [None, "r"]}
    if format != "openai_batch":
        included |= {"prompt": "p", "seed": 3, "output_token_ids": [pack_ids([1]), pack_ids([])]}
    # Prompt, completion, truncated and reasoning tokens.
    written = [
        RESULT._replace(usage=(1, 2, 0, 1), included=included),
        RowResult("error", error=RowError(ErrorClass.TIMEOUT, "late"), usage=(1, 0, 0, 0)),
        RESULT._replace(usage=(1, 2, 0, 2), included={**included, "reasoning": ["a", "b"]}),
    ]
    (tmp_path / "in.jsonl").write_text('{"q": "x"}\n' * 3)
    inputs = open_input([str(tmp_path / "in.jsonl")])
    include = [] if format == "openai_batch" else ["prompt", "seed", "output_token_ids", "logprobs"]
    plan = plan_output(
        inputs,
        format=format,
        include=["usage", "finish_reason", *include],
        batch=BatchLabels("0123456789abcdef", "fake", chat=True),
        samples=samples,
        reasoning="reasoning",
    )
    path = tmp_path / f"part.{'parquet' if format == 'parquet' else 'jsonl'}"
    assert write_part(path, zip(inputs.rows(), written, strict=True), plan, compression="none").rows == 3
    inputs.close()
    found = [row.result for row in read_part(path, plan.to_json())]
    if format == "openai_batch":
        written[1] = written[1]._replace(usage=None)
    assert found == written


@pytest.mark.parametrize(
    ("where", "meant"),
    [
        ("finish_reason=length", True),
        ("finish_reason=abort", False),
        ("stop_reason=x", True),
        ("stop_reason=b", False),
    ],
)
def test_a_row_is_meant_if_one_of_its_samples_is(where: str, meant: bool) -> None:
    assert Condition.parse(where)(PartRow(0, "0", RESULT)) is meant


def test_gates_count_answers_and_take_shares_of_them() -> None:
    summary = PartSummary()
    results = [RESULT, RESULT, RowResult("error", error=RowError(ErrorClass.TIMEOUT, "late"))]
    add_results(summary, [(i, str(i)) for i in range(3)], results)
    assert summary.finish_reasons == {"stop": 2, "length": 2}
    assert Gate.parse("finish_reason.length", "<= 40%").fault(summary) is None
    fault = Gate.parse("finish_reason.length", "< 40%").fault(summary)
    assert fault == "finish_reason.length is 2 of 5 answers (40%) and run.gates asks for < 40%"
    assert Gate.parse("error", "<= 34%").fault(summary) is None
