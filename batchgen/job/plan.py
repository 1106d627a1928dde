"""What a job will do, from what reading and tokenizing its rows and looking at its folder say. For `plan`.

Everything that is not exact says so: `exact` is false, and figures are those of the sample times the rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from batchgen.grammar import agreeing, counted
from batchgen.job.part_summary import ErrorGroup
from batchgen.job.plan_folder import FolderOutlook
from batchgen.job.plan_rows import RowScan, Twice
from batchgen.job.plan_tokens import TokenScan
from batchgen.types import Task

BYTES_PER_TOKEN = 4
ROW_BYTES = 100
OVERFLOW = {
    "error": ("becomes an error row (context_length)", "become error rows (context_length)"),
    "skip": ("is skipped", "are skipped"),
    "truncate_left": ("loses its beginning", "lose their beginning"),
    "truncate_right": ("loses its end", "lose their end"),
    "truncate_middle": ("loses its middle", "lose their middle"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What `plan` has found out.

    Args:
        scan: of rows.
        tokens: of a sample of them, or of all.
        full: whether of all.
        rows_known: rows of the selection where files say so, or an earlier attempt does.
        rows_guessed: where only their size tells.
        folder: the output folder; None where it holds no job.
        max_model_len: None where it is not known without the weights.
        overflow: `prompt.overflow`.
        dialogues: whether prompts hold answers, which are counted as empty.
        task: what is done with each row.
        result_bytes: of a row's result besides its text, where the task gives one of a known size.
        bytes_free: on the output's disk.
        min_free_disk: bytes that must stay free.
    """

    scan: RowScan
    tokens: TokenScan
    full: bool
    rows_known: int | None
    rows_guessed: int | None
    folder: FolderOutlook | None
    max_model_len: int | None
    overflow: str
    dialogues: bool
    task: Task
    result_bytes: int
    bytes_free: int
    min_free_disk: int


def make_plan(outlook: Outlook) -> dict[str, Any]:
    """Plain values; the keys are those of `batchgen plan --json`."""
    rows = _rows(outlook)
    tokens = _tokens(outlook, rows)
    plan: dict[str, Any] = {
        "task": outlook.task.value,
        "rows": rows,
        "tokens": tokens,
        "errors": _errors(outlook, rows["total"]),
        "too_long": _too_long(outlook, rows["total"]),
        "duplicates": {
            "among_rows": outlook.scan.readable,
            "ids": _twice(outlook.scan.ids),
            "prompts": _twice(outlook.scan.prompts),
        },
        "control_tokens": {
            "rows": outlook.tokens.control_rows,
            "tokens": outlook.tokens.control_tokens,
            "among_rows": outlook.tokens.rows,
        },
        "input_notes": dict(outlook.scan.notes),
        "resume": _resume(outlook, rows),
    }
    plan["disk"] = _disk(outlook, rows, tokens)
    plan["seconds"] = _seconds(outlook, rows, tokens)
    plan["warnings"] = _warnings(outlook, plan)
    return plan


def _rows(outlook: Outlook) -> dict[str, Any]:
    total, exact = outlook.rows_known, outlook.rows_known is not None
    if outlook.scan.ended:
        total, exact = outlook.scan.read, True
    else:
        if total is None and outlook.rows_guessed is not None:
            total = max(outlook.rows_guessed, outlook.scan.read)
    done = outlook.folder.rows_done if outlook.folder is not None else 0
    return {
        "total": total,
        "exact": exact,
        "read": outlook.scan.read,
        "tokenized": outlook.tokens.rows,
        "left": None if total is None else max(0, total - done),
    }


def _tokens(outlook: Outlook, rows: Mapping[str, Any]) -> dict[str, Any]:
    """Tokens of all rows that can run, of which the sample is taken for typical."""
    tokens, scan = outlook.tokens, outlook.scan
    scale = None
    if tokens.rows and scan.read and rows["total"] is not None:
        scale = rows["total"] * (scan.readable / scan.read) / tokens.rows
    mean = outlook.folder.output_tokens_per_row if outlook.folder is not None else None
    return {
        "exact": outlook.full and scan.ended,
        "prompt": None if scale is None else round(tokens.prompt_tokens * scale),
        "prompt_at_least": outlook.dialogues,
        "output_at_most": None if scale is None else round(tokens.output_room * scale),
        "output_expected": None if scale is None or mean is None else round(mean * tokens.runnable * scale),
        "scored": None if scale is None else round(tokens.scored_tokens * scale),
        "prompt_lengths": tokens.lengths.describe(),
        "shared_prefix_share": tokens.shared_tokens / tokens.prompt_tokens if tokens.prompt_tokens else None,
    }


def _errors(outlook: Outlook, total: int | None) -> list[dict[str, Any]]:
    """Rows that would fail: those that cannot be read among all that were read, others among the sample."""
    groups: list[tuple[str, ErrorGroup, int, int]] = [
        (name, group, outlook.scan.read, outlook.scan.read) for name, group in outlook.scan.errors.items()
    ]
    groups += [
        (name, group, outlook.tokens.rows, outlook.scan.readable)
        for name, group in outlook.tokens.errors.items()
    ]
    return [
        {
            "class": name,
            "found": group.count,
            "among_rows": among,
            "estimated": _scaled(group.count, among, of, outlook.scan.read, total),
            "examples": [{"row": row, "id": id_, "message": text} for row, id_, text in group.examples],
        }
        for name, group, among, of in sorted(groups, key=lambda item: (-item[1].count, item[0]))
    ]


def _scaled(count: int, among: int, of: int, read: int, total: int | None) -> int | None:
    """From `among` rows to the `of` that they stand for, and from the rows that were read to all."""
    return None if total is None or not among else round(count * of / among * total / read)


def _too_long(outlook: Outlook, total: int | None) -> dict[str, Any]:
    tokens, scan = outlook.tokens, outlook.scan
    return {
        "max_model_len": outlook.max_model_len,
        "found": tokens.too_long,
        "among_rows": tokens.rows,
        "estimated": _scaled(tokens.too_long, tokens.rows, scan.readable, scan.read, total),
        "overflow": outlook.overflow,
        "they": agreeing(tokens.too_long, *OVERFLOW[outlook.overflow]),
        "examples": [{"row": row, "tokens": count} for row, count in tokens.too_long_examples],
    }


def _twice(found: Twice) -> dict[str, Any]:
    examples = [{"row": later, "equals_row": earlier} for earlier, later in found.examples]
    return {"rows": found.rows, "examples": examples}


def _resume(outlook: Outlook, rows: Mapping[str, Any]) -> dict[str, Any]:
    folder = outlook.folder
    if folder is None:
        return {"would": "start", "state": None, "rows_done": 0, "differences": []}
    if folder.differences:
        would = "refuse"
    elif folder.state == "complete" and not rows["left"]:
        would = "do nothing"
    else:
        would = "wait" if folder.state == "running" else "continue"
    return {
        "would": would,
        "state": folder.state,
        "rows_done": folder.rows_done,
        "differences": folder.differences,
    }


def _disk(outlook: Outlook, rows: Mapping[str, Any], tokens: Mapping[str, Any]) -> dict[str, Any]:
    """Bytes for the rows that are left: as earlier ones took, else of the input and the longest answers."""
    folder, needed = outlook.folder, None
    longest = "the longest answers" if outlook.task is Task.GENERATE else "rows and their results"
    basis = f"{longest}, uncompressed"
    if rows["left"] is not None and rows["total"]:
        if folder is not None and folder.bytes_per_row is not None:
            needed, basis = round(rows["left"] * folder.bytes_per_row), "what finished rows take"
        elif tokens["output_at_most"] is not None:
            row_bytes = outlook.scan.bytes / max(outlook.scan.read, 1) + ROW_BYTES + outlook.result_bytes
            needed = round(rows["total"] * row_bytes + BYTES_PER_TOKEN * tokens["output_at_most"])
    return {
        "needed": needed,
        "basis": basis,
        "free": outlook.bytes_free,
        "kept_free": outlook.min_free_disk,
    }


def _seconds(outlook: Outlook, rows: Mapping[str, Any], tokens: Mapping[str, Any]) -> float | None:
    """At the speed of earlier attempts; never guessed without one."""
    folder = outlook.folder
    if folder is None or folder.tokens_per_second is None or not rows["total"]:
        return None
    if tokens["prompt"] is None or tokens["output_expected"] is None:
        return None
    share = rows["left"] / rows["total"]
    return float(share * (tokens["prompt"] + tokens["output_expected"]) / folder.tokens_per_second)


def _does_not_fit(task: Task, rows: int) -> str:
    if task is Task.GENERATE:
        return f"{agreeing(rows, 'leaves', 'leave')} no room to answer in"
    return f"{agreeing(rows, 'does', 'do')} not fit in"


def _warnings(outlook: Outlook, plan: Mapping[str, Any]) -> list[str]:
    found = []
    too_long = outlook.tokens.too_long
    if too_long and outlook.max_model_len is not None:
        found.append(
            f"{too_long:,} of {counted(outlook.tokens.rows, 'prompt')} "
            f"{_does_not_fit(outlook.task, too_long)} "
            f"{counted(outlook.max_model_len, 'token')} and {agreeing(too_long, *OVERFLOW[outlook.overflow])}"
        )
    failing = sum(error["found"] for error in plan["errors"])
    if failing and failing >= outlook.scan.read:
        found.append("every row would fail")
    disk = plan["disk"]
    if disk["needed"] is not None and disk["needed"] + disk["kept_free"] > disk["free"]:
        found.append(
            f"the output may take {counted(disk['needed'], 'byte')} and {disk['free']:,} are free, of which "
            f"run.min_free_disk keeps {disk['kept_free']:,}"
        )
    if plan["rows"]["total"] == 0:
        found.append("the input has no rows")
    return found
