"""The copy of a job that is written beside its results. Called by the supervisor; `verify` loads it.

Every key with the value that was used. What came from the environment is shown as the job file has it, and
URLs without what signs them, so that no secret reaches the output folder.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import yaml

from batchgen.data.urls import shown_url
from batchgen.job.faults import KeyPath
from batchgen.job.origins import given_origins
from batchgen.job.spec.job import SECTIONS, JobSpec
from batchgen.job.yaml_loader import CORE_SCALARS, TAG

HEADER = "# This job with every default filled in; written by batchgen, read by `verify`.\n"


class _Dumper(yaml.SafeDumper):
    """Quotes every string that YAML 1.1 or YAML 1.2 would read as something else."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


for _name, _pattern, _first in CORE_SCALARS:
    _Dumper.add_implicit_resolver(TAG + _name, re.compile(f"(?:{_pattern})\\Z"), _first)


def as_written(literal: str, value: str) -> str:
    """Show a string from the environment as the job file has it."""
    return literal


def resolved_dict(spec: JobSpec, conceal: Callable[[str, str], str] = as_written) -> dict[str, Any]:
    """The job as plain values.

    Args:
        spec: the job.
        conceal: from a string as written, with `${env:NAME}`, and its value, to what is shown of it.
    """
    result: dict[str, Any] = {"version": spec.version, "name": spec.name, "task": spec.task}
    for name in SECTIONS:
        result[name] = getattr(spec, name).model_dump(mode="json")
    for path, literal in spec.redacted.items():
        _conceal(result, path, literal, conceal)
    result["input"]["path"] = [shown_url(path) for path in result["input"]["path"]]
    return result


def resolved_yaml(spec: JobSpec) -> str:
    """The text of `job.resolved.yaml`; loads as the same job where nothing was redacted."""
    return HEADER + dump_yaml(resolved_dict(spec)) + _origins(spec)


def dump_yaml(job: Mapping[str, Any]) -> str:
    """A job as YAML that reads the same by the rules of YAML 1.1 and 1.2."""
    return str(yaml.dump(dict(job), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110))


def _origins(spec: JobSpec) -> str:
    """Comments, so that the copy stays a job file."""
    lines = [f"#   {key}: {origin}" for key, origin in given_origins(spec).items()]
    return "\n".join(["# Where values were given; every other is a default.", *lines, ""])


def _conceal(tree: Any, path: KeyPath, literal: str, conceal: Callable[[str, str], str]) -> None:
    """Replace the value at `path`; one string where a list may stand is in a list by now."""
    try:
        for part in path[:-1]:
            tree = tree[part]
        value = tree[path[-1]]
        if isinstance(value, list):
            tree[path[-1]] = [conceal(literal, item) for item in value]
        else:
            tree[path[-1]] = conceal(literal, str(value))
    except (KeyError, IndexError, TypeError):
        return
