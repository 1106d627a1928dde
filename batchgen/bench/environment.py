"""Where and with what figures were measured."""

from __future__ import annotations

import os
import platform
import shlex
import sys
import time
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import batchgen
from batchgen.bench.contest import FORMAT

_LIBRARIES = ("torch", "transformers", "numpy", "numba")
_INSTRUCTIONS = (
    *("amx_int8", "avx512_bf16", "avx512_vnni", "avx512f", "avx_vnni", "avx2", "fma"),
    *("sve", "i8mm", "bf16", "asimd"),
)
"""Sets that products can use, as Linux names them."""


def environment(threads: int) -> dict[str, Any]:
    """The beginning of a report: format, command, time, machine and versions."""
    facts = dict(_processor())
    return {
        "format": FORMAT,
        "command": shlex.join(["batchgen", *sys.argv[1:]]),
        "when": time.strftime("%Y-%m-%d %H:%M:%S"),
        "machine": {
            "cpu": facts.get("model name") or platform.machine(),
            "instructions": _instructions(facts.get("flags") or facts.get("Features") or ""),
            "cores": os.cpu_count() or threads,
            "threads": threads,
            "memory": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
            "system": platform.platform(),
        },
        "versions": {
            "batchgen": batchgen.__version__,
            "python": platform.python_version(),
            **{name: _version(name) for name in _LIBRARIES},
        },
    }


def _processor() -> Iterator[tuple[str, str]]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for line in text.partition("\n\n")[0].splitlines():
        name, _, value = line.partition(":")
        yield name.strip(), value.strip()


def _instructions(flags: str) -> str:
    known = set(flags.split())
    return (
        " ".join(name for name in _INSTRUCTIONS if name in known) or "no vector instructions that are known"
    )


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "not installed"
