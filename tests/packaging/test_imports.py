"""Data flows one way: what each package may import, read from the source."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2] / "batchgen"
BELOW = {
    "core": ["types"],
    "text": ["types", "scores", "cache", "data", "sampling"],
    "data": ["types", "scores", "cache", "text", "sampling", "data"],
    "sampling": ["types", "text"],
    "models": ["types", "scores", "cache", "text"],
    "engine": ["types", "scores", "cache", "file_hash", "core", "models", "sampling", "text"],
    "job": ["types", "cache", "file_hash", "core", "data", "text", "sampling"],
    "dist": ["types", "scores", "core", "engine", "models", "sampling", "text", "data", "job"],
    "api": ["types", "scores", "cache", "data", "text", "sampling", "models", "engine", "job", "dist"],
    "bench": [
        "types",
        "scores",
        "core",
        "data",
        "text",
        "sampling",
        "models",
        "engine",
        "job",
        "api",
        "dist",
    ],
    "cli": ["types", "cache", "data", "text", "sampling", "models", "job", "api", "dist", "bench"],
}
"""What a package may import besides itself, also inside functions."""

EVERYWHERE = ("__version__", "devices", "grammar", "json_problem", "promise")

NEVER = {
    "core": {"torch", "transformers", "pyarrow", "numpy"},
    "data": {"torch", "transformers"},
    "job": {"torch", "transformers", "click"},
    "text": {"torch"},
    "cli": {"torch"},
}


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def files() -> list[Path]:
    return sorted(path for path in ROOT.rglob("*.py") if path.parent != ROOT)


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    allowed = (package, *EVERYWHERE, *BELOW[package])
    for name in imported(path):
        if name.startswith("batchgen."):
            inside = name.removeprefix("batchgen.")
            ours = any(inside == below or inside.startswith(f"{below}.") for below in allowed)
            assert ours, f"{package} imports {name}"
        else:
            assert name.split(".")[0] not in NEVER.get(package, ()), f"{package} imports {name}"
