"""A job of millions of rows with the fake engine: memory as rows go by, and how soon a killed one goes on.

`make scale ROWS=10000000`. The job is killed when 99 % of the rows are done and started again. Resident
memory is the supervisor's. A restart ends with the first row that was not done before.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow.parquet as pq
import yaml

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS.parent / "kernels"), str(TESTS)]

from fake_engine import save_model

KILLED_AT = 0.99
POINTS = 10
"""Times that memory is printed."""


def write_job(folder: Path, rows: int, prompt: int) -> Path:
    save_model(folder / "model")
    with (folder / "in.jsonl").open("w") as file:
        for row in range(rows):
            ids = [(row * 7 + k) % 60_000 for k in range(prompt)]
            file.write(json.dumps({"id": f"r{row}", "prompt_token_ids": ids}) + "\n")
    job = {
        "model": str(folder / "model"),
        "input": {"path": str(folder / "in.jsonl"), "id": "id"},
        "prompt": {"mode": "tokens"},
        "sampling": {"max_tokens": 8},
        "output": {"path": str(folder / "out")},
        "run": {"min_free_disk": "1MB", "progress": "none", "order": "input"},
    }
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


class Run:
    """One attempt in a process of its own."""

    def __init__(self, job: Path) -> None:
        path = os.pathsep.join(sys.path[:3])
        self.began = time.monotonic()
        self.attempts = job.parent / "out/.batchgen/attempts"
        self._earlier = set(self.attempts.glob("*.progress.json"))
        self._log = job.with_suffix(".log")
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(TESTS / "fake_batchgen.py"), "run", str(job)],
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": path},
                start_new_session=True,
            )
        self._memory = psutil.Process(self._process.pid)

    def watch(self) -> Iterator[dict[str, Any]]:
        """Progress now and then, with `rss` in bytes, until the attempt ends."""
        while self._process.poll() is None:
            time.sleep(0.2)
            for path in set(self.attempts.glob("*.progress.json")) - self._earlier:
                # It is read while it may be written.
                with contextlib.suppress(ValueError):
                    yield {**json.loads(path.read_bytes()), "rss": self._memory.memory_info().rss}

    def kill(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def end(self) -> float:
        """Seconds that it took."""
        assert self._process.wait() == 0, self._log.read_text()[-2000:]
        return time.monotonic() - self.began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--prompt", type=int, default=16, help="token ids in a prompt")
    parser.add_argument("--state", type=Path, default=TESTS.parent / "build/scale")
    args = parser.parse_args()
    shutil.rmtree(args.state, ignore_errors=True)
    args.state.mkdir(parents=True)
    job = write_job(args.state, args.rows, args.prompt)
    print(f"{args.rows:,} rows, {(args.state / 'in.jsonl').stat().st_size / 2**30:.2f} GiB of JSONL")
    first = Run(job)
    shown = 0.0
    for seen in first.watch():
        done = seen["rows_done"] / args.rows
        if done >= shown:
            print(f"{seen['rows_done']:>12,} rows done: {seen['rss'] / 2**20:,.0f} MiB resident", flush=True)
            shown = done + 1 / POINTS
        if done >= KILLED_AT:
            break
    seconds = time.monotonic() - first.began
    first.kill()
    print(f"killed after {seconds:.0f} s, {seen['rows_done'] / seconds:,.0f} rows/s")
    second = Run(job)
    going_on = None
    for seen in second.watch():
        if going_on is None and seen["rows_done"] > seen["rows_before"]:
            going_on = time.monotonic() - second.began
    took = second.end()
    print(f"restart: the first new row after {going_on or took:.1f} s, everything after {took:.1f} s")
    rows = sum(pq.read_metadata(part).num_rows for part in (args.state / "out/data").iterdir())
    assert rows == args.rows, f"{rows:,} rows in the parts"
    print(f"{rows:,} rows in the parts")


if __name__ == "__main__":
    main()
