"""A job file in memory: plain values, where each stands, and what is wrong so far.

Made by the YAML loader, laid over one another by `include` and `--set`, read by `load_job`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchgen.job.faults import MOST_FAULTS, Fault, KeyPath, Origin


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
    """A job file's plain values, where each stands, and what is wrong so far.

    Args:
        source: how messages name the file, or the flag of the command line.
        data: the values.
        places: where each value stands, by its path.
        faults: what is wrong; at most `MOST_FAULTS` are kept.
        folders: by name of a file, the folder that relative paths in it begin at.
    """

    source: str
    data: dict[str, Any] = field(default_factory=dict)
    places: dict[KeyPath, Place] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    folders: dict[str, Path] = field(default_factory=dict)

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

    def folder(self, path: KeyPath) -> Path:
        """The folder that a relative path at `path` begins at: that of the file which gives it.

        A path from the command line begins where those of the job file do.
        """
        return self.folders.get(self.origin(path).source) or self.folders[self.source]

    def literals(self) -> dict[KeyPath, str]:
        """Per path, the strings that took something from the environment, as they were written."""
        return {path: p.literal for path, p in self.places.items() if p.literal is not None}

    def fault(self, path: KeyPath, message: str, *, at_key: bool = False) -> None:
        """Record a fault of the value (or key) at `path`."""
        self.add(Fault(self.key_origin(path) if at_key else self.origin(path), message, path))

    def add(self, *faults: Fault) -> None:
        """Record faults whose place is known."""
        self.faults += faults[: max(0, MOST_FAULTS - len(self.faults))]

    @property
    def full(self) -> bool:
        """Whether there are so many faults that looking for more is of no use."""
        return len(self.faults) >= MOST_FAULTS

    def nest(self, key: str, inner: str) -> None:
        """Turn `key: value` into `key: {inner: value}`."""
        value = self.data[key]
        top = self.places.get((key,))
        below = {path: self.places.pop(path) for path in _paths(value, (key,)) if path in self.places}
        self.places.update({(key, inner, *path[1:]): place for path, place in below.items()})
        if top is not None:
            self.places[(key,)] = top
        self.data[key] = {inner: value}

    def overlay(self, other: Document) -> None:
        """Put `other` on top: maps are merged, everything else replaces."""
        self._overlay(self.data, other, other.data, ())
        self.add(*other.faults)
        self.folders |= other.folders

    def _overlay(self, target: dict[str, Any], other: Document, data: Mapping[str, Any], at: KeyPath) -> None:
        for key, value in data.items():
            path = (*at, key)
            if isinstance(value, dict) and isinstance(target.get(key), dict):
                self._overlay(target[key], other, value, path)
                continue
            if key in target:
                for old in _paths(target[key], path):
                    self.places.pop(old, None)
            target[key] = value
            self.places.update({new: other.places[new] for new in _paths(value, path) if new in other.places})


def _paths(value: Any, at: KeyPath) -> Iterator[KeyPath]:
    """The paths of a value and of all that is in it."""
    yield at
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _paths(inner, (*at, key))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from _paths(inner, (*at, i))
