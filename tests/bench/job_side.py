"""What the job side costs: rows/s, CPU time a row by stage, and whether memory grows; `make job-side`.

A whole job with the fake engine, which costs next to nothing: JSONL with an id and token ids, short answers,
JSONL out. Figures are of CPU time, so that a busy machine changes them little; rows/s is by the clock.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import yaml

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels"), str(ROOT / "tests")]

from fake_engine import launcher, save_model

from batchgen.cli.main import main as batchgen
from batchgen.dist.channel import Channel
from batchgen.dist.handle import WorkerHandle
from batchgen.job.assembly import Assembler
from batchgen.job.pool import RowPool
from batchgen.job.supervisor import Supervisor
from batchgen.models.source import find_tokenizer

STAGES: dict[str, tuple[Any, str]] = {
    "read, pack, order": (RowPool, "fill"),
    "send": (WorkerHandle, "send"),
    "receive": (Channel, "receive"),
    "results": (Supervisor, "_receive"),
    "commit": (Supervisor, "_commit"),
    "assemble": (Assembler, "write"),
}


class Clock:
    """CPU seconds by stage; a stage inside another counts for itself alone."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inner = threading.local()

    def watch(self, stage: str, owner: Any, name: str) -> None:
        real: Callable[..., Any] = getattr(owner, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            outer = getattr(self._inner, "seconds", 0.0)
            self._inner.seconds = 0.0
            began = time.thread_time()
            try:
                return real(*args, **kwargs)
            finally:
                spent = time.thread_time() - began
                self.seconds[stage] += spent - self._inner.seconds
                self._inner.seconds = outer + spent

        setattr(owner, name, timed)


class Memory:
    """Resident bytes of this process and its children, sampled over the run."""

    def __init__(self) -> None:
        self.samples: list[int] = []
        self._stop = threading.Event()
        threading.Thread(target=self._sample, daemon=True).start()

    def _sample(self) -> None:
        me = psutil.Process()
        while not self._stop.wait(0.25):
            self.samples.append(me.memory_info().rss)

    def growth(self) -> tuple[int, int]:
        """The most in the second quarter of the run, and in the last."""
        self._stop.set()
        quarter = max(1, len(self.samples) // 4)
        return max(self.samples[quarter : 2 * quarter], default=0), max(self.samples[-quarter:], default=0)


def save_tokenizer(folder: Path) -> None:
    """The real model's tokenizer and template, for a fake engine."""
    source = find_tokenizer(str(ROOT / "build/SmolLM2-135M-Instruct.Q4_1.gguf")).tokenizer_folder()
    for path in (*source.glob("*token*"), *source.glob("*.jinja")):
        shutil.copy(path, folder)


def write_job(folder: Path, rows: int, prompt: int, *, chat: bool) -> Path:
    save_model(folder / "model")
    if chat:
        save_tokenizer(folder / "model")
    with (folder / "in.jsonl").open("w") as file:
        for row in range(rows):
            ids = [(row * 7 + k) % 60_000 for k in range(prompt)]
            words = {"prompt": " ".join(f"word{i}" for i in ids)} if chat else {"prompt_token_ids": ids}
            file.write(json.dumps({"id": f"r{row}"} | words) + "\n")
    job = {
        "model": str(folder / "model"),
        "input": {"path": str(folder / "in.jsonl"), "id": "id"},
        "prompt": {"mode": "chat" if chat else "tokens"},
        "sampling": {"max_tokens": 8},
        "output": {"path": str(folder / "out"), "format": "jsonl", "compression": "none"},
        "run": {"min_free_disk": "1MB", "progress": "none", "order": "input"},
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    return folder / "job.yaml"


def cpu_seconds() -> tuple[float, float]:
    """Of this process, and of its children that have ended."""
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime, children.ru_utime + children.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--prompt", type=int, default=16, help="token ids in a prompt, or words")
    parser.add_argument("--chat", action="store_true", help="texts, with the real tokenizer and template")
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="batchgen-job-side-"))
    try:
        measure(folder, args.rows, args.prompt, chat=args.chat)
    finally:
        shutil.rmtree(folder)


def measure(folder: Path, rows: int, prompt: int, *, chat: bool) -> None:
    job = write_job(folder, rows, prompt, chat=chat)
    clock = Clock()
    for stage, (owner, name) in STAGES.items():
        clock.watch(stage, owner, name)
    memory, before, began = Memory(), cpu_seconds(), time.monotonic()
    code = batchgen(["run", str(job)], launch=launcher({}))
    elapsed, after = time.monotonic() - began, cpu_seconds()
    assert code == 0, code
    early, late = memory.growth()
    print(f"python {platform.python_version()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    what = f"{rows:,} rows of {prompt} {'words' if chat else 'ids'}"
    print(f"{what} in {elapsed:.1f} s: {rows / elapsed:,.0f} rows/s")
    own, worker = (1e6 * (b - a) / rows for a, b in zip(before, after, strict=True))
    stages = {stage: 1e6 * seconds / rows for stage, seconds in clock.seconds.items()}
    for stage, micros in (*stages.items(), ("the rest, and starting", own - sum(stages.values()))):
        print(f"  {stage:24} {micros:7.1f} µs/row")
    print(f"  {'supervisor, all':24} {own:7.1f} µs/row")
    print(f"  {'worker, all':24} {worker:7.1f} µs/row")
    print(
        f"resident memory of the supervisor: {early / 2**20:.0f} MiB early, {late / 2**20:.0f} MiB at the end"
    )


if __name__ == "__main__":
    main()
