"""Resident memory of supervisor and worker at row 1,000 and at the end of a long input; `make memory`.

20,000 short prompts, one token each, on the real model.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

import psutil
import yaml

ROOT = Path(__file__).resolve().parents[2]
STATE = ROOT / "build" / "memory"


def write_job(rows: int, model: str) -> Path:
    STATE.mkdir(parents=True, exist_ok=True)
    with (STATE / "rows.jsonl").open("w") as f:
        for i in range(rows):
            f.write(json.dumps({"prompt": f"The number {i} is", "note": f"row {i}"}) + "\n")
    job = {
        "model": model,
        "input": {"path": str(STATE / "rows.jsonl")},
        "prompt": {"mode": "completion"},
        "sampling": {"max_tokens": 1, "temperature": 0.0},
        "output": {"path": str(STATE / "out")},
        "run": {"progress": "json"},
    }
    (STATE / "job.yaml").write_text(yaml.safe_dump(job))
    return STATE / "job.yaml"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--first", type=int, default=1_000)
    parser.add_argument("--model", default=str(ROOT / "build" / "SmolLM2-135M-Instruct.Q4_1.gguf"))
    args = parser.parse_args()
    job = write_job(args.rows, args.model)
    process = subprocess.Popen(
        [sys.executable, "-m", "batchgen", "run", str(job), "--overwrite"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    supervisor = psutil.Process(process.pid)
    samples: list[tuple[int, int, int]] = []
    for line in process.stdout:
        try:
            done = json.loads(line)["rows_done"]
        except (ValueError, KeyError, TypeError):
            print(line, end="")
            continue
        try:
            worker = sum(c.memory_info().rss for c in supervisor.children())
            samples.append((done, supervisor.memory_info().rss, worker))
        except psutil.Error:
            break
    code = process.wait()
    for done in range(args.first, args.rows, args.rows // 10):
        row, supervisor_bytes, worker_bytes = next(s for s in samples if s[0] >= done)
        print(f"row {row:>9,}: {supervisor_bytes / 2**20:8.1f} MiB {worker_bytes / 2**20:8.1f} MiB")
    early = next(s for s in samples if s[0] >= args.first)
    late = [s for s in samples if s[2]][-1]
    for name, i in (("supervisor", 1), ("worker", 2)):
        growth = late[i] / early[i] - 1
        print(
            f"{name}: {early[i] / 2**20:.1f} MiB at row {early[0]}, "
            f"{late[i] / 2**20:.1f} MiB at row {late[0]} ({growth:+.1%})"
        )
    print(f"exit code {code}, {time.strftime('%F %T')}")


if __name__ == "__main__":
    main()
