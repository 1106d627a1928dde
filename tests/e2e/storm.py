"""Kill a real job again and again, and compare its bytes with a run that nobody disturbed; `make storm`.

Each kill is SIGKILL to the whole process group at a random moment; then the same command is run again.
Progress is kept in `build/storm/`, so that a storm that was itself stopped goes on where it was.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

ROOT = Path(__file__).resolve().parents[2]
STATE = ROOT / "build" / "storm"
LOADING_SECONDS = 3.0


def batchgen(*args: str) -> list[str]:
    return [sys.executable, "-m", "batchgen", *args]


def write_job(folder: Path, name: str, temperature: float, rows: int) -> Path:
    """The demo job with mixed lengths: problems of every length, stop strings, answers up to 80 tokens."""
    job = yaml.safe_load((ROOT / "jobs" / "demo.yaml").read_text())
    job["name"] = name
    job["model"] = str(ROOT / "build" / "SmolLM2-135M-Instruct.Q4_1.gguf")
    job["input"] |= {"path": str(ROOT / "build" / "HumanEval.jsonl.gz"), "limit": rows}
    job["sampling"] = {"temperature": temperature, "max_tokens": 80, "stop": ["\n\n"], "seed": 7}
    job["output"] = {"path": str(folder / name), "part_rows": 16}
    job["run"] = {"checkpoint_seconds": 1, "progress": "none"}
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(job))
    return path


def start(job: Path) -> subprocess.Popen[bytes]:
    with job.with_suffix(".log").open("ab") as log:
        return subprocess.Popen(batchgen("run", str(job)), stdout=log, stderr=log, start_new_session=True)


def digests(output: Path) -> dict[str, str]:
    return {p.name: hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted((output / "data").iterdir())}


def status(output: Path) -> dict[str, Any]:
    done = subprocess.run(batchgen("status", str(output), "--json"), check=True, capture_output=True)
    return json.loads(done.stdout)


def kill_group(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to the supervisor's group, and to the workers, which lead groups of their own."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for pid in (process.pid, *map(int, children)):
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.wait()


def storm(name: str, temperature: float, rows: int, kills: int, rng: random.Random) -> None:
    STATE.mkdir(parents=True, exist_ok=True)
    calm = write_job(STATE, f"{name}-calm", temperature, rows)
    if not (STATE / f"{name}-calm" / "_SUCCESS").exists():
        began = time.monotonic()
        assert start(calm).wait() == 0, calm.with_suffix(".log").read_text()
        (STATE / f"{name}-calm.seconds").write_text(str(time.monotonic() - began))
    seconds = float((STATE / f"{name}-calm.seconds").read_text())
    rough = write_job(STATE, f"{name}-rough", temperature, rows)
    record = STATE / f"{name}-kills.json"
    moments: list[float] = json.loads(record.read_text()) if record.exists() else []
    while len(moments) < kills:
        process = start(rough)
        # Spread over a share of the run, so that all kills fall before the job is done.
        moment = rng.uniform(0.0, min(seconds, LOADING_SECONDS + 3.0 * seconds / kills))
        try:
            code = process.wait(moment)
            assert code == 0, f"the run ended by itself with {code}"
            print(f"{name}: done after {len(moments)} kills; starting over for the rest")
            compare(name)
            shutil.rmtree(STATE / f"{name}-rough")
        except subprocess.TimeoutExpired:
            kill_group(process)
            moments.append(moment)
            record.write_text(json.dumps(moments))
            print(f"{name}: kill {len(moments)} of {kills} after {moment:.1f} s", flush=True)
    assert start(rough).wait() == 0, rough.with_suffix(".log").read_text()
    compare(name)


def compare(name: str) -> None:
    calm, rough = STATE / f"{name}-calm", STATE / f"{name}-rough"
    assert digests(calm) == digests(rough), "the bytes differ"
    verified = subprocess.run(batchgen("verify", str(rough)), capture_output=True, text=True)
    assert verified.returncode == 0, verified.stdout + verified.stderr
    print(f"{name}: {len(digests(calm))} parts equal to the byte; verify: {verified.stdout.strip()}")
    told = status(rough)
    kept = sum(usage["completion_tokens"] for usage in results(rough).column("usage").to_pylist())
    again = told["tokens_sampled"] - kept
    bound = sum(worker["lost_at_most"] for worker in told["workers"])
    print(
        f"{name}: {told['attempts']} attempts, {told['tokens_sampled']} tokens sampled for {kept} kept, "
        f"{again} computed again, at most {bound} were sampled after the last group commit of an attempt"
    )
    assert told["tokens_lost"] == again, told
    assert again <= bound


def results(output: Path) -> pa.Table:
    return pa.concat_tables(pq.read_table(p) for p in sorted((output / "data").iterdir()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--rows", type=int, default=164)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--fresh", action="store_true", help="forget an earlier storm")
    args = parser.parse_args()
    if args.fresh:
        shutil.rmtree(STATE, ignore_errors=True)
    print(f"seed {args.seed}")
    rng = random.Random(args.seed)
    storm("greedy", 0.0, args.rows, args.kills, rng)
    storm("sampled", 0.8, args.rows, args.kills, rng)


if __name__ == "__main__":
    main()
