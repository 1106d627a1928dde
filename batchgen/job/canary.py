"""A row that finished before, for a run in which none has finished yet: it shows that an engine works.

The supervisor asks for one when an engine has died, so that a row that kills its engine is found also where
it is the last one left.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from typing import TYPE_CHECKING

from batchgen.data.prompt_values import pack_prompt_values
from batchgen.data.source import InputSet
from batchgen.job.part_reader import PartRow, read_part
from batchgen.job.window import Pending
from batchgen.types import BatchgenError, Status

if TYPE_CHECKING:
    from batchgen.job.recovery import OpenJob


def find_canary(job: OpenJob, columns: Iterable[str]) -> tuple[Pending, int] | None:
    """The first row of the committed parts that has an answer, and how many tokens that took.

    Args:
        job: whose parts they are.
        columns: that the prompt needs.

    Returns:
        None where there is none, or it cannot be read now: what depends on it does without.
    """
    try:
        answered = _first_answered(job)
        return None if answered is None else _pending(job, answered, columns)
    except (BatchgenError, ValueError, KeyError, TypeError):
        return None


def _first_answered(job: OpenJob) -> PartRow | None:
    for commit in job.parts.committed.values():
        if commit.counts.ok:
            rows = read_part(job.folder.data / commit.file, job.plan.to_json())
            with closing(rows):  # type: ignore[type-var]
                return next((row for row in rows if row.result.status == Status.OK), None)
    return None


def _pending(job: OpenJob, answered: PartRow, columns: Iterable[str]) -> tuple[Pending, int] | None:
    start = job.index.nearest_start(answered.row // job.manifest.part_rows)
    with InputSet(job.inputs.files, job.inputs.options) as inputs, closing(inputs.rows(start)) as rows:  # type: ignore[type-var]
        row = next((row for row in rows if row.ordinal == answered.row), None)
    if row is None:
        return None
    tokens = answered.result.usage[1] if answered.result.usage else 0
    return Pending(row.ordinal, pack_prompt_values(row, columns), row.digest), tokens
