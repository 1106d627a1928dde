"""`embedding` of a job file."""

from __future__ import annotations

from typing import Annotated, Literal

from batchgen.job.spec.section import Rule, Section


class EmbeddingSection(Section):
    """How `task: embed` makes one vector of the hidden states of a prompt."""

    pooling: Annotated[Literal["auto", "last", "mean"], Rule("auto, last or mean")] = "auto"
    normalize: Annotated[bool, Rule("true or false")] = True
