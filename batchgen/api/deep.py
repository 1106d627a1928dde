"""`verify --deep`: the jobs under which rows of a folder were computed, for `batchgen.job.deep`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from batchgen.api.job import ROWS_FOR_IDS, setup_of
from batchgen.job.deep import recompute
from batchgen.job.folder import JobFolder
from batchgen.job.load import load_job

if TYPE_CHECKING:
    from batchgen.job.run_options import JobSetup, Launcher
    from batchgen.job.verify import VerifyReport


def verify_deep(folder: Path, count: int, report: VerifyReport, launch: Launcher | None = None) -> None:
    """Compute random rows again and add what differs to the report.

    Args:
        folder: the output folder.
        count: how many rows.
        report: of `verify_folder`.
        launch: starts a worker process; None: one of this machine.

    Raises:
        BatchgenError: the job of the folder cannot be run here.
    """
    from batchgen.api import checks
    from batchgen.api.check_report import Report
    from batchgen.dist.handle import launch_worker

    with ExitStack() as stack:

        def configure(sets: Sequence[str]) -> JobSetup:
            spec = load_job(JobFolder(folder).resolved_job, [f"output.path={folder.absolute()}", *sets])
            checked = Report()
            found = checks.check_job(spec, checked, rows_for_ids=ROWS_FOR_IDS, resume=True)
            stack.callback(found.close)
            checked.raise_faults()
            return setup_of(spec, found)

        recompute(folder, count, configure, launch or launch_worker, report)
