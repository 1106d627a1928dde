"""The GPU check without a GPU: every section runs, one that dies ends alone, and all Pythons can read it."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from pathlib import Path

import gpu_check
import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "gpu" / "gpu_check.py"


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_a_dry_run(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(tmp_path / "out"), "--dry"],
        capture_output=True,
        text=True,
        check=False,
    )
    log = (tmp_path / "out" / "log.txt").read_text()
    assert done.returncode == 0, done.stdout + log
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["failed"] == []
    sections = {section.name for section in gpu_check.SECTIONS}
    assert {note["section"] for note in report["passed"]} == sections
    names = {figure["name"] for figure in report["figures"]}
    assert {"copy bandwidth", "shapes of attention tried"} <= names
    text = (tmp_path / "out" / "report.md").read_text()
    assert "0 failed" in text
    assert "| not run | engine: memory | memory after close |" in text


@pytest.mark.slow
def test_a_section_that_dies_ends_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that fails, one that hangs, one that is well; none has time when the time is over."""
    code = (
        "import gpu_check, os, sys, time\n"
        "def bad(notes, place, until): notes.check('one', True); os.abort()\n"
        "def slow(notes, place, until): notes.figure('two', 2, 's', 3); time.sleep(600)\n"
        "def good(notes, place, until): notes.skip('three', 'no reason')\n"
        "gpu_check.SECTIONS = tuple(gpu_check.Section(f.__name__, 45, f) for f in (bad, slow, good))\n"
        "gpu_check.__file__ = __file__\n"
        "sys.exit(gpu_check.main())\n"
    )
    script = tmp_path / "check.py"
    script.write_text(code)
    out = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, str(script), str(out)],
        env={"PYTHONPATH": ":".join(gpu_check.PATHS), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    report = json.loads((out / "report.json").read_text())
    assert [(note["section"], note["name"]) for note in report["failed"]] == [
        ("bad", "the section as a whole"),
        ("slow", "the section as a whole"),
    ]
    assert "ended with -6" in report["failed"][0]["detail"]
    assert "stopped after" in report["failed"][1]["detail"]
    assert {note["section"] for note in report["passed"]} == {"bad", "good"}
    assert [figure["value"] for figure in report["figures"]] == [2]
    text = (out / "report.md").read_text()
    assert "3: MISSED" in text
    assert "| not run | good | three | no reason |" in text


@pytest.mark.parametrize("folder", ["batchgen", "kernels", "tests/gpu"])
def test_sources_are_those_of_the_oldest_python(folder: str) -> None:
    for file in sorted((ROOT / folder).rglob("*.py")):
        ast.parse(file.read_text(), str(file), feature_version=(3, 11))


def test_what_is_sent_to_a_gpu_is_small() -> None:
    """A machine with a GPU takes source trees of up to 64 MiB."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    assert sum((ROOT / name).lstat().st_size for name in filter(None, listed)) < 32 << 20
