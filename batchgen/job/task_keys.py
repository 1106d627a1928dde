"""Keys of a job file that have a meaning with some tasks only. Used by the loader of job files.

A key that a task would ignore is a fault, as an unknown one is: who sets it expects something of it.
"""

from __future__ import annotations

from typing import Any

from batchgen.job.document import Document
from batchgen.job.faults import KeyPath, dotted
from batchgen.job.spec.embedding import EmbeddingSection
from batchgen.job.spec.sampling import SamplingSection
from batchgen.job.spec.section import Section
from batchgen.types import Task

_OF_ANSWERS = ("output_token_ids", "seed", "logprobs", "prompt_logprobs")


def check_task(document: Document, task: str) -> None:
    """Note every key that has no meaning with the job's task."""
    if task != Task.EMBED:
        _refuse_changed(document, "embedding", EmbeddingSection(), task)
    include = _section(document, "output").get("include")
    included = include if isinstance(include, list) else []
    if task == Task.GENERATE:
        # Answers of this format have a place for logprobs.
        has_place = _section(document, "output").get("format") == "openai_batch"
        _check_written(document, "logprobs", included, elsewhere=has_place)
        _check_written(document, "prompt_logprobs", included)
        _check_dialogue(document)
        return
    _refuse_changed(document, "sampling", SamplingSection(), task)
    for column in _OF_ANSWERS:
        if column in included:
            document.fault(
                ("output", "include"), f"output.include: {column} has no meaning with task: {task}; remove it"
            )
    if _section(document, "output").get("format") == "openai_batch":
        document.fault(
            ("output", "format"),
            f"output.format: openai_batch holds answers, and task: {task} gives none; use parquet or jsonl",
        )
    if _section(document, "input").get("dedupe") == "prompt":
        _meaningless(document, ("input", "dedupe"), task)


def _check_written(document: Document, key: str, included: list[Any], *, elsewhere: bool = False) -> None:
    """Who computes what is not written, or writes what is not computed, has forgotten the other half."""
    sampling = _section(document, "sampling")
    computed, per_row = sampling.get(key) is not None, sampling.get("per_row") is not None
    if key in included and not computed and not per_row:
        document.fault(
            ("output", "include"),
            f"output.include: {key} are not computed; set sampling.{key} to a number",
        )
    if computed and key not in included and not elsewhere:
        document.fault(
            ("sampling", key),
            f"sampling.{key}: they would not be written; add {key} to output.include",
        )


def _check_dialogue(document: Document) -> None:
    sampling = _section(document, "sampling")
    if sampling.get("prompt_logprobs") is not None and sampling.get("turns") is not None:
        document.fault(
            ("sampling", "prompt_logprobs"),
            "sampling.prompt_logprobs: the prompts of a dialogue (sampling.turns) are not scored; keep one",
        )


def _refuse_changed(document: Document, name: str, defaults: Section, task: str) -> None:
    """Keys with another value than they have anyway; a job may have all its defaults written out."""
    known = defaults.model_dump(mode="json")
    for key, value in _section(document, name).items():
        if key in known and value is not None and value != known[key]:
            _meaningless(document, (name, key), task)


def _section(document: Document, name: str) -> dict[str, Any]:
    section = document.data.get(name)
    return section if isinstance(section, dict) else {}


def _meaningless(document: Document, path: KeyPath, task: str) -> None:
    document.fault(path, f"{dotted(path)} has no meaning with task: {task}; remove it", at_key=True)
