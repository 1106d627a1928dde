"""The image's recipe agrees with the repository: sources that exist, a torch that is allowed, no root."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[2]
LINES = (ROOT / "docker" / "Dockerfile.cpu").read_text().splitlines()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def instructions(name: str) -> list[str]:
    return [line.removeprefix(name).strip() for line in LINES if line.startswith(f"{name} ")]


def test_everything_that_is_copied_exists_and_is_let_through() -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for copy in instructions("COPY"):
        if not copy.startswith("--from"):
            sources = copy.split()[:-1]
            assert all((ROOT / s).exists() for s in sources)
            assert set(sources) <= allowed


def test_torch_is_in_the_projects_range() -> None:
    pinned = re.search(r"torch==(\S+)", "\n".join(LINES))
    assert pinned is not None
    torch = next(r for r in map(Requirement, PROJECT["dependencies"]) if r.name == "torch")
    assert pinned[1] in torch.specifier


def test_python_is_in_the_projects_range() -> None:
    versions = {re.search(r"python:(\d+\.\d+)", line)[1] for line in instructions("FROM")}  # type: ignore[index]
    assert all(v in SpecifierSet(PROJECT["requires-python"]) for v in versions)


def test_runs_batchgen_as_an_ordinary_user() -> None:
    assert instructions("USER") == ["batchgen"]
    assert instructions("ENTRYPOINT") == ['["/opt/batchgen/bin/batchgen"]']
