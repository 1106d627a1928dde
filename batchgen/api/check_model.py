"""What can be wrong with a job's model that its small files tell, and with how it is to run.

For `validate`, `plan` and `run`, after the tokenizer is loaded where it is: torch is in memory then, and
nobody else needs to be asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchgen.api.check_report import Report
from batchgen.devices import CUDA, likely_kind
from batchgen.models.fitness import check_fitness
from batchgen.models.pooling import find_pooling
from batchgen.types import Task

if TYPE_CHECKING:
    from batchgen.job.spec.job import JobSpec
    from batchgen.models.source import ModelSource

_ANYWHERE = {"auto", "cpu", "reference"}
"""Attention backends that every machine has, on a device that it has."""


def check_model(spec: JobSpec, source: ModelSource, report: Report, *, here: bool = True) -> None:
    """Whether the model can run at all, and has what the task needs.

    Args:
        spec: the job.
        source: where its model lies.
        report: gets faults.
        here: whether it is to run on this machine.
    """
    if here and spec.sound("engine.device", "engine.attention"):
        _check_device(spec.engine.device, spec.engine.attention, report)
    if not spec.sound("task"):
        return
    task = Task(spec.task)
    with report.check("model", "path"):
        check_fitness(source.tokenizer_folder(), task)
    if task is Task.EMBED and spec.sound("embedding") and spec.embedding.pooling == "auto":
        with report.check("embedding", "pooling"):
            find_pooling(source.tokenizer_folder())


def _check_device(device: str, attention: str, report: Report) -> None:
    if attention in _ANYWHERE and (device != CUDA or likely_kind("auto") == CUDA):
        return
    # Loads torch.
    from batchgen.engine.backend_choice import check_attention
    from batchgen.engine.device import find_device

    with report.check("engine", "device"):
        found = find_device(device)
        with report.check("engine", "attention"):
            check_attention(attention, found)
