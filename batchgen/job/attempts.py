"""`.batchgen/attempts/NNNN.json`: one record for each time the job ran, and its latest progress beside it."""

from __future__ import annotations

import contextlib
import json
import os
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import batchgen
from batchgen.job.changes import host_name, now_text
from batchgen.job.files import atomic_write
from batchgen.job.folder import JobFolder

_PACKAGES = ("torch", "transformers", "pyarrow", "msgpack", "zstandard", "numpy")
RUNNING = "running"


def versions() -> dict[str, str]:
    """Of batchgen, Python and the packages that decide bytes, without importing them."""
    found = {"batchgen": batchgen.__version__, "python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found


@dataclass(slots=True)
class Attempt:
    """One run of the job; its number is the epoch that it claimed.

    Args:
        reason: why it ended; "running" until it has.
        exit_code: of the process; None until it has ended.
        counters: rows and tokens, when it ended.
        change: number of the change of the job under which rows were computed; 0 for the job as it began.
        workers: one entry for each worker process that was started.
        devices: that it ran on at a time.
        gpu_hour: what an hour of one costs; None where the job does not say.
        gates: `run.gates`.
    """

    number: int
    host: str = field(default_factory=host_name)
    pid: int = field(default_factory=os.getpid)
    versions: Mapping[str, str] = field(default_factory=versions)
    facts: Mapping[str, Any] = field(default_factory=dict)
    start: str = field(default_factory=now_text)
    end: str | None = None
    change: int = 0
    reason: str = RUNNING
    exit_code: int | None = None
    error: str | None = None
    counters: dict[str, Any] = field(default_factory=dict)
    workers: list[dict[str, Any]] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)
    devices: int = 1
    gpu_hour: float | None = None
    gates: dict[str, str] = field(default_factory=dict)

    def save(self, folder: JobFolder) -> None:
        """Replace the record. Raises StorageError."""
        atomic_write(attempt_file(folder, self.number, "json"), json.dumps(asdict(self), indent=1).encode())

    def finish(self, folder: JobFolder, reason: str, exit_code: int, error: str | None = None) -> None:
        """Record the end. Raises StorageError."""
        self.end, self.reason, self.exit_code, self.error = now_text(), reason, exit_code, error
        self.save(folder)


def attempt_file(folder: JobFolder, number: int, suffix: str) -> Path:
    """`NNNN.json`, `NNNN.progress.json`, `NNNN.worker-K.log` or `NNNN.worker-K.counters`."""
    return folder.attempts / f"{number:04d}.{suffix}"


def read_attempt(folder: JobFolder, number: int) -> Attempt | None:
    """One record; None where it is missing or unreadable."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return Attempt(**json.loads(attempt_file(folder, number, "json").read_bytes()))
    return None


def read_attempts(folder: JobFolder) -> Iterator[Attempt]:
    """Records of all attempts, oldest first; unreadable ones are left out."""
    for path in sorted(folder.attempts.glob("*.json")):
        if path.suffixes == [".json"]:
            with contextlib.suppress(OSError, ValueError, TypeError):
                yield Attempt(**json.loads(path.read_bytes()))
