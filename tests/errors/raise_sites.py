"""Every place in the product that makes an error for users, found in its syntax trees.

A place is named by module, function and number within the function, so that lines may move:
`batchgen.models.source:find_model:0`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
CLASSES = {
    *("UsageError", "InputError", "DriftError", "StorageError", "OwnershipError", "EngineError"),
    *("JobFileError", "RowFailure"),
}


@dataclass(frozen=True, slots=True)
class RaiseSite:
    """One call of the error class `kind`; lines count from 1, both inclusive."""

    name: str
    kind: str
    file: Path
    first: int
    last: int


@cache
def raise_sites() -> list[RaiseSite]:
    """All of them, in the order of files and lines."""
    files = sorted((ROOT / "batchgen").rglob("*.py"))
    return [site for file in files for site in _of_module(file)]


def site_at(sites: list[RaiseSite], file: str, line: int) -> RaiseSite | None:
    """The innermost site that a line of a file is in."""
    inside = [site for site in sites if str(site.file) == file and site.first <= line <= site.last]
    return min(inside, key=lambda site: site.last - site.first, default=None)


def _of_module(file: Path) -> Iterator[RaiseSite]:
    module = ".".join(file.relative_to(ROOT).with_suffix("").parts)
    counts: dict[str, int] = {}
    for where, call in _calls(ast.parse(file.read_text()), ""):
        number = counts.get(where, 0)
        counts[where] = number + 1
        last = call.end_lineno or call.lineno
        yield RaiseSite(f"{module}:{where}:{number}", ast.unparse(call.func), file, call.lineno, last)


def _calls(node: ast.AST, where: str) -> Iterator[tuple[str, ast.Call]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _calls(child, f"{where}.{child.name}".lstrip("."))
            continue
        if isinstance(child, ast.Call) and isinstance(child.func, ast.Name) and child.func.id in CLASSES:
            yield where or "<module>", child
        yield from _calls(child, where)
