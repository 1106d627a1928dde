"""Where each value of a job came from. For `batchgen config` and for the copy beside the results."""

from __future__ import annotations

import re
from collections.abc import Mapping

from batchgen.job.faults import KeyPath, dotted
from batchgen.job.spec.job import SECTIONS, JobSpec

DEFAULT = "default"
_VARIABLE = re.compile(r"\$\{env:([A-Za-z_][A-Za-z0-9_]*)")


def given_origins(spec: JobSpec) -> dict[str, str]:
    """By key, such as `sampling.seed`, the place of every value that was given; lists count as one value.

    A place is `file:line:column` or a flag of the command line, and names the variables of the environment
    that the value took something from.
    """
    variables = _variables(spec)
    keys = {_without_items(path) for path in spec.places if path and path[0] != "include"}
    leaves = keys - {key[:n] for key in keys for n in range(len(key))}
    found = {}
    for key in sorted(leaves, key=lambda key: [str(part) for part in key]):
        place = spec.place(key)
        names = variables.get(key, [])
        shown = f"{place} (environment {', '.join(names)})" if names else str(place)
        found[_one_line(dotted(key))] = _one_line(shown)
    return found


def all_origins(spec: JobSpec) -> dict[str, str]:
    """By key of each section, where its value came from; `default` where nobody gave one."""
    given = given_origins(spec)
    keys = ["version", "name", "task", *(f"{n}.{key}" for n, m in SECTIONS.items() for key in m.model_fields)]
    return {key: _origin_of(key, given) for key in keys}


def _origin_of(key: str, given: Mapping[str, str]) -> str:
    within = dict.fromkeys(origin for k, origin in given.items() if k == key or k.startswith(key + "."))
    return ", ".join(within) or DEFAULT


def _variables(spec: JobSpec) -> dict[KeyPath, list[str]]:
    names: dict[KeyPath, list[str]] = {}
    for path, literal in spec.redacted.items():
        names.setdefault(_without_items(path), []).extend(_VARIABLE.findall(literal))
    return {path: list(dict.fromkeys(found)) for path, found in names.items()}


def _without_items(path: KeyPath) -> KeyPath:
    """The path up to the first list, which counts as one value."""
    end = next((n for n, part in enumerate(path) if isinstance(part, int)), len(path))
    return path[:end]


def _one_line(text: str) -> str:
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
