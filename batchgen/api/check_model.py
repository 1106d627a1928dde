"""What can be wrong with a job's model that its small files tell. For `validate`, `plan` and `run`.

After the tokenizer is loaded where it is: torch is in memory then, and nobody else needs to be asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchgen.api.check_report import Report
from batchgen.models.fitness import check_fitness
from batchgen.models.pooling import find_pooling
from batchgen.types import Task

if TYPE_CHECKING:
    from batchgen.job.spec.job import JobSpec
    from batchgen.models.source import ModelSource


def check_model(spec: JobSpec, source: ModelSource, report: Report) -> None:
    """Whether the model can run here at all, and has what the task needs.

    Args:
        spec: the job.
        source: where its model lies.
        report: gets faults.
    """
    if not spec.sound("task"):
        return
    task = Task(spec.task)
    with report.check("model", "path"):
        check_fitness(source.tokenizer_folder(), task)
    if task is Task.EMBED and spec.sound("embedding") and spec.embedding.pooling == "auto":
        with report.check("embedding", "pooling"):
            find_pooling(source.tokenizer_folder())
