"""From a job file and command-line settings to a `JobSpec`: the only reader of job files.

Called by every verb that takes a job. Precedence is default, included files, file, command line. Everything
wrong with them is reported at once, each fault with its place, the value, what is allowed and what to do.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from batchgen.data.where_syntax import parse as parse_where
from batchgen.devices import likely_kind
from batchgen.job.document import Document
from batchgen.job.faults import JobFileError, KeyPath, dotted, raise_faults, show_value
from batchgen.job.include import INCLUDE, expand_shorthands, read_layers
from batchgen.job.paths import resolve_paths
from batchgen.job.spec.engine import EngineSpec
from batchgen.job.spec.input import InputSpec
from batchgen.job.spec.job import REQUIRED, SECTIONS, JobSpec, TopSpec
from batchgen.job.spec.model import ModelSpec
from batchgen.job.spec.output import OutputSpec
from batchgen.job.spec.prompt import PromptSection
from batchgen.job.spec.sampling import SamplingSection
from batchgen.job.spec.section import Rule, Section
from batchgen.job.task_keys import check_task
from batchgen.job.unavailable import MEANS_OFF, means_off
from batchgen.job.yaml_loader import parse_document, parse_override, split_key
from batchgen.promise import check_kv_dtype, check_quantization, resolve_dtypes
from batchgen.text.prompt_spec import spec_from_sections
from batchgen.text.templates import JobTemplate
from batchgen.types import Task, UsageError

_SETTING = re.compile(r"""\s*((?:"[^"]*"|'[^']*'|[^="'])+?)\s*=(.*)""", re.DOTALL)
ESCAPES = {r"\n": "a line break", r"\t": "a tab", r"\r": "a carriage return"}


@dataclass(frozen=True, slots=True)
class Override:
    """One setting from the command line. `key` is dotted; `flag` is what the user typed, for messages."""

    key: str
    text: str
    flag: str

    @classmethod
    def parse(cls, setting: str) -> Override:
        """Read the argument of `--set`.

        Raises:
            UsageError: it is not of the form `section.key=value`.
        """
        given = _SETTING.match(setting)
        if given is None or not split_key(given[1]):
            raise UsageError(f"--set {setting}: no key and value; write it as --set section.key=value")
        return cls(given[1], given[2], f"--set {given[1]}")


def load_job(path: str | Path, overrides: Iterable[str | Override] = ()) -> JobSpec:
    """Read, check and resolve a job.

    Args:
        path: the job file.
        overrides: in order, the later one wins; strings as in `--set`.

    Raises:
        UsageError: lists every fault of the file and of the overrides.
    """
    path = Path(path)
    return _load(read_layers(path), path.absolute(), overrides)


def load_as_far_as_possible(
    path: str | Path, overrides: Iterable[str | Override] = ()
) -> tuple[JobSpec, JobFileError | None]:
    """A job to check, not to run: what has a fault is left out, and `JobSpec.sound` tells.

    Args:
        path: the job file.
        overrides: as of `load_job`.

    Returns:
        The job, and its faults if there are any.

    Raises:
        UsageError: it cannot be read at all.
    """
    path = Path(path)
    document = read_layers(path)
    spec = _resolve(document, path.absolute(), overrides)
    try:
        raise_faults(document.source, document.faults)
    except JobFileError as error:
        return spec, error
    return spec, None


def job_from_values(values: Mapping[str, Any], folder: Path) -> JobSpec:
    """A job that a program gives as a dict; as `load_job`.

    Args:
        values: the keys of a job file; what JSON knows.
        folder: against which relative paths resolve.

    Raises:
        UsageError: lists every fault.
    """
    # JSON is YAML, so that a dict is held to the same rules as a file.
    document = parse_document(json.dumps(values, indent=1), "job")
    document.folders["job"] = folder
    expand_shorthands(document)
    return _load(document, folder / "job", ())


def _load(document: Document, path: Path, overrides: Iterable[str | Override]) -> JobSpec:
    spec = _resolve(document, path, overrides)
    raise_faults(document.source, document.faults)
    return spec


def _resolve(document: Document, path: Path, overrides: Iterable[str | Override]) -> JobSpec:
    """The job without what has a fault; the faults are in the document."""
    for override in overrides:
        given = Override.parse(override) if isinstance(override, str) else override
        layer = parse_override(given.key, given.text, given.flag)
        expand_shorthands(layer)
        document.overlay(layer)
    sections = _sections(document)
    top_data = {key: value for key, value in document.data.items() if key in TopSpec.model_fields}
    top = _validate(document, TopSpec, (), top_data) or TopSpec()
    assert isinstance(top, TopSpec)
    _check_across(document, sections, top.task)
    whole = {name: section or _without_faults(document, name) for name, section in sections.items()}
    resolve_paths(document, whole)
    return JobSpec(
        version=top.version,
        name=top.name,
        task=top.task,
        source=path,
        notes=tuple(_notes(document)),
        redacted=document.literals(),
        places={path: place.value for path, place in document.places.items()},
        faulty=frozenset(fault.key for fault in document.faults if fault.key),
        **whole,  # type: ignore[arg-type]
    )


def _without_faults(document: Document, name: str) -> Section:
    """A section made of what is right in it."""
    model, data = SECTIONS[name], document.data.get(name)
    wrong = {fault.key[1] for fault in document.faults if fault.key[:1] == (name,) and len(fault.key) > 1}
    given = data if isinstance(data, dict) else {}
    right = {key: value for key, value in given.items() if key in model.model_fields and key not in wrong}
    needed = {"path": "."} if name in REQUIRED else {}
    try:
        return model.model_validate({**needed, **right})
    except ValidationError:
        return model.model_validate(needed)


def _sections(document: Document) -> dict[str, Section | None]:
    """Every section, None where it has faults; takes what this version does not implement out first."""
    known_top = [INCLUDE, *SECTIONS, *TopSpec.model_fields, *(p[0] for p in MEANS_OFF if len(p) == 1)]
    if INCLUDE in document.data:
        document.fault((INCLUDE,), "include: it has no meaning on the command line; write it into a job file")
    _refuse_keys(document, (), document.data, known_top)
    sections: dict[str, Section | None] = {}
    for name, model in SECTIONS.items():
        data = document.data.get(name)
        if data is None and name in REQUIRED:
            document.fault((name,), f"{name} is missing; add a line such as {name}: …")
            sections[name] = None
            continue
        if data is None:
            data = {}
        if not isinstance(data, dict):
            document.fault(
                (name,), f"{name}: {_shown(document, (name,), data)} is not allowed; use a map of keys"
            )
            sections[name] = None
            continue
        known = [*model.model_fields, *(p[1] for p in MEANS_OFF if len(p) == 2 and p[0] == name)]
        _refuse_keys(document, (name,), data, known)
        data = {key: value for key, value in data.items() if key in model.model_fields}
        if name == "prompt" and document.data.get("task", Task.GENERATE) != Task.GENERATE:
            # Texts are what is scored, embedded and classified; a conversation must be asked for.
            data = {"mode": "completion", **data}
        sections[name] = _validate(document, model, (name,), data)
    return sections


def _refuse_keys(document: Document, at: tuple[str, ...], data: dict[str, Any], known: Sequence[str]) -> None:
    for key, value in data.items():
        path = (*at, key)
        if document.full:
            return
        if path in MEANS_OFF:
            if not means_off(path, value):
                off = show_value(MEANS_OFF[path][0])
                shown = _shown(document, path, value)
                document.fault(
                    path,
                    f"{dotted(path)} is not available in this version (given: {shown}); "
                    f"remove it or set it to {off}",
                    at_key=True,
                )
        elif key not in known:
            document.fault(path, _unknown(path, known), at_key=True)


def _unknown(path: tuple[str, ...], known: Sequence[str]) -> str:
    """Names the nearest key of the same section, else the nearest of any section."""
    here = difflib.get_close_matches(path[-1], known, n=1, cutoff=0.6)
    elsewhere = {key: (name, key) for name, model in SECTIONS.items() for key in model.model_fields}
    anywhere = [elsewhere[key] for key in difflib.get_close_matches(path[-1], elsewhere, n=1, cutoff=0.8)]
    for near in [(*path[:-1], name) for name in here] + anywhere:
        return f"{dotted(path)} is not a known key; did you mean {dotted(near)}?"
    return f"{dotted(path)} is not a known key; known here: {', '.join(sorted(known))}"


def _validate(document: Document, model: type[Section], at: KeyPath, data: dict[str, Any]) -> Section | None:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        # What the reader refused is null here, which is no fault of its own.
        known = {fault.key for fault in document.faults}
        seen: set[KeyPath] = set()
        for detail in error.errors(include_url=False, include_context=False):
            path = _data_path(data, detail)
            refused = (*at, *path) in known and _at(data, path) is None
            if path not in seen and not refused and not document.full:
                seen.add(path)
                _value_fault(document, model, at, data, path, missing=detail["type"] == "missing")
        return None


def _data_path(data: dict[str, Any], detail: ErrorDetails) -> KeyPath:
    """Where in the data an error of pydantic is; its own path also names members of unions."""
    path: list[str | int] = [detail["loc"][0]]
    value = data.get(str(path[0]))
    for part in detail["loc"][1:]:
        inside_list = isinstance(value, list) and isinstance(part, int) and part < len(value)
        if inside_list or (isinstance(value, dict) and part in value):
            path.append(part)
            value = value[part]  # type: ignore[index]
    return tuple(path)


def _value_fault(
    document: Document, model: type[Section], at: KeyPath, data: Any, path: KeyPath, *, missing: bool
) -> None:
    full = (*at, *path)
    rule = next(m for m in model.model_fields[str(path[0])].metadata if isinstance(m, Rule))
    if missing:
        document.fault(at, f"{dotted(full)} is missing; give {rule.allowed}")
        return
    value = data
    for part in path:
        value = value[part]
    shown = _shown(document, full, value)
    why = (
        "is not available in this version" if value in _as_container(rule.later, value) else "is not allowed"
    )
    document.fault(full, f"{dotted(full)}: {shown} {why}; use {rule.allowed}")


def _as_container(later: Any, value: Any) -> Any:
    return later if isinstance(value, str | int | float) and not isinstance(value, bool) else ()


def _shown(document: Document, path: KeyPath, value: Any) -> str:
    """A value for a message; what came from the environment is shown as the file has it."""
    literals = document.literals()
    if any(p[: len(path)] == path for p in literals):
        return show_value(literals.get(path, "a value with ${env:…}"))
    return show_value(value)


def _check_across(document: Document, sections: dict[str, Section | None], task: str) -> None:
    sampling, prompt = sections["sampling"], sections["prompt"]
    if isinstance(sampling, SamplingSection) and sampling.min_tokens > sampling.max_tokens:
        document.fault(
            ("sampling", "min_tokens"),
            f"sampling.min_tokens: {sampling.min_tokens} is more than sampling.max_tokens "
            f"({sampling.max_tokens}); lower it or raise max_tokens",
        )
    if isinstance(sampling, SamplingSection) and sampling.n > 1:
        _check_samples(document, sampling)
    if isinstance(prompt, PromptSection) and isinstance(sampling, SamplingSection):
        _check_prompt(document, prompt, sampling, task)
    output, given = sections["output"], sections["input"]
    if isinstance(output, OutputSpec):
        dialogues = isinstance(sampling, SamplingSection) and sampling.turns is not None
        _check_output(document, output, dialogues=dialogues)
    check_task(document, task)
    _check_dtypes(document, sections["model"], sections["engine"])
    if isinstance(given, InputSpec) and given.where is not None:
        try:
            parse_where(given.where)
        except UsageError as error:
            document.fault(("input", "where"), str(error))


def _check_dtypes(document: Document, model: Section | None, engine: Section | None) -> None:
    if not (isinstance(model, ModelSpec) and isinstance(engine, EngineSpec)):
        return
    device = likely_kind(engine.device)
    dtype, kv_dtype = resolve_dtypes(model.dtype, engine.kv_cache_dtype, device)
    try:
        check_quantization(model.quantization, dtype, device)
    except UsageError as error:
        document.fault(("model", "quantization"), str(error))
    try:
        check_kv_dtype(dtype, kv_dtype)
    except UsageError as error:
        document.fault(("engine", "kv_cache_dtype"), str(error))


def _check_samples(document: Document, sampling: SamplingSection) -> None:
    if not sampling.temperature:
        document.fault(
            ("sampling", "n"),
            f"sampling.n: {sampling.n} samples of a row are all the same with sampling.temperature: "
            f"{'null' if sampling.temperature is None else '0'}; set a temperature above 0, or n: 1",
        )
    if sampling.turns is not None:
        document.fault(
            ("sampling", "n"),
            f"sampling.n: {sampling.n} is not allowed with sampling.turns, where each turn goes on from one "
            "answer; use n: 1",
        )


def _check_output(document: Document, output: OutputSpec, *, dialogues: bool) -> None:
    if output.format == "openai_batch" and dialogues:
        document.fault(
            ("sampling", "turns"),
            "sampling.turns: a line of the format openai_batch holds one answer; use parquet or jsonl",
        )
    if output.format == "openai_batch" and output.samples == "explode":
        document.fault(
            ("output", "samples"),
            "output.samples: explode is for parquet and jsonl; a line of the format openai_batch holds all "
            "choices of a row, so use list",
        )
    if output.push_to_hub is not None and "://" in output.path:
        document.fault(
            ("output", "push_to_hub"),
            "output.push_to_hub: parts in an object store are not pushed; use a local output.path",
        )
    if output.format != "parquet" and output.compression == "snappy":
        document.fault(
            ("output", "compression"),
            f"output.compression: 'snappy' is for Parquet only; use zstd, gzip or none with {output.format}",
        )


def _check_prompt(document: Document, prompt: PromptSection, sampling: SamplingSection, task: str) -> None:
    """The renderer knows which settings go together and what a template is."""
    try:
        templates = spec_from_sections(prompt.model_dump(), sampling.model_dump(), task).templates()
    except UsageError as error:
        _prompt_fault(document, error)
        return
    for name, source in templates.items():
        try:
            JobTemplate(name, source)
        except UsageError as error:
            _prompt_fault(document, error)


def _prompt_fault(document: Document, error: UsageError) -> None:
    named = re.match(r"(prompt|sampling)\.(\w+)", str(error))
    document.fault((named[1], named[2]) if named else ("prompt",), str(error))


def _notes(document: Document) -> Iterable[str]:
    """A stop string with a backslash that YAML leaves alone is nearly always a mistake."""
    for path, place in document.places.items():
        value = _at(document.data, path)
        if path[:2] != ("sampling", "stop") or not place.unescaped or not isinstance(value, str):
            continue
        for mark, name in ESCAPES.items():
            if mark in value:
                yield (
                    f"{place.value}: {dotted(path)}: {mark} outside double quotes is a backslash "
                    f'and a letter; for {name} write "{mark}"'
                )


def _at(data: Any, path: KeyPath) -> Any:
    """The value at `path`, or None."""
    for part in path:
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            return None
    return data
