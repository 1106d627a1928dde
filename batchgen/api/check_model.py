"""What can be wrong with a job's model that its small files tell, and with how it is to run.

For `validate`, `plan` and `run`, after the tokenizer is loaded where it is: torch is in memory then, and
nobody else needs to be asked.
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

_ANYWHERE = {"auto", "cpu", "reference"}
"""Attention backends that run on every machine."""


def check_model(spec: JobSpec, source: ModelSource, report: Report) -> None:
    """Whether the model can run here at all, and has what the task needs.

    Args:
        spec: the job.
        source: where its model lies.
        report: gets faults.
    """
    if spec.sound("engine.attention") and spec.engine.attention not in _ANYWHERE:
        # Loads torch.
        from batchgen.engine.backend_choice import check_attention

        with report.check("engine", "attention"):
            check_attention(spec.engine.attention)
    if not spec.sound("task"):
        return
    task = Task(spec.task)
    with report.check("model", "path"):
        check_fitness(source.tokenizer_folder(), task)
    if task is Task.EMBED and spec.sound("embedding") and spec.embedding.pooling == "auto":
        with report.check("embedding", "pooling"):
            find_pooling(source.tokenizer_folder())
