"""Prove and measure everything that needs a GPU, in under ten minutes: `python tests/gpu/gpu_check.py OUT`.

It needs the source tree, torch, triton and transformers: no installation, network, weights or test tools.
Each section is a process of its own with a time limit, so that one that fails, hangs or breaks the context of
the GPU ends alone. OUT gets `report.json` and `report.md`, written anew every two seconds, and in `sections`
what each has printed. The exit code is 1 if anything failed; a target that is missed is no failure.
`--dry` runs the same code on the processor with interpreted kernels and tiny sizes, where times mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib.metadata
import importlib.util
import itertools
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PATHS = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "tests"), str(ROOT / "tests" / "gpu")]
MODULES = (
    *("numba", "pydantic", "pyarrow", "msgpack", "zstandard", "click", "datasets", "gguf", "pytest"),
    *("hypothesis", "flash_attn", "flash_attn_interface", "flashinfer", "accelerate", "safetensors"),
    *("tokenizers", "jinja2"),
)
"""Of which the report says whether they are there."""
TOTAL_SECONDS = 570
"""Of all sections together; each has a limit besides."""
LEAST_SECONDS = 10
"""With less left a section is not begun."""
REPORT_SECONDS = 2.0
FAILED = 3
"""Exit code of a section that has noted why it ended."""
LAST_LINES = 40
"""Of what a section has printed that died or was cut."""


class Section(NamedTuple):
    """`seconds` it may take at most; neighbours that are `beside` run at once: they measure no speed."""

    name: str
    seconds: int
    run: Callable[[Any, Any, float], None]
    beside: bool = False


def _environment(notes: Any, place: Any, until: float) -> None:
    import torch

    notes.fact("python", platform.python_version())
    for name in ("torch", "triton", "transformers", "numpy", "tokenizers"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            notes.fact(name, importlib.metadata.version(name))
    notes.fact("missing", [name for name in MODULES if importlib.util.find_spec(name) is None])
    if place.dry:
        notes.fact("gpu", "none: a dry run")
        return
    notes.check("torch sees a GPU", torch.cuda.is_available(), torch.__version__)
    properties = torch.cuda.get_device_properties(0)
    notes.fact("gpu", torch.cuda.get_device_name(0))
    notes.fact("compute capability", f"{properties.major}.{properties.minor}")
    notes.fact("processors", properties.multi_processor_count)
    notes.fact("memory", f"{properties.total_memory / 2**30:.0f} GiB")
    notes.fact("cuda", torch.version.cuda)


def _attention(dtype: str) -> Callable[[Any, Any, float], None]:
    def run(notes: Any, place: Any, until: float) -> None:
        import gpu_kernels

        gpu_kernels.attention(notes, place, dtype, until)

    return run


def _of_kernels(name: str) -> Callable[[Any, Any, float], None]:
    def run(notes: Any, place: Any, until: float) -> None:
        import gpu_kernels

        getattr(gpu_kernels, name)(notes, place)

    return run


def _of_engine(name: str) -> Callable[[Any, Any, float], None]:
    def run(notes: Any, place: Any, until: float) -> None:
        import gpu_engine

        getattr(gpu_engine, name)(notes, place)

    return run


def _of_speed(name: str) -> Callable[[Any, Any, float], None]:
    def run(notes: Any, place: Any, until: float) -> None:
        import gpu_speed

        getattr(gpu_speed, name)(notes, place, until)

    return run


SECTIONS = (
    Section("environment", 60, _environment),
    Section("jobs", 150, _of_speed("jobs")),
    Section("kernels: speed", 100, _of_speed("kernels")),
    Section("kernels: flash-attn", 60, _of_kernels("flash")),
    Section("engine: memory", 45, _of_engine("memory")),
    Section("engine: tokens", 200, _of_engine("tokens"), beside=True),
    Section("kernels: attention in bfloat16", 200, _attention("bfloat16"), beside=True),
    Section("kernels: attention in float16", 200, _attention("float16"), beside=True),
    Section("kernels: attention in float32", 200, _attention("float32"), beside=True),
    Section("kernels: shared keys", 200, _of_kernels("shared"), beside=True),
    Section("kernels: between", 200, _of_kernels("between"), beside=True),
    Section("kernels: sampling", 200, _of_kernels("sampling"), beside=True),
    Section("engine: errors", 200, _of_engine("errors"), beside=True),
    Section("engine: graphs", 200, _of_engine("graphs"), beside=True),
    Section("engine: shared keys", 200, _of_engine("alike"), beside=True),
    Section("engine: invariance", 200, _of_engine("invariance"), beside=True),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path, help="folder of the report")
    parser.add_argument("--dry", action="store_true", help="on the processor, interpreted, tiny")
    parser.add_argument("--only", action="append", default=[], help="sections whose names hold this")
    parser.add_argument("--section", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.section is not None:
        return _run_section(given.section, given.out, given.dry)
    chosen = [s for s in SECTIONS if not given.only or any(word in s.name for word in given.only)]
    with tempfile.TemporaryDirectory(prefix="batchgen-gpu-check-") as scratch:
        check = Check(given.out, chosen, Path(scratch), dry=given.dry)
        # Whoever ends this ends the sections, and gets the report of what was found.
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: check.stop())
        report = check.run()
    print((given.out / "report.md").read_text())
    return 1 if report["failed"] else 0


class Check:
    """Runs sections and writes the report, again and again while they run: a check that is killed has told
    what it knew.

    Args:
        out: folder of the report; `sections` in it gets what each has found and printed.
        chosen: sections, in their order.
        scratch: a folder for caches.
        dry: whether it is only seen that they run.
    """

    def __init__(self, out: Path, chosen: list[Section], scratch: Path, *, dry: bool) -> None:
        self._out, self._chosen, self._scratch, self._dry = out, chosen, scratch, dry
        self._began = time.monotonic()
        self._stopped = threading.Event()
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._endings: dict[str, dict[str, Any]] = {}
        shutil.rmtree(out / "sections", ignore_errors=True)
        (out / "sections").mkdir(parents=True)

    def run(self) -> dict[str, Any]:
        """Groups of sections one after the other; the report."""
        for _, group in itertools.groupby(self._chosen, key=lambda s: s.beside or s.name):
            sections = list(group)
            # In a dry run all share the processor.
            with ThreadPoolExecutor(1 if self._dry else len(sections)) as threads:
                waited = [threads.submit(self._run_one, section) for section in sections]
                while wait(waited, REPORT_SECONDS).not_done:
                    self._write(ended=False)
                for future in waited:
                    future.result()
        return self._write(ended=True)

    def stop(self) -> None:
        """End the sections that run, and begin no more."""
        self._stopped.set()
        for process in list(self._running.values()):
            _kill(process)

    def _run_one(self, section: Section) -> None:
        self._endings[section.name] = _ending(section, **self._how_it_ended(section))

    def _how_it_ended(self, section: Section) -> dict[str, Any]:
        """Run one section in a process."""
        left = TOTAL_SECONDS - (time.monotonic() - self._began)
        seconds = 3600 if self._dry else min(section.seconds, left)
        if self._stopped.is_set():
            return {"kind": "skipped", "reason": "the check was stopped before"}
        if seconds < LEAST_SECONDS:
            return {"kind": "skipped", "reason": f"the {TOTAL_SECONDS} s of the whole were over"}
        start = time.monotonic()
        code = self._in_process(section, seconds)
        took = f"{time.monotonic() - start:.0f} s"
        if code == 0:
            return {"kind": "check", "ok": True, "detail": took}
        whose = "its limit" if seconds == section.seconds else f"what was left of {TOTAL_SECONDS} s"
        detail = f"ended with {code} after {took}"
        if code is None:
            detail = f"cut after {took}, {whose}"
        elif self._stopped.is_set():
            detail = f"the check was stopped while it ran, after {took}"
        if code == FAILED:
            return {"kind": "check", "ok": False, "detail": detail}
        said = self._file(section, "log").read_text(errors="replace").splitlines()[-LAST_LINES:]
        return {"kind": "check", "ok": False, "detail": detail, "traceback": "\n".join(said)}

    def _in_process(self, section: Section, seconds: float) -> int | None:
        """The exit code; None if it took too long."""
        command = [sys.executable, "-X", "faulthandler", str(Path(__file__))]
        command += [str(self._file(section, "jsonl")), "--section", section.name]
        with self._file(section, "log").open("wb") as stream:
            process = subprocess.Popen(
                [*command, *(["--dry"] if self._dry else [])],
                env=_environment_of(self._scratch, seconds, dry=self._dry),
                cwd=ROOT,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._running[section.name] = process
            if self._stopped.is_set():
                _kill(process)
            try:
                return process.wait(seconds)
            except subprocess.TimeoutExpired:
                return None
            finally:
                _kill(process)
                process.wait()
                del self._running[section.name]

    def _file(self, section: Section, suffix: str) -> Path:
        number = SECTIONS.index(section)
        return (
            self._out
            / "sections"
            / f"{number:02d}-{section.name.replace(': ', '-').replace(' ', '-')}.{suffix}"
        )

    def _write(self, *, ended: bool) -> dict[str, Any]:
        """The report of what is known now."""
        report = _report(list(self._notes()), time.monotonic() - self._began, dry=self._dry, ended=ended)
        for name, text in (
            ("report.json", json.dumps(report, indent=1)),
            ("report.md", "\n".join(_markdown(report))),
        ):
            part = self._out / f"{name}.part"
            part.write_text(text + "\n")
            part.replace(self._out / name)
        return report

    def _notes(self) -> Iterator[dict[str, Any]]:
        for section in self._chosen:
            file = self._file(section, "jsonl")
            for line in file.read_text().splitlines() if file.exists() else []:
                # Of a section that is writing or was killed, the last line may be a part of one.
                with contextlib.suppress(ValueError):
                    yield json.loads(line)
            if section.name in self._endings:
                yield self._endings[section.name]
            else:
                begun = section.name in self._running
                reason = "it has not ended" if begun else "it has not begun"
                yield _ending(section, kind="skipped", reason=reason)


def _kill(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _environment_of(scratch: Path, seconds: float, *, dry: bool) -> dict[str, str]:
    """Of a section's process."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([*PATHS, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "BATCHGEN_CACHE": str(scratch / "cache"),
        "HF_HUB_OFFLINE": "1",
        "BATCHGEN_GPU_CHECK_SECONDS": str(seconds),
    }
    if dry:
        return environment | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    return environment | {"TRITON_CACHE_DIR": str(scratch / "triton")}


def _ending(section: Section, **how: Any) -> dict[str, Any]:
    return {"section": section.name, "name": "the section as a whole", **how}


def _run_section(name: str, file: Path, dry: bool) -> int:
    """In the section's own process, which does not outlive the check."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)
    import numpy as np
    import torch
    from gpu_notes import Notes, Place

    # The environment of some containers turns TF32 on, which has 10 of the 23 bits of float32.
    torch.set_float32_matmul_precision("highest")
    if dry:
        # What the interpreter computes for absent rows is not a number now and then.
        np.seterr(all="ignore")
    section = next(s for s in SECTIONS if s.name == name)
    notes = Notes(name, file)
    until = time.monotonic() + 0.8 * float(os.environ.get("BATCHGEN_GPU_CHECK_SECONDS", section.seconds))
    try:
        section.run(notes, Place(dry), until)
    except Exception as error:
        notes.crashed("runs to its end", error)
        return FAILED
    return 0


def _report(notes: list[dict[str, Any]], seconds: float, *, dry: bool, ended: bool) -> dict[str, Any]:
    kinds = {kind: [n for n in notes if n["kind"] == kind] for kind in ("check", "figure", "skipped", "fact")}
    return {
        "format": 1,
        "dry": dry,
        "ended": ended,
        "seconds": seconds,
        "failed": [n for n in kinds["check"] if not n["ok"]],
        "passed": [n for n in kinds["check"] if n["ok"]],
        "figures": kinds["figure"],
        "not_run": kinds["skipped"],
        "facts": kinds["fact"],
    }


def _markdown(report: dict[str, Any]) -> Iterator[str]:
    facts = {fact["name"]: fact["value"] for fact in report["facts"]}
    yield f"# batchgen on {facts.get('gpu', 'an unknown GPU')}"
    if not report["ended"]:
        yield "\n**The check has not ended.**"
    yield ""
    yield ", ".join(f"{name} {value}" for name, value in facts.items() if isinstance(value, str | int))
    yield ""
    missing = ", ".join(facts.get("missing", ["not looked for"])) or "nothing"
    yield f"Not installed: {missing}. It took {report['seconds']:.0f} s."
    wanted = [figure for figure in report["figures"] if figure["met"] is not None]
    met = sum(figure["met"] for figure in wanted)
    failed, passed, left_out = (len(report[key]) for key in ("failed", "passed", "not_run"))
    yield f"\n## {failed} failed, {passed} passed, {left_out} could not run"
    yield f"\n{met} of {len(wanted)} targets met\n"
    yield from _table(wanted)
    yield "\n| | section | what | |\n|---|---|---|---|"
    for word, notes in (
        ("FAILED", report["failed"]),
        ("could not run", report["not_run"]),
        ("ok", report["passed"]),
    ):
        for note in notes:
            detail = (note.get("detail") or note.get("reason") or "").replace("|", "/").replace("\n", " ")
            yield f"| {word} | {note['section']} | {note['name']} | {detail} |"
    yield "\n## All figures\n"
    yield from _table(report["figures"])
    for name in ("engine", "jobs", "kernels"):
        if name in facts:
            yield from (f"\n## {name.title()}\n", "```", *facts[name], "```")
    for note in report["failed"]:
        if note.get("traceback"):
            yield from (f"\n## {note['section']}: {note['name']}\n", "```", note["traceback"], "```")


def _table(figures: list[dict[str, Any]]) -> Iterator[str]:
    yield "| section | what | value | target | |\n|---|---|---|---|---|"
    for figure in figures:
        bounds = [f"{word} {figure[word]:g}" for word in ("least", "most") if figure[word] is not None]
        met = "" if figure["met"] is None else "met" if figure["met"] else "MISSED"
        value = f"{figure['value']:,.4g} {figure['unit']}"
        yield f"| {figure['section']} | {figure['name']} | {value} | {', '.join(bounds)} | {met} |"


if __name__ == "__main__":
    sys.path[:0] = PATHS
    sys.exit(main())
