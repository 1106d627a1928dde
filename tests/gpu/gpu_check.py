"""Prove and measure everything that needs a GPU, in under ten minutes: `python tests/gpu/gpu_check.py OUT`.

It needs the source tree, torch, triton and transformers: no installation, network, weights or test tools.
Each section is a process of its own with a time limit, so that one that fails, hangs or breaks the context of
the GPU ends alone. OUT gets `report.json`, `report.md` and `log.txt`. The exit code is 1 if anything failed.
`--dry` runs the same code on the processor with interpreted kernels and tiny sizes, where times mean nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib.metadata
import importlib.util
import itertools
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
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

        getattr(gpu_speed, name)(notes, place)

    return run


SECTIONS = (
    Section("environment", 60, _environment),
    Section("engine: tokens", 110, _of_engine("tokens")),
    Section("jobs", 150, _of_speed("jobs")),
    Section("kernels: speed", 100, _of_speed("kernels")),
    Section("engine: memory", 45, _of_engine("memory")),
    Section("kernels: attention in bfloat16", 140, _attention("bfloat16"), beside=True),
    Section("kernels: attention in float16", 140, _attention("float16"), beside=True),
    Section("kernels: attention in float32", 140, _attention("float32"), beside=True),
    Section("kernels: between", 140, _of_kernels("between"), beside=True),
    Section("kernels: sampling", 140, _of_kernels("sampling"), beside=True),
    Section("engine: errors", 140, _of_engine("errors"), beside=True),
    Section("engine: graphs", 140, _of_engine("graphs"), beside=True),
    Section("engine: invariance", 140, _of_engine("invariance"), beside=True),
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
    given.out.mkdir(parents=True, exist_ok=True)
    chosen = [s for s in SECTIONS if not given.only or any(word in s.name for word in given.only)]
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="batchgen-gpu-check-") as scratch:
        notes = list(_run_all(chosen, given, Path(scratch), began))
    report = _report(notes, time.monotonic() - began, dry=given.dry)
    (given.out / "report.json").write_text(json.dumps(report, indent=1) + "\n")
    text = "\n".join(_markdown(report)) + "\n"
    (given.out / "report.md").write_text(text)
    print(text)
    return 1 if report["failed"] else 0


def _run_all(
    chosen: list[Section], given: argparse.Namespace, scratch: Path, began: float
) -> Iterator[dict[str, Any]]:
    """Run sections, groups of them one after the other; the notes of each, and how it ended."""
    (given.out / "log.txt").write_text("")
    for number, (_, group) in enumerate(itertools.groupby(chosen, key=lambda s: s.beside or s.name)):
        sections = list(group)
        left = TOTAL_SECONDS - (time.monotonic() - began)
        # In a dry run all share the processor.
        with ThreadPoolExecutor(1 if given.dry else len(sections)) as threads:
            files = [scratch / f"{number}-{i}.jsonl" for i in range(len(sections))]
            run = functools.partial(_run_one, dry=given.dry, left=left, scratch=scratch)
            for section, file, ending in zip(sections, files, threads.map(run, sections, files), strict=True):
                if file.exists():
                    yield from (json.loads(line) for line in file.read_text().splitlines())
                yield ending
                with (given.out / "log.txt").open("ab") as log:
                    log.write(f"\n===== {section.name}\n".encode())
                    if file.with_suffix(".log").exists():
                        log.write(file.with_suffix(".log").read_bytes())


def _run_one(section: Section, file: Path, *, dry: bool, left: float, scratch: Path) -> dict[str, Any]:
    """Run one section in a process; how it ended."""
    seconds = 3600 if dry else min(section.seconds, left)
    if seconds < 10:
        return _ending(section, "skipped", reason="the ten minutes are over")
    start = time.monotonic()
    ended = _in_process(section, file, dry, seconds, scratch)
    took = f"{time.monotonic() - start:.0f} s"
    if ended is None:
        return _ending(section, "check", ok=False, detail=f"stopped after {took}, its limit; see log.txt")
    detail = took if ended == 0 else f"ended with {ended} after {took}; see log.txt"
    return _ending(section, "check", ok=ended == 0, detail=detail)


def _ending(section: Section, kind: str, **more: Any) -> dict[str, Any]:
    return {"section": section.name, "kind": kind, "name": "the section as a whole", **more}


def _in_process(section: Section, file: Path, dry: bool, seconds: float, scratch: Path) -> int | None:
    """The exit code; None if it took too long."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([*PATHS, *filter(None, [os.environ.get("PYTHONPATH")])]),
        "BATCHGEN_CACHE": str(scratch / "cache"),
        "HF_HUB_OFFLINE": "1",
        "BATCHGEN_GPU_CHECK_SECONDS": str(seconds),
    }
    if dry:
        environment |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    else:
        environment |= {"TRITON_CACHE_DIR": str(scratch / "triton")}
    command = [
        sys.executable,
        "-X",
        "faulthandler",
        str(Path(__file__)),
        str(file),
        "--section",
        section.name,
    ]
    with file.with_suffix(".log").open("wb") as stream:
        process = subprocess.Popen(
            [*command, *(["--dry"] if dry else [])],
            env=environment,
            cwd=ROOT,
            stdout=stream,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _run_section(name: str, file: Path, dry: bool) -> int:
    """In the section's own process."""
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
        traceback.print_exc()
        notes.check("runs to its end", False, f"{type(error).__name__}: {error}"[:800])
        return 1
    return 0


def _report(notes: list[dict[str, Any]], seconds: float, *, dry: bool) -> dict[str, Any]:
    kinds = {kind: [n for n in notes if n["kind"] == kind] for kind in ("check", "figure", "skipped", "fact")}
    return {
        "format": 1,
        "dry": dry,
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
    yield ""
    yield ", ".join(f"{name} {value}" for name, value in facts.items() if isinstance(value, str | int))
    yield ""
    missing = ", ".join(facts.get("missing", [])) or "nothing"
    yield f"Not installed: {missing}. It took {report['seconds']:.0f} s."
    failed, passed, left_out = (len(report[key]) for key in ("failed", "passed", "not_run"))
    yield f"\n## {failed} failed, {passed} passed, {left_out} not run\n"
    yield "| | section | what | |\n|---|---|---|---|"
    for word, notes in (
        ("FAILED", report["failed"]),
        ("not run", report["not_run"]),
        ("ok", report["passed"]),
    ):
        for note in notes:
            detail = (note.get("detail") or note.get("reason") or "").replace("|", "/").replace("\n", " ")
            yield f"| {word} | {note['section']} | {note['name']} | {detail} |"
    yield "\n## Figures\n\n| section | what | value | target |\n|---|---|---|---|"
    for figure in report["figures"]:
        target = figure["target"]
        met = "" if target is None else f"{target:g}: {'met' if figure['value'] >= target else 'MISSED'}"
        yield f"| {figure['section']} | {figure['name']} | {figure['value']:,.4g} {figure['unit']} | {met} |"
    for name in ("engine", "kernels"):
        if name in facts:
            yield from (f"\n## {name.title()}\n", "```", *facts[name], "```")


if __name__ == "__main__":
    sys.path[:0] = PATHS
    sys.exit(main())
