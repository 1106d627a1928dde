"""The GPU check without a GPU: every section runs, one that dies ends alone, and all Pythons can read it."""

from __future__ import annotations

import ast
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import gpu_check
import pytest
import torch
from gpu_notes import Notes, Place
from stand_in_flash import FLASH_ATTN, FLASH_ATTN_INTERFACE
from waiting import wait_until

from batchgen_kernels.flash_attention import FlashAttention2, FlashAttention3

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
    assert done.returncode == 0, done.stdout
    report = json.loads((tmp_path / "out" / "report.json").read_text())
    assert report["failed"] == []
    sections = {section.name for section in gpu_check.SECTIONS}
    assert {note["section"] for note in report["passed"]} == sections
    names = {figure["name"] for figure in report["figures"]}
    assert {"copy bandwidth", "shapes of attention tried"} <= names
    text = (tmp_path / "out" / "report.md").read_text()
    assert "0 failed" in text
    assert "| could not run | engine: memory | memory after close |" in text
    assert (
        "| could not run | kernels: flash-attn | flash_attn | the flash_attn attention backend needs" in text
    )
    # What is wanted stands beside what was measured.
    wanted = {figure["name"]: (figure["least"], figure["most"]) for figure in report["figures"]}
    assert wanted["prefill: operations of the model, of products"] == (55, None)
    assert wanted["decode: weights, keys and values read, of a copy"] == (70, None)
    assert wanted["decode: the GPU waits for the host, steps: all"] == (None, 3)
    assert wanted["attention of decoding 3 x 1 after 40, of a copy"] == (80, None)
    assert wanted["attention of prompts 2 x 9, of products"] == (50, None)


CODE = """
import gpu_check, os, sys, time
def dies(notes, place, until): notes.check('one', True); os.abort()
def raises(notes, place, until):
    with notes.attempt('a part'): raise ValueError('of a part')
    notes.check('two', True)
    raise KeyError('of the whole')
def hangs(notes, place, until): notes.figure('three', 2, 's', least=3); time.sleep(600)
def works(notes, place, until): notes.skip('four', 'no reason')
chosen = (dies, raises, hangs, works) if 'all' in sys.argv else (works, hangs, dies)
sys.argv = [argument for argument in sys.argv if argument != 'all']
seconds = {'hangs': int(os.environ['HANGS'])}
gpu_check.SECTIONS = tuple(gpu_check.Section(f.__name__, seconds.get(f.__name__, 90), f) for f in chosen)
gpu_check.__file__ = __file__
sys.exit(gpu_check.main())
"""


def begin(folder: Path, *more: str, hangs: int) -> subprocess.Popen[str]:
    """A check of sections that do what their names say."""
    script = folder / "check.py"
    # Sections are started with the same words behind.
    script.write_text(CODE.replace("'all' in sys.argv", repr("all" in more)))
    return subprocess.Popen(
        [sys.executable, str(script), str(folder / "out")],
        env={"PYTHONPATH": ":".join(gpu_check.PATHS), "PATH": "", "HANGS": str(hangs)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def report_of(folder: Path) -> Any:
    return json.loads((folder / "out" / "report.json").read_text())


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_section_that_dies_ends_alone(tmp_path: Path) -> None:
    """One that dies, one that fails, one that hangs, one that is well."""
    check = begin(tmp_path, "all", hangs=45)
    said, _ = check.communicate()
    assert check.returncode == 1, said
    report, whole = report_of(tmp_path), "the section as a whole"
    failed = {(note["section"], note["name"]): note for note in report["failed"]}
    assert list(failed) == [
        ("dies", whole),
        ("raises", "a part"),
        ("raises", "runs to its end"),
        ("raises", whole),
        ("hangs", whole),
    ]
    assert report["ended"]
    assert failed["dies", whole]["detail"].startswith("ended with -6 after ")
    assert "Fatal Python error: Aborted" in failed["dies", whole]["traceback"]
    assert "raise ValueError('of a part')" in failed["raises", "a part"]["traceback"]
    assert failed["raises", "runs to its end"]["detail"] == "KeyError: 'of the whole'"
    assert failed["hangs", whole]["detail"].endswith(", its limit")
    assert {(note["section"], note["name"]) for note in report["passed"]} == {
        *(("dies", "one"), ("raises", "two"), ("works", whole))
    }
    assert [figure["value"] for figure in report["figures"]] == [2]
    text = (tmp_path / "out" / "report.md").read_text()
    assert "| hangs | three | 2 s | least 3 | MISSED |" in text
    assert "| could not run | works | four | no reason |" in text
    assert text.count("raise KeyError('of the whole')") == 1
    assert (tmp_path / "out" / "sections" / "02-hangs.log").read_text().startswith("[hangs] figure three")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_check_that_is_stopped_leaves_its_report(tmp_path: Path, number: signal.Signals) -> None:
    check = begin(tmp_path, hangs=500)
    file = tmp_path / "out" / "report.json"
    assert wait_until(lambda: file.exists() and report_of(tmp_path)["figures"], check, every=0.2)
    check.send_signal(number)
    said, _ = check.communicate()
    report = report_of(tmp_path)
    assert [note["section"] for note in report["passed"]] == ["works"]
    assert [figure["name"] for figure in report["figures"]] == ["three"]
    reasons = {note["section"]: note["reason"] for note in report["not_run"] if note["section"] != "works"}
    if number == signal.SIGKILL:
        assert not report["ended"]
        assert reasons == {"hangs": "it has not ended", "dies": "it has not begun"}
        assert "**The check has not ended.**" in (tmp_path / "out" / "report.md").read_text()
    else:
        assert check.returncode == 1, said
        [failed] = report["failed"]
        assert failed["detail"].startswith("the check was stopped while it ran, after ")
        assert reasons == {"dies": "the check was stopped before"}
    # What was started has ended with it.
    wait_until(lambda: not any("--section" in line for line in lines_of(tmp_path / "check.py")))


def lines_of(script: Path) -> list[str]:
    """The command lines of processes that run it."""
    found = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = file.read_text().replace("\0", " ")
        except OSError:
            continue
        if str(script) in line:
            found.append(line)
    return found


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time of a check, which passes as its sections say."""
    now = [0.0]
    monkeypatch.setattr(gpu_check.time, "monotonic", lambda: now[0])
    return now


def test_no_section_takes_longer_than_what_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clock: list[float]
) -> None:
    takes = {"one": 300.0, "two": 1000.0, "three": 1000.0, "four": 1.0}
    sections = tuple(gpu_check.Section(name, 400, lambda *_: None) for name in takes)
    monkeypatch.setattr(gpu_check, "SECTIONS", sections)
    monkeypatch.setattr(gpu_check, "REPORT_SECONDS", 0.01)
    given = []

    def in_process(check: gpu_check.Check, section: gpu_check.Section, seconds: float) -> int | None:
        given.append((section.name, seconds))
        check._file(section, "log").write_text("the last words\n")
        clock[0] += min(takes[section.name], seconds)
        return 0 if takes[section.name] <= seconds else None

    monkeypatch.setattr(gpu_check.Check, "_in_process", in_process)
    report = gpu_check.Check(tmp_path, list(sections), tmp_path, dry=False).run()
    assert given == [("one", 400), ("two", 270.0)]
    assert [(n["section"], n["detail"], n["traceback"]) for n in report["failed"]] == [
        ("two", "cut after 270 s, what was left of 570 s", "the last words")
    ]
    assert [(n["section"], n["reason"]) for n in report["not_run"]] == [
        ("three", "the 570 s of the whole were over"),
        ("four", "the 570 s of the whole were over"),
    ]
    assert report["ended"]
    assert json.loads((tmp_path / "report.json").read_text()) == report


def test_what_is_wanted_of_a_figure(tmp_path: Path) -> None:
    notes = Notes("speed", tmp_path / "notes")
    notes.figure("a", 56, "%", least=55)
    notes.figure("b", 54, "%", least=55)
    notes.figure("c", 2, "%", most=3)
    notes.figure("d", 4, "%", most=3)
    notes.figure("e", 5, "s")
    written = [json.loads(line) for line in (tmp_path / "notes").read_text().splitlines()]
    assert [note["met"] for note in written] == [True, False, True, False, None]
    text = "\n".join(gpu_check._markdown(gpu_check._report(written, 5.0, dry=False, ended=True)))
    assert "2 of 4 targets met" in text
    assert "| speed | b | 54 % | least 55 | MISSED |" in text
    assert "| speed | c | 2 % | most 3 | met |" in text
    assert text.count("| speed | e | 5 s |  |  |") == 1


@pytest.mark.parametrize(
    "backend",
    [FlashAttention2(FLASH_ATTN), FlashAttention3(FLASH_ATTN_INTERFACE)],
    ids=lambda backend: backend.name,
)
def test_flash_attn_is_compared_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: Any
) -> None:
    import gpu_kernels

    monkeypatch.setattr(gpu_kernels, "LAYERS", {"small": {"heads": (4, 2), "width": 32}})
    monkeypatch.setattr(type(backend), "supports", lambda *_: None)
    notes = Notes("flash", tmp_path / "notes")
    gpu_kernels.flash_parity(notes, Place(dry=True), backend)
    monkeypatch.setattr(type(backend), "_attend", lambda self, query, *_: torch.zeros_like(query))
    gpu_kernels.flash_parity(notes, Place(dry=True), backend)
    written = [json.loads(line) for line in (tmp_path / "notes").read_text().splitlines()]
    assert [note["ok"] for note in written] == [True, True, False, False]
    assert written[0]["name"] == f"{backend.name} in bfloat16"


def test_flash_attn_that_is_not_there(tmp_path: Path) -> None:
    import gpu_kernels

    gpu_kernels.flash(Notes("flash", tmp_path / "notes"), Place(dry=True))
    first, second = (json.loads(line) for line in (tmp_path / "notes").read_text().splitlines())
    assert (first["kind"], first["name"], second["name"]) == ("skipped", "flash_attn", "flash_attn_3")
    assert "needs flash_attn, which is not installed" in first["reason"]


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
