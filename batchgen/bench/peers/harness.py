"""One measured run in one process: load, warm up, generate once, print one line of JSON.

Runs under the Python of the engine that is measured, so it needs the standard library alone. A run in a
process of its own begins with cold caches of prefixes and with memory that nobody has cut up.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

Row = dict[str, Any]
"""`prompt_ids` and `max_new_tokens`."""


@dataclass(frozen=True)
class Task:
    """What is to be run.

    Args:
        rows: that will be measured.
        threads: to compute with.
        model: file or folder; empty where `options` say it.
        options: of the engine.
    """

    rows: list[Row]
    threads: int
    model: str
    options: dict[str, Any]


class Contestant(Protocol):
    """An engine with its model loaded.

    It may also have `negative_logprob(windows)`, sum and number of the tokens that were scored, and
    `details()` of the latest pass.
    """

    version: str

    def generate(self, rows: list[Row]) -> list[list[int]]:
        """Greedy output of each row, of exactly the length it asks for."""


Load = Callable[[Task], Contestant]


def main(load: Load | None = None) -> None:
    """Measure what the command line says; `load` is that of a module it names, unless it is given."""
    parser = argparse.ArgumentParser(description=__doc__)
    if load is None:
        parser.add_argument("module")
    parser.add_argument("--rows", type=Path, required=True, help="JSON: what is measured")
    parser.add_argument("--warmup", type=Path, required=True, help="JSON: rows to warm up with")
    parser.add_argument("--windows", type=Path, help="JSON: token ids of texts to score")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--model", default="")
    parser.add_argument("--options", type=json.loads, default={})
    args = parser.parse_args()
    # Whatever libraries print goes to standard error, so that the result is alone.
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    task = Task(json.loads(args.rows.read_text()), args.threads, args.model, args.options)
    windows = json.loads(args.windows.read_text()) if args.windows else None
    warmup = json.loads(args.warmup.read_text())
    try:
        result = measure(load or importlib.import_module(args.module).load, task, warmup, windows)
    except Exception as error:
        traceback.print_exc()
        said = getattr(error, "exit_code", None)
        message = str(error) if said is not None else f"{type(error).__name__}: {error}"
        result = {"error": message, "exit_code": said}
    out.write(json.dumps(result) + "\n")
    out.flush()
    sys.stderr.flush()
    # Threads of some engines end in errors when an interpreter is taken down.
    os._exit(0)


def measure(load: Load, task: Task, warmup: list[Row], windows: list[list[int]] | None) -> dict[str, Any]:
    """Run once.

    Returns:
        `version`, `load_seconds`, `seconds` of generating, `outputs`, `peak_memory` in bytes, and what the
        processors did meanwhile for others (`others_seconds`, None where the system does not say).
    """
    began = time.perf_counter()
    contestant = load(task)
    load_seconds = time.perf_counter() - began
    contestant.generate(warmup)
    before, began = _others(), time.perf_counter()
    outputs = contestant.generate(task.rows)
    seconds = time.perf_counter() - began
    after = _others()
    result = {
        "version": contestant.version,
        "load_seconds": load_seconds,
        "seconds": seconds,
        "others_seconds": None if before is None or after is None else max(0.0, after - before),
        "peak_memory": 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss,
        "outputs": outputs,
    }
    details = getattr(contestant, "details", None)
    if details is not None:
        result["details"] = details()
    score = getattr(contestant, "negative_logprob", None)
    if windows is not None and score is not None:
        result["negative_logprob"] = score(windows)
    return result


def _others() -> float | None:
    """Seconds that the processors were busy since the start of the machine, but for this process."""
    try:
        with open("/proc/stat", encoding="ascii") as stat:
            user, nice, system, _, _, irq, softirq, steal = map(int, stat.readline().split()[1:9])
    except (OSError, ValueError):
        return None
    busy = (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return busy - sum(usage.ru_utime + usage.ru_stime for usage in used)


if __name__ == "__main__":
    main()
