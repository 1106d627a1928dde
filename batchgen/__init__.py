"""Offline batch inference for language models: every row exactly once, resumable to the byte.

    import batchgen as bg

`bg.map` runs a model over a `datasets` data set, `bg.Job` runs a job file, `bg.open` reads an output folder,
`bg.LLM` is the engine in this process. Each is imported when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchgen.api.job import Job, JobResult
    from batchgen.api.llm import LLM
    from batchgen.api.mapping import map
    from batchgen.api.results import Results, open
    from batchgen.types import Output, Sample, SamplingParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "Job",
    "JobResult",
    "Output",
    "Reasoning",
    "Results",
    "Sample",
    "SamplingParams",
    "map",
    "open",
]

_WHERE = {
    "Job": "batchgen.api.job",
    "JobResult": "batchgen.api.job",
    "LLM": "batchgen.api.llm",
    "Output": "batchgen.types",
    "Reasoning": "batchgen.types",
    "Results": "batchgen.api.results",
    "Sample": "batchgen.types",
    "SamplingParams": "batchgen.types",
    "map": "batchgen.api.mapping",
    "open": "batchgen.api.results",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'batchgen' has no attribute {name!r}")
    return getattr(import_module(_WHERE[name]), name)
