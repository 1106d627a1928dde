"""The images' recipes agree with the repository: sources that exist, versions that are allowed, no root.

There is no Docker here: recipes are read, and what is for a processor is installed in a clean environment.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
KNOWN = {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "USER", "ENTRYPOINT"}
RECIPES = ("Dockerfile.cpu", "Dockerfile.gpu")


@dataclass
class Stage:
    """Of a recipe: the image that it begins with, its name, and instructions as (word, rest)."""

    base: str
    name: str | None
    steps: list[tuple[str, str]] = field(default_factory=list)

    def all(self, word: str) -> list[str]:
        return [rest for kind, rest in self.steps if kind == word]


def instructions(recipe: str) -> Iterator[tuple[str, str]]:
    """Lines that end with a backslash joined, comments left out."""
    text = (ROOT / "docker" / recipe).read_text()
    lines = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
    for line in lines.replace("\\\n", " ").splitlines():
        if line.strip():
            word, _, rest = line.partition(" ")
            assert word in KNOWN, line
            yield word, " ".join(rest.split())


def stages(recipe: str) -> list[Stage]:
    """With the arguments before the first stage filled in where images are named."""
    found: list[Stage] = []
    values: dict[str, str] = {}
    for word, rest in instructions(recipe):
        if word == "ARG" and not found:
            name, _, value = rest.partition("=")
            values[name] = value
        elif word == "FROM":
            base, _, name = re.sub(r"\$\{(\w+)\}", lambda m: values[m[1]], rest).partition(" AS ")
            found.append(Stage(base, name or None))
        else:
            found[-1].steps.append((word, rest))
    return found


@pytest.mark.parametrize("recipe", RECIPES)
def test_everything_that_is_copied_exists_and_is_let_through(recipe: str) -> None:
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    build, final = stages(recipe)
    for copy in build.all("COPY"):
        sources = copy.split()[:-1]
        assert all((ROOT / s).exists() for s in sources)
        assert set(sources) <= allowed
    assert final.all("COPY") == ["--from=build /opt/batchgen /opt/batchgen"]
    assert build.name == "build"


@pytest.mark.parametrize("recipe", RECIPES)
def test_versions_are_pinned_and_in_the_projects_range(recipe: str) -> None:
    """torch and what it is built with; everything else follows from the project's own ranges."""
    build, final = stages(recipe)
    assert all(re.search(r":.*\d", stage.base) for stage in (build, final)), "an image without a version"
    script = " ".join(build.all("RUN"))
    pinned = dict(re.findall(r"([\w-]+)==([\w.$]+)", script))
    asked = {r.name: r for r in map(Requirement, PROJECT["dependencies"])}
    assert pinned["torch"] in asked["torch"].specifier
    pythons = set(re.findall(r"python:?(\d\.\d+)", f"{build.base} {final.base} {script}"))
    assert pythons
    assert all(version in SpecifierSet(PROJECT["requires-python"]) for version in pythons)


def test_extras_that_are_installed_exist() -> None:
    for recipe in RECIPES:
        for extra in re.findall(r"\.\[(\w+)\]", " ".join(stages(recipe)[0].all("RUN"))):
            assert extra in PROJECT["optional-dependencies"]
    assert "'.[gpu]'" in " ".join(stages("Dockerfile.gpu")[0].all("RUN"))


def test_what_runs_on_a_gpu_can_compile_launchers() -> None:
    """Triton needs a C compiler and Python's headers when it runs, and no CUDA compiler."""
    build, final = stages("Dockerfile.gpu")
    assert "-devel-" in build.base
    assert "-base-" in final.base
    assert build.base.replace("-devel-", "-base-") == final.base
    assert {"gcc", "python3.12-dev", "libc6-dev"} <= set(" ".join(final.all("RUN")).split())


def test_flash_attention_is_built_when_it_is_asked_for() -> None:
    build, _ = stages("Dockerfile.gpu")
    assert 'FLASH_ATTN=""' in build.all("ARG")
    [step] = [run for run in build.all("RUN") if "flash-attn" in run]
    assert step.startswith('if [ -n "$FLASH_ATTN" ]; then')
    assert "--no-build-isolation" in step
    # torch is there before what is compiled against it, and the sources come behind what takes an hour.
    words = [rest for _, rest in build.steps]
    torch, flash, sources = (
        next(i for i, rest in enumerate(words) if text in rest) for text in ("torch==", step, "batchgen b")
    )
    assert torch < flash < sources


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_script_is_one(recipe: str) -> None:
    for stage in stages(recipe):
        for script in stage.all("RUN"):
            subprocess.run(["bash", "-n", "-c", script], check=True)
            assert "apt-get update" not in script or "rm -rf /var/lib/apt/lists/*" in script


@pytest.mark.parametrize("recipe", RECIPES)
def test_runs_batchgen_as_an_ordinary_user(recipe: str) -> None:
    final = stages(recipe)[-1]
    assert final.all("USER") == ["batchgen"]
    assert final.all("ENTRYPOINT") == ['["/opt/batchgen/bin/batchgen"]']
    last = [word for word, _ in final.steps]
    assert last.index("USER") > last.index("RUN")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_lines_for_a_processor_install_batchgen(tmp_path: Path) -> None:
    """In another folder, with an empty environment and only what the recipe copies."""
    build, _ = stages("Dockerfile.cpu")
    source, target = tmp_path / "src", tmp_path / "opt"
    source.mkdir()
    for copy in build.all("COPY"):
        for name in copy.split()[:-1]:
            subprocess.run(["cp", "-r", str(ROOT / name), str(source)], check=True)
    [script] = build.all("RUN")
    script = script.replace("/opt/batchgen", str(target)).replace(
        "python -m venv", f"{sys.executable} -m venv"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "VIRTUAL_ENV"))}
    done = subprocess.run(
        ["bash", "-euc", script], cwd=source, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    [entry] = [shlex.split(e.strip("[]"))[0] for e in stages("Dockerfile.cpu")[-1].all("ENTRYPOINT")]
    command = entry.replace("/opt/batchgen", str(target))
    said = subprocess.run([command, "version"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert PROJECT["version"] in said.stdout
