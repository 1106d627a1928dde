"""A whole job file: its sections, and the keys outside them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from batchgen.data.urls import is_url
from batchgen.job.faults import KeyPath, Origin
from batchgen.job.object_store import working_copy
from batchgen.job.spec.embedding import EmbeddingSection
from batchgen.job.spec.engine import EngineSpec
from batchgen.job.spec.input import InputSpec
from batchgen.job.spec.model import ModelSpec
from batchgen.job.spec.output import OutputSpec
from batchgen.job.spec.prompt import PromptSection
from batchgen.job.spec.run import RunSpec
from batchgen.job.spec.sampling import SamplingSection
from batchgen.job.spec.section import Rule, Section
from batchgen.job.spec.values import Text

PART_ROWS = 1000
FEWEST_PART_ROWS = 16
PART_OUTPUT_TOKENS = 256 * 1024

Name = Annotated[Text | None, Rule("null or up to 64 letters, digits, dots, dashes and underscores")]


def _name(value: str | None) -> str | None:
    if value is not None and not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", value):
        raise ValueError("not a name")
    return value


class TopSpec(Section):
    """The keys that stand outside any section; `JobSpec` takes them over."""

    version: Annotated[int, Field(ge=1, le=1), Rule("1")] = 1
    name: Annotated[Name, AfterValidator(_name)] = None
    task: Annotated[
        Literal["generate", "loglikelihood", "perplexity", "embed", "classify"],
        Rule("generate, loglikelihood, perplexity, embed or classify"),
    ] = "generate"


SECTIONS: Mapping[str, type[Section]] = {
    "model": ModelSpec,
    "input": InputSpec,
    "prompt": PromptSection,
    "sampling": SamplingSection,
    "embedding": EmbeddingSection,
    "output": OutputSpec,
    "run": RunSpec,
    "engine": EngineSpec,
}
REQUIRED = ("model", "input", "output")


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """A valid job: paths are absolute, the chat template is text, durations are seconds, sizes bytes.

    Args:
        source: the job file.
        notes: sentences for the user.
        redacted: per key path, what a copy shows instead of a string that came from the environment.
        places: per key path, where it was given; a key that is not here has its default.
        faulty: key paths with faults, of a job that is only checked; empty for one that may run.
    """

    version: int
    name: str | None
    task: str
    model: ModelSpec
    input: InputSpec
    prompt: PromptSection
    sampling: SamplingSection
    embedding: EmbeddingSection
    output: OutputSpec
    run: RunSpec
    engine: EngineSpec
    source: Path
    notes: tuple[str, ...] = ()
    redacted: Mapping[KeyPath, str] = field(default_factory=dict)
    places: Mapping[KeyPath, Origin] = field(default_factory=dict, repr=False)
    faulty: frozenset[KeyPath] = frozenset()

    def sound(self, *keys: str) -> bool:
        """Whether none of these keys or sections, nor anything in or around them, has a fault."""
        wanted = [tuple(key.split(".")) for key in keys]
        return not any(a[: len(b)] == b or b[: len(a)] == a for a in wanted for b in self.faulty)

    def place(self, key: KeyPath) -> Origin | None:
        """Where `key`, or what it is in, was given; None where neither was."""
        given = (self.places.get(key[:n]) for n in range(len(key), 0, -1))
        return next((origin for origin in given if origin is not None), None)

    @property
    def samples(self) -> Literal["list", "explode"] | None:
        """How the output holds the samples of a row; None where each row has one."""
        return self.output.samples if self.sampling.n > 1 else None

    @property
    def output_folder(self) -> Path:
        """The folder that the job owns; of one in an object store, the copy on this machine."""
        path = self.output.path
        return working_copy(path) if is_url(path) else Path(path)

    @property
    def output_url(self) -> str | None:
        """Of an output folder in an object store."""
        return self.output.path if is_url(self.output.path) else None


def part_rows_auto(spec: JobSpec) -> int:
    """Rows in one part: what the job says, else 1,000, fewer where `max_tokens` times `n` is large.

    A function of the job alone, so that parts are the same on every machine. About a quarter of a million
    output tokens at most, so that parts of long answers still appear while the job runs.
    """
    if spec.output.part_rows != "auto":
        return spec.output.part_rows
    return max(
        FEWEST_PART_ROWS, min(PART_ROWS, PART_OUTPUT_TOKENS // (spec.sampling.max_tokens * spec.sampling.n))
    )
