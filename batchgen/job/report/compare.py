"""Two output folders side by side: their figures with ratios, and their outputs row by row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from batchgen.data.record_lines import shown
from batchgen.data.results import RowResult
from batchgen.data.task_columns import ALL_TASK_COLUMNS
from batchgen.job.folder import JobFolder
from batchgen.job.manifest import require_manifest
from batchgen.job.part_reader import PartRow, read_part
from batchgen.job.parts import recognise_parts
from batchgen.text.visible import visible_line
from batchgen.types import StorageError

EXAMPLES = 10
SHOWN = 160
_NEEDED = ("row", "id", "status", "generated_text", "finish_reason", "error", *ALL_TASK_COLUMNS)
_FIGURES = (
    ("rows done", ("rows", "done"), ""),
    ("rows ok", ("rows", "ok"), ""),
    ("rows failed", ("rows", "error"), ""),
    ("working time", ("work", "working_seconds"), "seconds"),
    ("loading time", ("work", "loading_seconds"), "seconds"),
    ("rows/s", ("work", "rows_per_second"), ""),
    ("prompt tokens/s", ("work", "prompt_tokens_per_second"), ""),
    ("output tokens/s", ("work", "output_tokens_per_second"), ""),
    ("from prefix cache", ("work", "prefix_hit_share"), "share"),
    ("preemptions", ("work", "preemptions"), ""),
    ("mean prompt tokens", ("lengths", "prompt_tokens", "mean"), ""),
    ("mean output tokens", ("lengths", "output_tokens", "mean"), ""),
    ("reasoning tokens", ("lengths", "reasoning_tokens"), ""),
    ("median prefill of a row", ("times", "prefill_seconds", "p50"), "seconds"),
    ("99 % prefill of a row", ("times", "prefill_seconds", "p99"), "seconds"),
    ("median decoding of a row", ("times", "decode_seconds", "p50"), "seconds"),
    ("99 % decoding of a row", ("times", "decode_seconds", "p99"), "seconds"),
    ("output tokens computed again", ("tokens_lost",), ""),
    ("cost", ("cost", "total"), ""),
)

Key = tuple[int, int]


def compare(this: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
    """What two reports and the outputs behind them have in common and where they differ.

    Args:
        this, other: from `collect_report`.

    Raises:
        StorageError: a part cannot be read.
    """
    figures = []
    for name, path, unit in _FIGURES:
        a, b = _at(this, path), _at(other, path)
        if a is not None or b is not None:
            ratio = a / b if a is not None and b else None
            figures.append({"name": name, "unit": unit, "this": a, "other": b, "ratio": ratio})
    outputs = compare_outputs(Path(this["folder"]), Path(other["folder"]))
    return {"folder": other["folder"], "figures": figures, "outputs": outputs}


def compare_outputs(this: Path, other: Path) -> dict[str, Any]:
    """Rows of committed parts, one against the other, a few in memory at a time.

    Returns:
        `equal`, `different`, `only_this`, `only_other`: rows; `other_ids`: rows whose id differs; `examples`:
        the first that differ, each shown from a little before the first difference.

    Raises:
        StorageError: a part cannot be read.
    """
    counts = dict.fromkeys(("equal", "different", "only_this", "only_other", "other_ids"), 0)
    examples: list[dict[str, Any]] = []
    for a, b in _paired(_rows(this), _rows(other)):
        if a is None or b is None:
            counts["only_other" if a is None else "only_this"] += 1
            continue
        counts["other_ids"] += a.id != b.id
        same = _outcome(a.result) == _outcome(b.result)
        counts["equal" if same else "different"] += 1
        if not same and len(examples) < EXAMPLES:
            shown = _windows(_shown(a.result), _shown(b.result))
            examples.append({"row": a.row, "id": visible_line(a.id, 80), "this": shown[0], "other": shown[1]})
    return {**counts, "examples": examples}


def _rows(root: Path) -> Iterator[tuple[Key, PartRow]]:
    """Rows in order, each under its number and how many of that number came before it."""
    folder = JobFolder(root)
    plan = require_manifest(folder).output_plan
    before, again = -1, 0
    for commit in recognise_parts(folder).values():
        path = folder.data / commit.file
        try:
            for row in read_part(path, plan, only=_NEEDED):
                again = again + 1 if row.row == before else 0
                before = row.row
                yield (row.row, again), row
        except ValueError as error:
            raise StorageError(
                f"{path}: cannot be read ({error}); `batchgen verify {root}` says what is wrong"
            ) from error


def _paired(
    this: Iterator[tuple[Key, PartRow]], other: Iterator[tuple[Key, PartRow]]
) -> Iterator[tuple[PartRow | None, PartRow | None]]:
    a, b = next(this, None), next(other, None)
    while a is not None or b is not None:
        if b is None or (a is not None and a[0] < b[0]):
            assert a is not None
            yield a[1], None
            a = next(this, None)
        elif a is None or b[0] < a[0]:
            yield None, b[1]
            b = next(other, None)
        else:
            yield a[1], b[1]
            a, b = next(this, None), next(other, None)


def _outcome(result: RowResult) -> tuple[Any, ...]:
    return result.status, result.generated_text, result.finish_reason, result.error, result.included


def _shown(result: RowResult) -> str:
    if result.error is not None:
        return f"{result.status} {result.error.error_class.value}: {result.error.message}"
    if result.generated_text is None:
        known = result.included or {}
        values = [f"{key} {shown(key, known[key])}" for key in ALL_TASK_COLUMNS if key in known]
        return ", ".join(values) or result.status
    return f"{result.generated_text} [{result.finish_reason}]"


def _windows(a: str, b: str) -> tuple[str, str]:
    """The surroundings of the first difference of two texts."""
    first = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    start = max(0, first - SHOWN // 4)
    head = "…" if start else ""
    return head + visible_line(a[start:], SHOWN), head + visible_line(b[start:], SHOWN)


def _at(report: Mapping[str, Any], path: tuple[str, ...]) -> Any:
    value: Any = report
    for part in path:
        value = None if value is None else value[part]
    return value
