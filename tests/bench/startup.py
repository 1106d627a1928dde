"""How long `batchgen run` takes to the first token, and `validate` to its first error; `make start`.

Each start is a process of its own on the demo job, cut to a few rows, with a warm cache. Times count from
before the process is made: until the worker is started, until it builds its engine, and until its first token
is sampled. Medians over all starts.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from batchgen.job.counters import read_counters

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 600.0
BAD_JOB = """
version: 1
model: {model}
input: {{path: {rows}, id: task_id}}
prompt: {{user: "{{{{ promt }}}}"}}
output: {{path: {out}}}
"""


def start(job: Path, out: Path) -> dict[str, float]:
    """Seconds of one start, by what was reached."""
    command = [sys.executable, "-m", "batchgen", "run", str(job), "--limit", "2"]
    command += ["--set", f"output.path={out}", "--set", "sampling.max_tokens=2", "--progress", "none"]
    began, reached = time.perf_counter(), {}
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        while "first token" not in reached:
            found = list((out / ".batchgen" / "attempts").glob("*.counters"))
            now = time.perf_counter() - began
            if now > PATIENCE or (process.poll() is not None and not found):
                sys.exit(f"no token: {process.communicate()[1]}")
            counters = read_counters(found[0]) if found else None
            if counters is not None:
                reached.setdefault("worker started", now)
                if counters.pid:
                    reached.setdefault("engine begun", now)
                if counters.sampled:
                    reached["first token"] = now
            time.sleep(0.002)
        process.communicate()
    return {**reached, "end": time.perf_counter() - began}


def validate(folder: Path) -> float:
    """Seconds of a `validate` that finds an error."""
    job = folder / "bad.yaml"
    build = ROOT / "build"
    job.write_text(
        BAD_JOB.format(
            model=build / "SmolLM2-135M-Instruct.Q4_1.gguf",
            rows=build / "HumanEval.jsonl.gz",
            out=folder / "bad",
        )
    )
    began = time.perf_counter()
    done = subprocess.run([sys.executable, "-m", "batchgen", "validate", str(job)], capture_output=True)
    assert done.returncode == 2, done.stderr.decode()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--job", type=Path, default=ROOT / "jobs" / "demo.yaml")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="batchgen-start-") as name:
        folder = Path(name)
        start(options.job, folder / "warm")
        runs = [start(options.job, folder / str(i)) for i in range(options.starts)]
        errors = [validate(folder) for _ in range(options.starts)]
    print(f"medians of {options.starts} starts, seconds (least to most):")
    measured = {what: [run[what] for run in runs] for what in runs[0]}
    for what, times in {**measured, "validate, error": errors}.items():
        print(f"  {what:<16} {statistics.median(times):6.2f}  ({min(times):.2f} to {max(times):.2f})")


if __name__ == "__main__":
    main()
