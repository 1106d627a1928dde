"""Read a job file as YAML 1.2, keeping where every key and value stands. Called by `include.py`.

PyYAML reads YAML 1.1, where `1e-3` is a string, `no` is false and `12:30:00` is 45000. Here PyYAML only
composes the nodes; scalars follow the YAML 1.2 core schema (https://yaml.org/spec/1.2.2/#103-core-schema),
duplicate keys are faults, and only maps, lists and plain scalars are ever made.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import yaml

from batchgen.job.document import Document, Place
from batchgen.job.faults import Fault, JobFileError, KeyPath, Origin, dotted

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
MOST_BYTES = 1_000_000
"""Whoever names a larger file has named the input or the weights."""
DEEPEST = 100
_KEY_PART = r"\"[^\"]*\"|'[^']*'|[^.\"'=]+"
_ENV = "${env:"
_ENV_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_HINTS = (
    (r"character '\t'", "indent with spaces, not tabs"),
    ("cannot start any token", "quote a value that begins with this character"),
    ("another document", "a job file is one document, so remove the line ---"),
    ("mapping values are not allowed", "quote a text that holds a colon and a space"),
    ("undefined alias", "quote a value that begins with *"),
    ("unknown escape", "in double quotes a backslash begins an escape, so double it or use single quotes"),
    ("quoted scalar", "close the quote"),
    ("flow sequence", "close the [ and put commas between items"),
    ("flow mapping", "close the { and put commas between keys; quote a template that begins with {{"),
)
"""What a complaint of PyYAML usually comes from; the first that is found in it."""


class _Composer(yaml.SafeLoader):
    """PyYAML's scanner and parser with the scalars of the YAML 1.2 core schema."""

    yaml_implicit_resolvers: dict[str, Any] = {}  # noqa: RUF012 - PyYAML's own declaration


for _name, _pattern, _first in CORE_SCALARS:
    _Composer.add_implicit_resolver(TAG + _name, re.compile(f"(?:{_pattern})\\Z"), _first)


def read_document(path: Path, source: str | None = None, included_at: Origin | None = None) -> Document:
    """Read one job file, without what it includes.

    Args:
        path: the file.
        source: how messages name it; None: by its path.
        included_at: where another file includes it.

    Raises:
        JobFileError: there is no such file, or it is not YAML; faults in YAML that could be read are kept in
            the document instead, to be reported together with all others.
    """
    source = source or str(path)
    origin, what = (included_at, f"include: {source}") if included_at else (Origin(source), "the job file")
    try:
        with path.open("rb") as file:
            content = file.read(MOST_BYTES + 1)
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        _refuse(origin, f"{what} is not UTF-8 text (byte {error.start}); give a job file saved as UTF-8")
    except (OSError, ValueError) as error:
        why = (isinstance(error, OSError) and error.strerror) or error
        _refuse(origin, f"{what} cannot be read ({why}); give the path of a job file")
    if len(content) > MOST_BYTES:
        _refuse(
            origin, f"{what} is larger than {MOST_BYTES:,} bytes; give a job file, not the input or a model"
        )
    document = parse_document(text, source)
    document.folders[source] = path.absolute().parent
    return document


def _refuse(origin: Origin, message: str, key: KeyPath = ()) -> NoReturn:
    raise JobFileError(origin.source, [Fault(origin, message, key)])


def parse_document(text: str, source: str) -> Document:
    """Read a job file's text; as `read_document`."""
    document = Document(source)
    node = _compose(text, source)
    if node is None or (isinstance(node, yaml.ScalarNode) and node.tag == TAG + "null"):
        return document
    if not isinstance(node, yaml.MappingNode):
        _refuse(
            Origin(source, 1, 1),
            f"a job file is a map of keys, not a {node.id}; write keys and values such as `model: org/name`",
        )
    # A map with a tag is refused whole, and is nothing then.
    document.data = _Builder(document, source).build(node, ()) or {}
    return document


def parse_override(key: str, text: str, flag: str) -> Document:
    """One command-line setting as a document to lay over the file.

    Args:
        key: dotted, as `sampling.temperature`.
        text: read by the scalar rules of the file; a list, a map (not `{{`, `{%` or `{#`, which begin a
            template) and a quoted string are read as YAML.
        flag: how the user gave it; stands in for the place in messages.

    Raises:
        UsageError: a list, map or quoted string that is not YAML.
    """
    document = Document(flag)
    stripped = text.strip()
    if stripped[:1] in ("[", '"', "'") or (stripped[:1] == "{" and stripped[1:2] not in ("{", "%", "#")):
        node = _compose(stripped, flag)
    else:
        tag = _plain_tag(stripped)
        node = yaml.ScalarNode(tag, text if tag == TAG + "str" else stripped)
    path = split_key(key)
    value = _Builder(document, flag, fixed=Origin(flag)).build(node, path)
    target = document.data
    for part in path[:-1]:
        target = target.setdefault(part, {})
    target[path[-1]] = value
    for n in range(1, len(path)):
        document.places[path[:n]] = Place(Origin(flag), Origin(flag))
    return document


def split_key(key: str) -> tuple[str, ...]:
    """The parts of a dotted key; one that holds a dot is quoted, as in `a."b.c"`. Empty if it is no key."""
    parts = re.findall(_KEY_PART, key)
    words = tuple(part[1:-1] if part[0] in "\"'" else part for part in parts)
    return words if ".".join(parts) == key and all(words) else ()


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
        hint = next((hint for part, hint in _HINTS if part in what), "check indentation and quotes here")
        _refuse(origin, f"not valid YAML ({what}); {hint}")
    except yaml.YAMLError as error:
        _refuse(Origin(source), f"not valid YAML ({str(error).splitlines()[0]}); remove that character")
    except RecursionError:
        _refuse(Origin(source), f"not valid YAML (nested deeper than {DEEPEST} levels); make it flatter")
    except (ValueError, OverflowError) as error:
        # Such as an escape beyond the last character of Unicode, which PyYAML lets through.
        _refuse(Origin(source), f"not valid YAML ({error}); correct the escape or number it speaks of")


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
            message = f"more than {MOST_VALUES:,} values; do aliases multiply here?"
            _refuse(self._origin(node), message, path)
        if len(path) > DEEPEST:
            message = f"nested deeper than {DEEPEST} levels; make it flatter"
            _refuse(self._origin(node), message, path)
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
            key = self._key(key_node, path)
            if key is None:
                continue
            at = (*path, key)
            if key in result:
                first = self._document.key_origin(at)
                message = f"the key {dotted(at)} is given twice, first at {first}; remove one of them"
                self._document.add(Fault(self._origin(key_node), message, at))
                continue
            result[key] = self.build(value_node, at, self._origin(key_node))
        return result

    def _key(self, node: yaml.Node, path: KeyPath) -> str | None:
        if not isinstance(node, yaml.ScalarNode):
            message = "a key must be a single word; quote a template that begins with {{"
        elif node.tag.removeprefix(TAG) not in ("str", *(name for name, _, _ in CORE_SCALARS)):
            tag = node.tag.replace(TAG, "!!")
            message = f"the YAML tag {tag} is not allowed; write a plain key"
        elif node.value == "<<" and node.style is None:
            message = "merge keys (<<) are not part of YAML 1.2; write the keys out, or use include"
        else:
            return str(node.value)
        self._document.add(Fault(self._origin(node), message, path))
        return None

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
            kind = {"bool": "true or false"}.get(node.tag.removeprefix(TAG), "a number of usual length")
            return self._fault(path, f"{dotted(path)}: {text[:40]!r} cannot be read; write {kind}")
        return self._refuse_tag(node, path)

    def _string(self, node: yaml.ScalarNode, path: KeyPath) -> str:
        text: str = node.value
        from_environment = _ENV in text
        self._document.places[path] = replace(
            self._document.places[path],
            literal=text if from_environment else None,
            unescaped=node.style in (None, "'"),
        )
        if not from_environment:
            return text
        # A long text with variables, repeated by aliases, would fill the memory.
        self._count += len(text) // 1000 + text.count(_ENV)
        return self._substitute(text, path)

    def _substitute(self, text: str, path: KeyPath) -> str:
        before, *rest = text.split(_ENV)
        pieces = [before]
        for piece in rest:
            inside, closed, after = piece.partition("}")
            if not closed:
                self._fault(path, f"{dotted(path)}: ${{env: is not closed; write ${{env:NAME}}")
                return text
            pieces += [self._environment(inside, path), after]
        return "".join(pieces)

    def _environment(self, inside: str, path: KeyPath) -> str:
        written = f"${{env:{inside}}}"
        name, has_default, default = inside.partition(":-")
        if not _ENV_NAME.fullmatch(name):
            self._fault(
                path,
                f"{dotted(path)}: {written[:80]} does not name a variable; write ${{env:NAME}} "
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
        where = f"{dotted(path)}: " if path else ""
        self._fault(path, f"{where}the YAML tag {tag} is not allowed; write a plain value")
