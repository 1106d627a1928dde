"""Kill a job with the fake engine again and again, and compare its bytes with a run that nobody disturbed.

A kill is SIGKILL at a random moment to the whole job, to the supervisor alone, or to one worker alone; then
the same command is run again, unless the supervisor lives and goes on by itself. `make storm-fake`. What was
killed is kept in the state folder, so that a storm that was itself stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import yaml

TESTS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(TESTS))

from fake_engine import save_model

MODES = ("job", "supervisor", "worker")
COMPUTED_BEFORE_A_KILL = (0.0, 3.0)
BEHAVIOUR = {"tokens_per_step": 4, "step_seconds": 0.002}


class Storm:
    """One job under one number of workers.

    Args:
        folder: of the state.
        rows: of the input.
        workers: engine processes.
        rng: decides when and what is killed.
    """

    def __init__(self, folder: Path, rows: int, workers: int, rng: random.Random) -> None:
        self.folder = folder
        self.rows = rows
        self.workers = workers
        self.rng = rng
        self.record = folder / "kills.json"
        folder.mkdir(parents=True, exist_ok=True)
        self.kills: list[str] = json.loads(self.record.read_text()) if self.record.exists() else []
        self.rounds = 0
        self._write_input()

    def _write_input(self) -> None:
        save_model(self.folder / "model")
        path = self.folder / f"in-{self.rows}.jsonl"
        if path.exists():
            return
        with path.open("w") as file:
            for row in range(self.rows):
                ids = [(row * 31 + k * k) % 60_000 for k in range(4 + row % 9)]
                bad = "{broken\n" if row % 97 == 96 else None
                file.write(bad or json.dumps({"id": f"r{row}", "prompt_token_ids": ids, "n": row}) + "\n")

    def job(self, name: str, workers: int) -> Path:
        job: dict[str, Any] = {
            "model": str(self.folder / "model"),
            "input": {"path": str(self.folder / f"in-{self.rows}.jsonl")},
            "prompt": {"mode": "tokens"},
            "sampling": {"max_tokens": 60, "seed": 5},
            "output": {"path": str(self.folder / name), "part_rows": 200, "compression": "none"},
            "engine": {"max_num_seqs": 64},
            "run": {
                "checkpoint_seconds": 0.3,
                "progress": "none",
                "workers": workers,
                "min_free_disk": "1MB",
            },
        }
        path = self.folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(job))
        return path

    def start(self, job: Path) -> subprocess.Popen[bytes]:
        path = os.pathsep.join(map(str, (TESTS.parent, TESTS.parent / "kernels", TESTS)))
        environment = {**os.environ, "BATCHGEN_FAKE_ENGINE": json.dumps(BEHAVIOUR), "PYTHONPATH": path}
        with job.with_suffix(".log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, str(TESTS / "fake_batchgen.py"), "run", str(job)],
                stdout=log,
                stderr=log,
                env=environment,
                start_new_session=True,
            )

    def calm(self) -> dict[str, str]:
        job = self.job("calm", 1)
        if not (self.folder / "calm/_SUCCESS").exists():
            assert self.start(job).wait() == 0, job.with_suffix(".log").read_text()
        return digests(self.folder / "calm")

    def run(self, kills: int) -> None:
        expected = self.calm()
        job = self.job("rough", self.workers)
        while len(self.kills) < kills:
            process = self.start(job)
            while process.poll() is None and len(self.kills) < kills:
                if self._wait(process) and self._strike(process):
                    break
            if process.wait() == 0:
                self.compare(expected)
                shutil.rmtree(self.folder / "rough")
        assert self.start(job).wait() == 0, job.with_suffix(".log").read_text()
        self.compare(expected)

    def _wait(self, process: subprocess.Popen[bytes]) -> bool:
        """Let it run for a random time; whether it still does."""
        try:
            code = process.wait(self.rng.uniform(*COMPUTED_BEFORE_A_KILL))
        except subprocess.TimeoutExpired:
            return True
        assert code == 0, f"the run ended by itself with {code}: {self.folder / 'rough.log'}"
        return False

    def _strike(self, process: subprocess.Popen[bytes]) -> bool:
        """Kill; whether the supervisor is dead now."""
        mode = self.rng.choice(MODES)
        workers = children(process.pid)
        if mode == "worker":
            while not workers and process.poll() is None:
                time.sleep(0.02)
                workers = children(process.pid)
            if not workers:
                return False
            kill(self.rng.choice(workers))
        if mode in ("job", "supervisor"):
            kill(process.pid)
        if mode == "job":
            for pid in workers:
                kill(pid)
        self.kills.append(mode)
        self.record.write_text(json.dumps(self.kills))
        if mode == "worker":
            return False
        process.wait()
        return True

    def compare(self, expected: dict[str, str]) -> None:
        self.rounds += 1
        rows = Counter(rows_of(self.folder / "rough"))
        lost = [row for row in range(self.rows) if row not in rows]
        twice = [row for row, count in rows.items() if count > 1]
        assert not lost, f"lost rows: {lost[:10]}"
        assert not twice, f"rows that are there twice: {twice[:10]}"
        assert digests(self.folder / "rough") == expected, "the bytes differ"
        kinds = Counter(self.kills)
        print(
            f"{self.workers} workers, {self.rows:,} rows, after {len(self.kills)} kills "
            f"({', '.join(f'{kinds[mode]} of the {mode}' for mode in MODES)}): "
            f"{len(expected)} parts equal to the byte, 0 rows lost, 0 twice",
            flush=True,
        )


def digests(output: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted((output / "data").iterdir())}


def rows_of(output: Path) -> list[int]:
    import pyarrow.parquet as pq

    found: list[int] = []
    for path in sorted((output / "data").iterdir()):
        found += pq.read_table(path, columns=["row"]).column("row").to_pylist()
    return found


def children(pid: int) -> list[int]:
    with contextlib.suppress(OSError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=40, help="for each number of workers, half of it")
    parser.add_argument("--rows", type=int, default=4_000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--state", type=Path, default=TESTS.parent / "build/storm-fake")
    parser.add_argument("--fresh", action="store_true", help="forget an earlier storm")
    args = parser.parse_args()
    if args.fresh:
        shutil.rmtree(args.state, ignore_errors=True)
    print(f"seed {args.seed}", flush=True)
    for workers in (1, 3):
        storm = Storm(args.state / str(workers), args.rows, workers, random.Random(args.seed + workers))
        storm.run(args.kills // 2)


if __name__ == "__main__":
    main()
