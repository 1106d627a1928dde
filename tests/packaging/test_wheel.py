"""The wheel holds both packages, works from another folder, and shadows nobody's `kernels`."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    source = tmp_path_factory.mktemp("source")
    parts = ["batchgen", "kernels", "pyproject.toml", "README.md", "LICENSE"]
    listed = subprocess.run(["git", "ls-files", *parts], cwd=ROOT, check=True, capture_output=True, text=True)
    tracked = listed.stdout.splitlines()
    for name in tracked:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_bytes((ROOT / name).read_bytes())
    options = ["--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir"]
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", *options, out, source], check=True, capture_output=True
    )
    return next(out.glob("*.whl"))


def test_top_level_names(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = {n.split("/")[0] for n in archive.namelist()}
    assert {n for n in names if not n.endswith(".dist-info")} == {"batchgen", "batchgen_kernels"}


def test_imports_from_another_folder(wheel: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    program = (
        f"import sys; sys.path.insert(0, {str(target)!r})\n"
        "import batchgen, batchgen_kernels, batchgen.engine.build, batchgen.cli.main\n"
        "print(batchgen.__file__); print(batchgen_kernels.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert all(line.startswith(str(target)) for line in done.stdout.splitlines())


def test_the_kernels_folder_is_no_package() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()
