"""Puts `report.html` and `report.json` in place. Called by `batchgen report`, and by `run` as it ends."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from batchgen.job.files import atomic_write
from batchgen.job.folder import JobFolder
from batchgen.job.report.collect import collect_report
from batchgen.job.report.page import render_page
from batchgen.types import BatchgenError


def write_report(root: Path, report: Mapping[str, Any], name: str = "report") -> Path:
    """Replace the report of a folder; returns where the page is.

    Args:
        root: the output folder.
        report: from `collect_report`.
        name: of both files.

    Raises:
        StorageError: one of them could not be written.
    """
    page = root / f"{name}.html"
    atomic_write(root / f"{name}.json", report_json(report).encode())
    atomic_write(page, render_page(report).encode())
    return page


def report_json(report: Mapping[str, Any]) -> str:
    """The report as strict JSON in ASCII."""
    return json.dumps(report, indent=1, allow_nan=False) + "\n"


def report_attempt(folder: JobFolder, say: Callable[[str], None], most_seconds: float | None) -> None:
    """Write the report at the end of an attempt; whatever goes wrong is said and harms nothing.

    Args:
        folder: of a job that this process has just stopped working on.
        say: told what went wrong.
        most_seconds: gives up after so long, where somebody waits for the process to end.
    """
    deadline = None if most_seconds is None else time.monotonic() + most_seconds

    def still_time() -> None:
        if deadline is not None and time.monotonic() > deadline:
            raise TimeoutError

    try:
        write_report(folder.root, collect_report(folder.root, still_time))
    except TimeoutError:
        say(f"the report takes too long to write now; make it with `batchgen report {folder.root}`")
    except BatchgenError as error:
        say(f"the report could not be written: {error}")
    except Exception as error:
        # The job is what matters, and it is done or safely stopped.
        say(f"the report could not be made ({type(error).__name__}: {error}); this is a bug in batchgen")
