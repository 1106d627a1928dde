"""Histograms, summaries of parts, and what a run leaves in `.batchgen/stats/`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from job_driver import Settings, run_here
from job_inputs import write_jsonl

from batchgen.data.results import RowResult
from batchgen.job.folder import JobFolder
from batchgen.job.histogram import Histogram
from batchgen.job.part_reader import read_part
from batchgen.job.part_summary import EXAMPLES, PartSummary, summary_of
from batchgen.job.parts import read_summaries, recognise_parts
from batchgen.job.progress import Progress
from batchgen.job.run_stats import RunStats, read_rows, read_times
from batchgen.types import ErrorClass, RowError

VALUES = st.lists(st.one_of(st.just(0.0), st.floats(1e-3, 1e9), st.integers(0, 10**6)), max_size=80)


@given(VALUES, VALUES)
def test_histograms_add_up_and_keep_quantiles_within_five_percent(a: list[float], b: list[float]) -> None:
    left, right, both = Histogram(), Histogram(), Histogram()
    left.add(a)
    right.add(b)
    both.add([*a, *b])
    left.merge(Histogram.from_json(json.loads(json.dumps(right.to_json()))))
    assert (left.bins, left.zeros, left.largest) == (both.bins, both.zeros, both.largest)
    assert both.count == len(a) + len(b)
    values = sorted([*a, *b])
    for share in (0.5, 0.9, 1.0):
        exact = values[max(0, -int(-share * len(values) // 1) - 1)] if values else 0.0
        assert both.quantile(share) == pytest.approx(exact, rel=0.05)
    assert sum(count for *_, count in both.bars(2)) + both.zeros == len(values)


def test_bars_begin_at_powers_of_two_and_leave_no_gap() -> None:
    histogram = Histogram()
    histogram.add([1, 2, 4, 4, 64])
    assert histogram.bars(1) == [
        (1.0, 2.0, 1),
        (2.0, 4.0, 1),
        (4.0, 8.0, 2),
        (8.0, 16.0, 0),
        (16.0, 32.0, 0),
        (32.0, 64.0, 0),
        (64.0, 128.0, 1),
    ]
    assert Histogram().bars(2) == []


def failed(row: int) -> tuple[int, str, RowResult]:
    error = RowError(ErrorClass.TEMPLATE, f"\x1b[31mrow\n{row}\u202e")
    return row, f"id\x07{row}", RowResult("error", error=error)


def test_a_summary_shows_the_first_failures_harmlessly() -> None:
    ok = RowResult("ok", "text", "length", usage=(100, 7, 3))
    first = summary_of([(row, "x", ok) for row in range(5)] + [failed(5), failed(6)])
    second = summary_of([failed(row) for row in range(3)])
    second.merge(PartSummary.from_json(json.loads(json.dumps(first.to_json()))))
    assert second.status == {"error": 5, "ok": 5}
    assert second.finish_reasons == {"length": 5}
    assert (second.truncated_rows, second.truncated_tokens) == (5, 15)
    assert second.output_tokens.total == 35
    group = second.errors["template"]
    assert group.count == 5
    assert len(group.examples) == EXAMPLES
    assert group.examples[0] == (0, "id\\x070", "\\x1b[31mrow\\n0\\u202e")


def test_a_run_leaves_what_the_report_needs(tmp_path: Path) -> None:
    lines = write_jsonl(tmp_path / "in.jsonl", 60).read_text().splitlines()
    lines[3] = '{"prompt": "a", "score": NaN}'
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    run_here(Settings(output=str(tmp_path / "out"), input=str(tmp_path / "in.jsonl")))
    folder, damaged = JobFolder(tmp_path / "out"), []
    records = list(read_rows(folder, damaged))
    rows = [row for record in records for row in record.get("row", [])]
    assert sorted(rows) == [row for row in range(60) if row % 17 != 16]
    assert [record for record in records if "notes" in record] == [
        {"part": 0, "notes": {"nan_replaced": [1, 3]}}
    ]
    samples = list(read_times(folder, 1, damaged))
    assert samples[-1]["rows_done"] == 60
    assert samples[-1]["output_tokens"] > 0
    parts = recognise_parts(folder)
    summaries = read_summaries(folder, parts, damaged)
    names = {name: name for name in ("row", "id", "status", "finish_reason", "error", "usage")}
    plan = {"format": "jsonl", "names": names}
    assert len(parts) == 6
    for commit in parts.values():
        assert summary_of(read_part(folder.data / commit.file, plan)) == summaries[commit.part]
    assert damaged == []


def test_the_course_of_a_long_attempt_stays_short(tmp_path: Path) -> None:
    folder = JobFolder(tmp_path)
    folder.create()
    stats = RunStats(folder, 1)
    snapshot = asdict(Progress())
    for second in range(0, 40_000, 1):
        stats.sample(float(second), snapshot)
    stats.close()
    times = [sample["seconds"] for sample in read_times(folder, 1, [])]
    assert times[:3] == [0.0, 2.0, 4.0]
    assert 3_000 < len(times) < 6_000
    assert times == sorted(times)
