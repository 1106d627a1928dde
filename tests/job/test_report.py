"""The report: what it says of jobs in every state, that it is one harmless file, and how two compare."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any

import html5lib
import pytest
from job_driver import Settings, run_here
from job_inputs import write_jsonl

from batchgen.job.attempts import Attempt
from batchgen.job.folder import JobFolder
from batchgen.job.gates import Gate
from batchgen.job.report.collect import collect_report
from batchgen.job.report.compare import compare
from batchgen.job.report.course import MOST_STRETCHES, Course
from batchgen.job.report.page import render_page, verdict_line
from batchgen.job.report.plots import Line, duration, histogram_plot, line_plot, nice_ceiling, short_number
from batchgen.job.report.rows import SLOWEST
from batchgen.job.report.write import report_attempt, write_report
from batchgen.types import InputError, UsageError

HOSTILE = "</td></script><script>alert(1)</script><img src=x onerror=alert(1)>\"'&lt;\x1b[31m\u202eX\x00"
ALLOWED = {
    *("html", "head", "body", "meta", "title", "style", "header", "h1", "h2", "p", "div", "dl", "dt", "dd"),
    *("small", "strong", "span", "table", "tbody", "tr", "th", "td", "ul", "li", "pre", "details", "summary"),
    *("figure", "figcaption", "svg", "text", "line", "rect", "polygon", "polyline", "circle"),
}
ATTRIBUTES = {
    *("lang", "charset", "http-equiv", "content", "name", "class", "viewBox", "role", "aria-label"),
    *("x", "y", "x1", "x2", "y1", "y2", "width", "height", "points", "cx", "cy", "r"),
}


def job(tmp_path: Path, name: str = "out", rows: int = 60, **changes: Any) -> Settings:
    write_jsonl(tmp_path / "in.jsonl", rows)
    return Settings(output=str(tmp_path / name), input=str(tmp_path / "in.jsonl"), **changes)


def report_of(settings: Settings) -> dict[str, Any]:
    return collect_report(Path(settings.output))


def elements(page: str) -> list[Any]:
    """Every element as a browser would build them."""
    tree = html5lib.parse(page, treebuilder="etree", namespaceHTMLElements=False)
    return list(tree.iter())


def words(element: Any) -> str:
    return "".join(element.itertext())


def test_a_run_leaves_a_report_of_a_complete_job(tmp_path: Path) -> None:
    gates = (Gate.parse("error", "<= 10%"), Gate.parse("error.timeout", "== 0"))
    settings = job(tmp_path, options={"gpu_hour": 3600.0, "gates": gates})
    run_here(settings)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["verdict"] == {
        "state": "complete",
        "exit_code": 0,
        "reason": "complete: all 60 rows have a result, 3 of them an error",
        "good": True,
    }
    assert (report["rows"]["done"], report["rows"]["error"], report["work"]["rows"]) == (60, 3, 57)
    assert report["finish_reasons"]
    assert report["lengths"]["output_tokens"]["count"] == 57
    assert report["lengths"]["output_tokens"]["max"] <= 20
    assert report["times"]["decode_seconds"]["count"] == 57
    assert len(report["slowest_rows"]) == SLOWEST
    assert all(slow["id"].startswith("in.jsonl:") for slow in report["slowest_rows"])
    (error,) = report["errors"]
    assert (error["class"], error["count"]) == ("invalid_json", 3)
    assert [(gate["measure"], gate["condition"], gate["passed"]) for gate in report["gates"]] == [
        ("error", "<= 10%", True),
        ("error.timeout", "== 0", True),
    ]
    assert [example["row"] for example in error["examples"]] == [16, 33, 50]
    assert report["cost"]["total"] == pytest.approx(report["work"]["gpu_hours"] * 3600)
    assert report["work"]["output_tokens"] > report["work"]["rows"]
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Complete, exit code 0. 60 of 60 rows done, 3 failed." in page


def test_a_stopped_and_a_failed_job_have_a_report_and_a_resumed_one_all_attempts(tmp_path: Path) -> None:
    fatal = {"faults": [{"do": "fatal", "after_tokens": 200, "exit_code": 3, "message": HOSTILE}]}
    settings = job(tmp_path, worker=fatal)
    with pytest.raises(InputError):
        run_here(settings)
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["verdict"]["state"] == "failed"
    assert report["verdict"]["exit_code"] == 3
    assert 0 < report["rows"]["done"] < 60
    settings.worker = {"step_seconds": 0.05}
    settings.options = {"max_time": 0.3, "grace": 0.2}
    assert run_here(settings).exit_code == 75
    stopped = report_of(settings)
    assert verdict_line(stopped).startswith(
        "Stopped, resumable: run the same command to continue, exit code 75"
    )
    settings.options, settings.worker = {}, {}
    run_here(settings)
    whole = report_of(settings)
    assert [attempt["exit_code"] for attempt in whole["attempts"]] == [3, 75, 0]
    # No attempt counts what another did; rows that cannot be read run in none.
    assert whole["work"]["rows"] == 57
    assert [mark["number"] for mark in whole["course"]["attempts"]] == [1, 2, 3]


def test_a_dead_job_is_reported_from_parts_journal_and_samples(tmp_path: Path) -> None:
    fatal = {"faults": [{"do": "fatal", "after_tokens": 300, "exit_code": 3, "message": "x"}]}
    settings = job(tmp_path, worker=fatal)
    with pytest.raises(InputError):
        run_here(settings)
    folder = JobFolder(Path(settings.output))
    path = folder.attempts / "0001.json"
    Attempt(**{**json.loads(path.read_text()), "exit_code": None, "end": None, "error": None}).save(folder)
    for summaries in folder.stats.glob("s*.jsonl"):
        summaries.unlink()
    with (folder.stats / "r000001.jsonl").open("ab") as log:
        log.write(b"torn")
    report = report_of(settings)
    assert (report["verdict"]["state"], report["verdict"]["exit_code"]) == ("dead", None)
    assert report["lengths"]["output_tokens"]["count"] == report["rows"]["ok"] > 0
    assert any("torn or damaged" in message for message in report["messages"])
    assert "Killed, resumable" in render_page(report)


def test_row_text_never_becomes_markup(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text(
        "".join(json.dumps({"id": f"{HOSTILE}{row}", "prompt": HOSTILE}) + "\n" for row in range(20))
    )
    faults = [{"do": "template", "rows": [1, 2], "message": HOSTILE}]
    settings = job(tmp_path, rows=0, part_rows=5, worker={"faults": faults})
    (tmp_path / "in.jsonl").write_text(
        "".join(json.dumps({"id": f"{HOSTILE}{row}", "prompt": HOSTILE}) + "\n" for row in range(20))
    )
    run_here(settings)
    report = report_of(settings)
    report["settings"]["job"] = report["name"] = HOSTILE
    report["settings"]["pinned"] = report["settings"]["facts"] = {HOSTILE: HOSTILE}
    report["finish_reasons"] = {HOSTILE: 20}
    report["input"]["notes"] = {HOSTILE: {"rows": 1, "first_row": 0}}
    report["messages"] = [HOSTILE]
    report["attempts"][0] |= {"host": HOSTILE, "reason": HOSTILE, "versions": {HOSTILE: HOSTILE}}
    report["compare"] = {
        "folder": HOSTILE,
        "figures": [],
        "outputs": {
            **dict.fromkeys(("equal", "different", "only_this", "only_other", "other_ids"), 1),
            "examples": [{"row": 1, "id": HOSTILE, "this": HOSTILE, "other": HOSTILE}],
        },
    }
    page = render_page(report)
    for element in elements(page):
        assert str(element.tag).rpartition("}")[2] in ALLOWED
        assert {str(name).rpartition("}")[2] for name in element.attrib} <= ATTRIBUTES
    seen = words(elements(page)[0])
    assert seen.count("<script>alert(1)</script>") > 20
    assert "\\x1b[31m\\u202eX\\x00" in seen
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]", page)


def test_the_page_forbids_everything_but_its_own_style(tmp_path: Path) -> None:
    settings = job(tmp_path, rows=10)
    run_here(settings)
    page = (tmp_path / "out" / "report.html").read_text()
    tags = elements(page)
    (policy,) = [tag.get("content") for tag in tags if tag.get("http-equiv")]
    (style,) = [words(tag) for tag in tags if tag.tag == "style"]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert policy == (f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'")
    assert not re.search(r"(?:src|href|style)=|url\(|@import|https?://", page)


def test_compare_pairs_rows_and_shows_where_outputs_differ(tmp_path: Path) -> None:
    one, other = job(tmp_path, "one"), job(tmp_path, "two", seed=2, limit=40, format="parquet")
    same = job(tmp_path, "same", compression="zstd", part_rows=7)
    for settings in (one, other, same):
        run_here(settings)
    reports = [report_of(settings) for settings in (one, other, same)]
    outputs = compare(reports[0], reports[2])["outputs"]
    assert outputs == {
        **dict.fromkeys(("different", "only_this", "only_other", "other_ids"), 0),
        "equal": 60,
        "examples": [],
    }
    found = compare(reports[0], reports[1])
    outputs = found["outputs"]
    # Broken rows fail in the same way in both.
    assert (outputs["equal"], outputs["different"], outputs["only_this"]) == (2, 38, 20)
    assert len(outputs["examples"]) == 10
    assert outputs["examples"][0]["this"] != outputs["examples"][0]["other"]
    figures = {figure["name"]: figure for figure in found["figures"]}
    assert figures["rows done"]["ratio"] == 1.5
    page = write_report(Path(one.output), {**reports[0], "compare": found}, "compare")
    assert "Of 40 rows that both have, 2 have the same output and 38 (95.00%) another." in page.read_text()


def test_a_report_that_cannot_be_made_in_time_or_at_all_is_said(tmp_path: Path) -> None:
    settings = job(tmp_path)
    run_here(settings)
    folder, said = JobFolder(Path(settings.output)), list[str]()
    before = (folder.root / "report.html").read_bytes()
    report_attempt(folder, said.append, -1.0)
    assert said == [f"the report takes too long to write now; make it with `batchgen report {folder.root}`"]
    assert (folder.root / "report.html").read_bytes() == before
    folder.manifest.unlink()
    report_attempt(folder, said.append, None)
    assert "no manifest.json" in said[1]
    with pytest.raises(UsageError):
        collect_report(tmp_path / "nowhere")


def test_a_course_of_any_length_has_a_bounded_number_of_points() -> None:
    course = Course()
    for number in (1, 2):
        course.add_attempt(number, (sample(second, rate=100) for second in range(0, 5000, 2)))
    points = course.points()
    assert MOST_STRETCHES / 2 < len(points) <= MOST_STRETCHES
    assert course.boundaries == [(1, 0.0), (2, 4998.0)]
    for point in points[:-1]:
        assert point["output_tokens_per_second"] == pytest.approx(100)
        assert point["prefix_hit_share"] == pytest.approx(0.5)
        assert point["running"] == pytest.approx(7)
        assert point["pool_share"] == pytest.approx(0.25)


def sample(second: int, rate: int) -> dict[str, Any]:
    counters = dict.fromkeys(("prompt_tokens", "output_tokens", "preemptions"), rate * second)
    return {
        "seconds": float(second),
        "rows_done": second,
        "rows_before": 0,
        "cached_tokens": rate * second // 2,
        "running": 7,
        "waiting": 0,
        "pool_used": 1,
        "pool_total": 4,
        **counters,
    }


def test_pictures_say_when_there_is_nothing_to_show() -> None:
    assert "not known" in line_plot("x", [Line("", [(1.0, None)])], seconds=1.0)
    assert "not known" in histogram_plot("x", [], unit="u")
    assert "&lt;b&gt;" in line_plot("<b>", [Line("", [(0.5, 1.0), (0.7, None), (0.9, 2.0)])], seconds=1.0)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (7.25, "7.2"), (950, "950"), (1200, "1.2k"), (34_000, "34k"), (5e6, "5M"), (2e9, "2G")],
)
def test_short_numbers(value: float, text: str) -> None:
    assert short_number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.0078, "7.8 ms"),
        (0.85, "850 ms"),
        (0.9999, "1 s"),
        (3.54, "3.5 s"),
        (59.7, "1 min"),
        (65, "1 min 5 s"),
        (3599.9, "1 h"),
        (7800, "2 h 10 min"),
        (273_600, "3 d 4 h"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(("value", "top"), [(0, 1), (0.3, 0.3), (1, 1), (2.1, 3), (9, 10), (101, 120)])
def test_axes_end_at_round_numbers(value: float, top: float) -> None:
    assert nice_ceiling(value) == pytest.approx(top)
