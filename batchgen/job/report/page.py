"""Draws a report as one HTML file that needs nothing else: no network, no script, no fonts.

Row text never becomes markup. The template escapes every value, and makes visible first what could hide or
reorder text; a content security policy forbids everything but the page's own style, named by its hash.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from batchgen.grammar import agreeing, counted
from batchgen.job.report.plots import (
    Line,
    duration,
    histogram_plot,
    line_plot,
    percent,
    short_number,
)
from batchgen.text.visible import visible

_HERE = Path(__file__).parent
_TONES = {"complete": "good", "running": "good", "stopped": "warn", "dead": "warn", "failed": "bad"}
_STATES = {
    "complete": "Complete",
    "running": "Running",
    "stopped": "Stopped, resumable: run the same command to continue",
    "dead": "Killed, resumable: run the same command to continue",
    "failed": "Failed",
}


def render_page(report: Mapping[str, Any]) -> str:
    """The report as HTML.

    Args:
        report: what `collect_report` returned; `compare` may be in it.
    """
    style = (_HERE / "page.css").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        autoescape=True,
        finalize=_finalize,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= _FILTERS
    page = environment.from_string((_HERE / "page.html").read_text(encoding="utf-8"))
    attempts = [{**attempt, "end_text": _end(attempt)} for attempt in report["attempts"]]
    return page.render(
        r={**report, "attempts": attempts},
        title=report["name"] or Path(report["folder"]).name or "batchgen",
        policy=_policy(style),
        style=Markup(style),
        verdict=verdict_line(report),
        tone=_tone(report),
        plots={"course": _course_plots(report), "rows": _row_plots(report)},
        distributions=_distributions(report),
        comparison=_comparison(report),
        outputs=outputs_line(report["compare"]["outputs"]) if "compare" in report else "",
    )


def verdict_line(report: Mapping[str, Any]) -> str:
    """State, exit code and rows in one line."""
    verdict, rows = report["verdict"], report["rows"]
    whole = rows["total"]
    done = counted(rows["done"], "row") if whole is None else f"{rows['done']:,} of {counted(whole, 'row')}"
    code = "" if verdict["exit_code"] is None else f", exit code {verdict['exit_code']}"
    failed = f", {rows['error']:,} failed" if rows["error"] else ""
    return f"{_STATES[verdict['state']]}{code}. {done} done{failed}."


def outputs_line(outputs: Mapping[str, Any]) -> str:
    """How the outputs of two folders compare, in one sentence."""
    compared = outputs["equal"] + outputs["different"]
    if not compared:
        return "No row is in committed parts of both folders."
    alone = "".join(
        f" {counted(outputs[key], 'row')} {agreeing(outputs[key], 'is', 'are')} only in {where}."
        for key, where in (("only_this", "this one"), ("only_other", "the other one"))
        if outputs[key]
    )
    ids = outputs["other_ids"]
    other = f" {counted(ids, 'row')} {agreeing(ids, 'has', 'have')} another id." if ids else ""
    same = outputs["equal"]
    return (
        f"Of {counted(compared, 'row')} that both have, {same:,} {agreeing(same, 'has', 'have')} the same "
        f"output and {outputs['different']:,} ({outputs['different'] / compared:.2%}) another.{alone}{other}"
    )


def _finalize(value: Any) -> Any:
    """What the template is about to escape: text in which nothing hides."""
    return value if isinstance(value, Markup) else visible(str(value))


def _policy(style: str) -> str:
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


def _tone(report: Mapping[str, Any]) -> str:
    state = report["verdict"]["state"]
    return "bad" if state == "complete" and not report["verdict"]["good"] else _TONES[state]


def _end(attempt: Mapping[str, Any]) -> str:
    if attempt["end"] is None:
        return "no end was recorded"
    code = f" (exit code {attempt['exit_code']})"
    return f"{attempt['error'] or attempt['reason']}{code}"


def _count(value: float | None) -> str:
    return "–" if value is None else f"{value:,.0f}"


def _share(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{100 * value:.1f}%" if value < 0.9995 else "100%"


def _part_of(value: float, whole: float) -> str:
    return _share(value / whole if whole else None)


def _rate(value: float | None, unit: str) -> str:
    return f"– {unit}" if value is None else f"{value:,.{2 if value < 10 else 0}f} {unit}"


def _per(value: float, seconds: float) -> str:
    return f"{value / seconds:,.0f}" if seconds > 0 else "–"


def _money(value: float | None) -> str:
    return "–" if value is None else f"{value:,.2f}" if value >= 0.01 or value == 0 else f"{value:.2g}"


_FILTERS: dict[str, Callable[..., str]] = {
    "count": _count,
    "share": _share,
    "part_of": _part_of,
    "rate": _rate,
    "per": _per,
    "money": _money,
    "duration": duration,
}


def _course_plots(report: Mapping[str, Any]) -> list[Markup]:
    course = report["course"]
    points = course["points"]
    marks = [(f"attempt {a['number']}", a["seconds"]) for a in course["attempts"][1:][-8:]]
    end = max((p["seconds"] for p in points), default=0.0)
    preempted = any(p["preemptions_per_second"] for p in points)

    def line(key: str, label: str = "", kind: str = "a") -> Line:
        return Line(label, [(p["seconds"], p[key]) for p in points], kind)

    def plot(title: str, *lines: Line, top: float | None = None, show: Any = short_number) -> Markup:
        return line_plot(title, lines, seconds=end, boundaries=marks, top=top, show=show)

    return [
        plot("Prompt tokens per second", line("prompt_tokens_per_second")),
        plot("Output tokens per second", line("output_tokens_per_second")),
        plot("Prompt tokens from the prefix cache", line("prefix_hit_share"), top=1.0, show=percent),
        plot("Rows in the engine:", line("running", "running"), line("waiting", "waiting", "b")),
        plot("Cache blocks in use", line("pool_share"), top=1.0, show=percent),
        plot("Rows finished per second", line("rows_per_second")),
        *([plot("Preemptions per second", line("preemptions_per_second"))] if preempted else []),
    ]


def _row_plots(report: Mapping[str, Any]) -> list[Markup]:
    def plot(title: str, distribution: Mapping[str, Any], unit: str, show: Any = short_number) -> Markup:
        bars = [(bar["from"], bar["to"], bar["count"]) for bar in distribution["bars"]]
        return histogram_plot(title, bars, unit=unit, show=show)

    lengths, times = report["lengths"], report["times"]
    return [
        plot("Length of prompts", lengths["prompt_tokens"], "tokens"),
        plot("Length of outputs", lengths["output_tokens"], "tokens"),
        plot("Time of a row's prefill", times["prefill_seconds"], "first step to first token", duration),
        plot("Time of a row's decoding", times["decode_seconds"], "first token to last", duration),
    ]


def _distributions(report: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any], Callable[[float], str]]]:
    lengths, times = report["lengths"], report["times"]
    return [
        ("prompt tokens", lengths["prompt_tokens"], _count),
        ("output tokens", lengths["output_tokens"], _count),
        ("time waiting", times["queue_seconds"], duration),
        ("time in prefill", times["prefill_seconds"], duration),
        ("time decoding", times["decode_seconds"], duration),
    ]


def _comparison(report: Mapping[str, Any]) -> list[dict[str, str]]:
    if "compare" not in report:
        return []
    return [
        {
            "name": figure["name"],
            "this": _figure(figure["this"], figure["unit"]),
            "other": _figure(figure["other"], figure["unit"]),
            "ratio": "–" if figure["ratio"] is None else f"{figure['ratio']:.3g}×",
        }
        for figure in report["compare"]["figures"]
    ]


def _figure(value: float | None, unit: str) -> str:
    if value is None:
        return "–"
    if unit == "share":
        return _share(value)
    if unit == "seconds":
        return duration(value)
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:,.2f}"
