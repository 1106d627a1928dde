"""Read a job file with what it includes, and lay the files over one another. Called by `load_job` only.

Precedence from low to high: included files in their order, the file that includes them, the command line.
"""

from __future__ import annotations

import os.path
from pathlib import Path
from typing import Any

from batchgen.job.document import Document
from batchgen.job.faults import JobFileError, Origin, show_value
from batchgen.job.yaml_loader import read_document

INCLUDE = "include"
SHORTHAND: dict[str, tuple[type, ...]] = {"model": (str,), "input": (str, list), "output": (str,)}
MOST_FILES = 100
"""More than any job needs; stops files that include each other again and again."""


def read_layers(path: Path) -> Document:
    """A job file over everything it includes.

    Raises:
        JobFileError: the file itself cannot be read or is not YAML; what is wrong with included files is kept
            in the document.
    """
    return _Reader().read(path, str(path), None)


def expand_shorthands(document: Document) -> None:
    """Turn `model: NAME` into `model: {path: NAME}`, and input and output likewise."""
    for name, kinds in SHORTHAND.items():
        if isinstance(document.data.get(name), kinds):
            document.nest(name, "path")


class _Reader:
    """Reads files recursively; knows which are open, so that a circle is found."""

    def __init__(self) -> None:
        self._open: dict[str, str] = {}
        self._files = 0

    def read(self, path: Path, source: str, included_at: Origin | None) -> Document:
        self._files += 1
        own = read_document(path, source, included_at)
        expand_shorthands(own)
        included = _included(own)
        own.data.pop(INCLUDE, None)
        if not included:
            return own
        # The job file's own place stands for what no file gives.
        whole = Document(source, places={(): own.places[()]})
        self._open[os.path.realpath(path)] = source
        for number, text in included:
            self._add(whole, own, number, text)
        del self._open[os.path.realpath(path)]
        whole.overlay(own)
        return whole

    def _add(self, whole: Document, own: Document, number: int, text: str) -> None:
        """Lay one included file over `whole`; what is wrong with it becomes a fault there."""
        at = (INCLUDE, number)
        origin = own.origin(at)
        path = Path(os.path.join(own.folders[own.source], os.path.expanduser(text)))
        literals = own.literals()
        written = literals.get(at) or literals.get((INCLUDE,)) or text
        source = os.path.normpath(os.path.join(os.path.dirname(own.source), os.path.expanduser(written)))
        if (real := os.path.realpath(path)) in self._open:
            chain = [*list(self._open.values())[list(self._open).index(real) :], self._open[real]]
            own.fault(at, f"include: the files include each other ({' > '.join(chain)}); remove one include")
        elif self._files >= MOST_FILES:
            own.fault(at, f"include: more than {MOST_FILES:,} files; include each file only once")
        else:
            try:
                whole.overlay(self.read(path, source, origin))
            except JobFileError as error:
                own.add(*error.faults)


def _included(document: Document) -> list[tuple[int, str]]:
    """Number and path of each included file; what is no path becomes a fault."""
    value: Any = document.data.get(INCLUDE)
    if value is None:
        return []
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list):
        document.fault((INCLUDE,), f"include: {show_value(value)} is not allowed; use a list of job files")
        return []
    good = []
    for number, item in enumerate(value):
        if isinstance(item, str) and item and "://" not in item and "\0" not in item:
            good.append((number, item))
        else:
            message = (
                f"include[{number}]: {show_value(item)} is not allowed; use the path of a local job file"
            )
            document.fault((INCLUDE, number), message)
    return good
