"""What can be wrong with a job's model that its small files tell, and with how it is to run.

For `validate`, `plan` and `run`, after the tokenizer is loaded where it is: torch is in memory then, and
nobody else needs to be asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from batchgen.api.check_report import Report
from batchgen.devices import CPU, CUDA, likely_kind
from batchgen.models.fitness import check_fitness
from batchgen.models.pooling import find_pooling
from batchgen.promise import resolve_dtypes
from batchgen.types import Task

if TYPE_CHECKING:
    from batchgen.job.spec.job import JobSpec
    from batchgen.models.source import ModelSource

_ANYWHERE = {"auto", "reference"}
"""Attention backends that every device has, for every cache."""
_OF_PROCESSORS = {"float32", "bfloat16", "float16", "int8"}
"""What the fast backend of processors stores keys and values as."""


def check_model(spec: JobSpec, source: ModelSource, report: Report, *, here: bool = True) -> None:
    """Whether the model can run at all, and has what the task needs.

    Args:
        spec: the job.
        source: where its model lies.
        report: gets faults.
        here: whether it is to run on this machine.
    """
    if spec.sound("engine", "model.dtype") and (here or spec.engine.device == CPU):
        _check_device(spec, report)
    if not spec.sound("task"):
        return
    task = Task(spec.task)
    with report.check("model", "path"):
        check_fitness(source.tokenizer_folder(), task)
    if task is Task.EMBED and spec.sound("embedding") and spec.embedding.pooling == "auto":
        with report.check("embedding", "pooling"):
            find_pooling(source.tokenizer_folder())


def _check_device(spec: JobSpec, report: Report) -> None:
    """What a device lacks that is there, or is not."""
    engine, kind = spec.engine, likely_kind(spec.engine.device)
    dtype, kv_dtype = resolve_dtypes(spec.model.dtype, engine.kv_cache_dtype, kind)
    missing = engine.device == CUDA and likely_kind("auto") != CUDA
    suits = engine.attention in _ANYWHERE or (
        engine.attention == "cpu" and kind == CPU and kv_dtype in _OF_PROCESSORS
    )
    if suits and not missing and engine.cuda_graphs is not True:
        return
    # Loads torch.
    from batchgen.engine.backend_choice import check_attention
    from batchgen.engine.device import check_graphs, find_device

    with report.check("engine", "device"):
        found = find_device(engine.device)
        with report.check("engine", "attention"):
            check_attention(engine.attention, found, dtype, kv_dtype)
        with report.check("engine", "cuda_graphs"):
            check_graphs(engine.cuda_graphs, found)
