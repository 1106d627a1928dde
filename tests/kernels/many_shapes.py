"""The Triton kernels in the interpreter on many random shapes: `make kernels`.

Every random test of `interpreted/` tries as many shapes as are asked for, in rounds, and every other test
there runs once. What has passed is kept on disk under a digest of kernels and tests, so that a run that was
stopped goes on where it was, and one of changed kernels begins again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "tests" / "kernels" / "interpreted"
SOURCES = ROOT / "kernels" / "batchgen_kernels"
REST = "the rest of "


class Counts:
    """Shapes that have passed, by test.

    Args:
        path: of the record.
        digest: of what is tested; a record of something else is not used.
    """

    def __init__(self, path: Path, digest: str) -> None:
        self._path = path
        self._digest = digest
        self._lock = Lock()
        found = json.loads(path.read_text()) if path.exists() else {}
        self._passed: dict[str, int] = found.get("passed", {}) if found.get("digest") == digest else {}

    def __getitem__(self, test: str) -> int:
        return self._passed.get(test, 0)

    def add(self, test: str, shapes: int) -> None:
        """Keep that so many more have passed."""
        with self._lock:
            self._passed[test] = self[test] + shapes
            self._path.parent.mkdir(parents=True, exist_ok=True)
            written = self._path.with_suffix(".new")
            written.write_text(json.dumps({"digest": self._digest, "passed": self._passed}, indent=1))
            written.replace(self._path)


def main() -> int:
    """Run what is missing; 1 if anything failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", type=int, default=200, help="of each test and dtype")
    parser.add_argument("--round", type=int, default=40, help="shapes in one process")
    parser.add_argument("--state", type=Path, default=Path("build/kernels.json"))
    options = parser.parse_args()
    counts = Counts(options.state, _digest())
    began = time.monotonic()

    def finish(test: str) -> bool:
        wanted = 1 if test.startswith(REST) else options.shapes
        while (missing := wanted - counts[test]) > 0:
            shapes = min(missing, options.round)
            ended = _run(test, shapes)
            if ended.returncode:
                print(f"FAILED {test}\n{ended.stdout}{ended.stderr}", flush=True)
                return False
            counts.add(test, shapes)
            print(f"{time.monotonic() - began:6.0f} s  {counts[test]:4} of {wanted:3}  {test}", flush=True)
        return True

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        passed = list(pool.map(finish, _tests()))
    print(f"{sum(passed)} of {len(passed)} passed")
    return 0 if all(passed) else 1


def _tests() -> list[str]:
    """Random tests by their names, and the rest of each file, the slow files first."""
    found = _pytest("--collect-only", "-m", "hypothesis", *_files())
    random = [line for line in found.stdout.splitlines() if "::" in line]
    if found.returncode or not random:
        sys.exit(found.stdout + found.stderr)
    return [*random, *(REST + file for file in _files())]


def _files() -> list[str]:
    tested = (path for path in FOLDER.glob("triton_*.py") if "\ndef test_" in path.read_text())
    return sorted(str(path.relative_to(ROOT)) for path in tested)


def _run(test: str, shapes: int) -> subprocess.CompletedProcess[str]:
    if test.startswith(REST):
        return _pytest("-m", "not hypothesis", test.removeprefix(REST))
    return _pytest(test, shapes=shapes)


def _pytest(*arguments: str, shapes: int = 1) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--timeout",
        "7200",
        *arguments,
    ]
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "BATCHGEN_KERNELS": str(shapes),
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def _digest() -> str:
    sources = [*SOURCES.glob("*.py"), *SOURCES.glob("triton_kernels/*.py"), *FOLDER.glob("*.py")]
    return hashlib.sha256(b"".join(path.read_bytes() for path in sorted(sources))).hexdigest()


if __name__ == "__main__":
    sys.exit(main())
