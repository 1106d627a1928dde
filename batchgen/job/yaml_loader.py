"""Read a job file as YAML 1.2, keeping where every key and value stands. Called by `load_job` only.

PyYAML reads YAML 1.1, where `1e-3` is a string, `no` is false and `12:30:00` is 45000. Here PyYAML only
composes the nodes; scalars follow the YAML 1.2 core schema (https://yaml.org/spec/1.2.2/#103-core-schema),
duplicate keys are faults, and only maps, lists and plain scalars are ever made.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from batchgen.job.faults import Fault, KeyPath, Origin, dotted
from batchgen.types import UsageError

TAG = "tag:yaml.org,2002:"
CORE_SCALARS: tuple[tuple[str, str, list[str]], ...] = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    ("int", r"[-+]?[0-9]+|0o[0-7]+|0x[0-9a-fA-F]+", list("-+0123456789")),
    (
        "float",
        r"[-+]?(?:\.[0-9]+|[0-9]+(?:\.[0-9]*)?)(?:[eE][-+]?[0-9]+)?|[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)",
        list("-+0123456789."),
    ),
)
MOST_VALUES = 100_000
"""More than any job file needs; stops aliases that multiply."""
_ENV = re.compile(r"\$\{env:([^}]*)\}")
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class _Composer(yaml.SafeLoader):
    """PyYAML's scanner and parser with the scalars of the YAML 1.2 core schema."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own declaration


for _name, _pattern, _first in CORE_SCALARS:
    _Composer.add_implicit_resolver(TAG + _name, re.compile(f"(?:{_pattern})\\Z"), _first)


@dataclass(frozen=True, slots=True)
class Place:
    """Where one value and its key stand, and how the value was written.

    Args:
        value: where the value begins.
        key: where its key begins; None for the top and for items of lists.
        literal: a string that took something from the environment, as it was written.
        unescaped: written so that a backslash is only a backslash (plain or in single quotes).
    """

    value: Origin
    key: Origin | None = None
    literal: str | None = None
    unescaped: bool = False


@dataclass(slots=True)
class Document:
    """A job file's plain values, where each stands, and what is wrong so far."""

    source: str
    data: dict[str, Any] = field(default_factory=dict)
    places: dict[KeyPath, Place] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)

    def origin(self, path: KeyPath) -> Origin:
        """Where the value at `path` was given, or the nearest thing around it."""
        for n in range(len(path), -1, -1):
            if path[:n] in self.places:
                return self.places[path[:n]].value
        return Origin(self.source, 1, 1)

    def key_origin(self, path: KeyPath) -> Origin:
        """Where the key at `path` was given."""
        place = self.places.get(path)
        return place.key if place and place.key else self.origin(path)

    def literals(self) -> dict[KeyPath, str]:
        """Per path, the strings that took something from the environment, as they were written."""
        return {path: p.literal for path, p in self.places.items() if p.literal is not None}

    def fault(self, path: KeyPath, message: str, *, at_key: bool = False) -> None:
        """Record a fault of the value (or key) at `path`."""
        self.faults.append(Fault(self.key_origin(path) if at_key else self.origin(path), message))

    def nest(self, key: str, inner: str) -> None:
        """Turn `key: value` into `key: {inner: value}`."""
        self.data[key] = {inner: self.data[key]}
        below = self._below((key,))
        self.places.update({(key, inner, *path[1:]): place for path, place in below.items()})
        for path in below:
            if len(path) > 1:
                del self.places[path]

    def overlay(self, other: Document) -> None:
        """Put `other` on top: maps are merged, everything else replaces."""
        self._overlay(self.data, other, other.data, ())
        self.faults += other.faults

    def _overlay(self, target: dict[str, Any], other: Document, data: Mapping[str, Any], at: KeyPath) -> None:
        for key, value in data.items():
            path = (*at, key)
            if isinstance(value, dict) and isinstance(target.get(key), dict):
                self._overlay(target[key], other, value, path)
                continue
            for old in self._below(path):
                del self.places[old]
            target[key] = value
            self.places.update(other._below(path))

    def _below(self, path: KeyPath) -> dict[KeyPath, Place]:
        return {p: place for p, place in self.places.items() if p[: len(path)] == path}


def read_document(path: Path) -> Document:
    """Read a job file.

    Raises:
        UsageError: there is no such file, or it is not YAML; faults in YAML that could be read are kept in
            the document instead, to be reported together with all others.
    """
    source = str(path)
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UsageError(
            f"{source}: the job file is not UTF-8 (byte {error.start}); save it as UTF-8"
        ) from error
    except OSError as error:
        raise UsageError(f"{source}: the job file cannot be read ({error.strerror})") from error
    return parse_document(text, source)


def parse_document(text: str, source: str) -> Document:
    """Read a job file's text; as `read_document`."""
    document = Document(source)
    node = _compose(text, source)
    if node is None or (isinstance(node, yaml.ScalarNode) and node.tag == TAG + "null"):
        return document
    if not isinstance(node, yaml.MappingNode):
        raise UsageError(f"{source}:1:1: a job file is a map of keys such as `model: …`, not a {node.id}")
    document.data = _Builder(document, source).build(node, ())
    return document


def parse_override(key: str, text: str, flag: str) -> Document:
    """One command-line setting as a document to lay over the file.

    Args:
        key: dotted, as `sampling.temperature`.
        text: read by the scalar rules of the file; a list, a map (not `{{`, which begins a template) and a
            quoted string are read as YAML.
        flag: how the user gave it; stands in for the place in messages.

    Raises:
        UsageError: a list, map or quoted string that is not YAML.
    """
    document = Document(flag)
    stripped = text.strip()
    if stripped[:1] in ("[", '"', "'") or (stripped[:1] == "{" and stripped[:2] != "{{"):
        node = _compose(stripped, flag)
    else:
        tag = _plain_tag(stripped)
        node = yaml.ScalarNode(tag, text if tag == TAG + "str" else stripped)
    path = tuple(key.split("."))
    value = _Builder(document, flag, fixed=Origin(flag)).build(node, path)
    target = document.data
    for part in path[:-1]:
        target = target.setdefault(part, {})
    target[path[-1]] = value
    for n in range(1, len(path)):
        document.places[path[:n]] = Place(Origin(flag), Origin(flag))
    return document


def _plain_tag(text: str) -> str:
    names = (name for name, pattern, _ in CORE_SCALARS if re.fullmatch(pattern, text))
    return TAG + next(names, "str")


def _compose(text: str, source: str) -> Any:
    try:
        loader = _Composer(text)
        try:
            return loader.get_single_node()
        finally:
            loader.dispose()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        origin = Origin(source, mark.line + 1, mark.column + 1) if mark else Origin(source)
        what = " ".join(part for part in (error.context, error.problem) if part)
        raise UsageError(f"{origin}: not valid YAML ({what}); check indentation and quotes here") from error
    except yaml.YAMLError as error:
        first = str(error).splitlines()[0]
        raise UsageError(f"{source}: not valid YAML ({first}); remove that character") from error
    except RecursionError as error:
        raise UsageError(f"{source}: not valid YAML (nested too deeply)") from error


class _Builder:
    """Makes plain values of nodes and notes their places."""

    def __init__(self, document: Document, source: str, fixed: Origin | None = None) -> None:
        self._document = document
        self._source = source
        self._fixed = fixed
        self._open: list[yaml.Node] = []
        self._count = 0

    def build(self, node: yaml.Node, path: KeyPath, key: Origin | None = None) -> Any:
        self._document.places[path] = Place(self._origin(node), key)
        self._count += 1
        if any(node is parent for parent in self._open):
            return self._fault(path, f"{dotted(path)}: an alias cannot stand inside what it names")
        if self._count > MOST_VALUES:
            raise UsageError(
                f"{self._origin(node)}: more than {MOST_VALUES} values; do aliases multiply here?"
            )
        self._open.append(node)
        try:
            if isinstance(node, yaml.MappingNode):
                return self._map(node, path)
            if isinstance(node, yaml.SequenceNode):
                return self._list(node, path)
            if isinstance(node, yaml.ScalarNode):
                return self._scalar(node, path)
            raise TypeError(f"unknown YAML node {type(node).__name__}")
        finally:
            self._open.pop()

    def _origin(self, node: yaml.Node) -> Origin:
        if self._fixed is not None:
            return self._fixed
        return Origin(self._source, node.start_mark.line + 1, node.start_mark.column + 1)

    def _fault(self, path: KeyPath, message: str) -> None:
        self._document.fault(path, message)

    def _map(self, node: yaml.MappingNode, path: KeyPath) -> Any:
        if node.tag != TAG + "map":
            return self._refuse_tag(node, path)
        result: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                origin = self._origin(key_node)
                self._document.faults.append(
                    Fault(origin, "a key must be a single word; quote a template that begins with {{")
                )
                continue
            key = key_node.value
            at = (*path, key)
            if key in result:
                first = self._document.key_origin(at)
                message = f"the key {dotted(at)} is given twice, first at {first}; remove one of them"
                self._document.faults.append(Fault(self._origin(key_node), message))
                continue
            result[key] = self.build(value_node, at, self._origin(key_node))
        return result

    def _list(self, node: yaml.SequenceNode, path: KeyPath) -> Any:
        if node.tag != TAG + "seq":
            return self._refuse_tag(node, path)
        return [self.build(child, (*path, i)) for i, child in enumerate(node.value)]

    def _scalar(self, node: yaml.ScalarNode, path: KeyPath) -> Any:
        text = node.value
        try:
            match node.tag.removeprefix(TAG):
                case "str":
                    return self._string(node, path)
                case "null":
                    return None
                case "bool":
                    return {"true": True, "false": False}[text.lower()]
                case "int":
                    return int(text, 0) if text.startswith(("0x", "0o")) else int(text)
                case "float":
                    return float(re.sub(r"\.(?=inf|nan)", "", text.lower()))
        except (KeyError, ValueError):
            name = node.tag.removeprefix(TAG)
            return self._fault(path, f"{dotted(path)}: {text[:40]!r} cannot be read as !!{name}")
        return self._refuse_tag(node, path)

    def _string(self, node: yaml.ScalarNode, path: KeyPath) -> str:
        text: str = node.value
        from_environment = "${env:" in text
        self._document.places[path] = replace(
            self._document.places[path],
            literal=text if from_environment else None,
            unescaped=node.style in (None, "'"),
        )
        if not from_environment:
            return text
        return _ENV.sub(lambda match: self._environment(match[1], path), text)

    def _environment(self, inside: str, path: KeyPath) -> str:
        written = f"${{env:{inside}}}"
        name, has_default, default = inside.partition(":-")
        if not _ENV_NAME.fullmatch(name):
            self._fault(
                path,
                f"{dotted(path)}: {written} does not name a variable; write ${{env:NAME}} "
                "or ${env:NAME:-default}",
            )
            return written
        value = os.environ.get(name, "")
        if value or (name in os.environ and not has_default):
            return value
        if not has_default:
            self._fault(
                path,
                f"{dotted(path)}: the environment variable {name} is not set; set it, "
                f"or write ${{env:{name}:-default}}",
            )
            return written
        return default

    def _refuse_tag(self, node: yaml.Node, path: KeyPath) -> None:
        tag = node.tag.replace(TAG, "!!")
        self._fault(path, f"{dotted(path)}: the YAML tag {tag} is not allowed; write a plain value")
