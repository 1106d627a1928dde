"""An engine for tests of `bench`, run by `peers/harness.py`: does what its options say."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import batchgen.bench.peers

sys.path.insert(0, str(Path(batchgen.bench.peers.__file__).parent))

import harness


class Told(Exception):
    """As batchgen's own errors."""

    exit_code = 2


class Fake:
    version = "fake 1"

    def __init__(self, task: harness.Task) -> None:
        self._options = options = task.options
        with open(options["log"], "a") as log:
            log.write(f"{options['name']} {task.threads} {os.environ.get('FAKE', '')}\n")
        print("what a library prints")
        if options.get("do") == "die":
            print("Illegal instruction", file=sys.stderr)
            sys.stderr.flush()
            os._exit(3)
        if options.get("do") == "fail":
            raise RuntimeError("no such kernel")
        if options.get("do") == "tell":
            raise Told("engine.block_size: 7 is not a multiple of 8")
        if options.get("do") == "hang":
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            Path(options["pid"]).write_text(str(child.pid))
            time.sleep(600)

    def generate(self, rows: list[harness.Row]) -> list[list[int]]:
        time.sleep(self._options.get("sleep", 0))
        less = 1 if self._options.get("do") == "less" else 0
        return [[5, 6, 7, 8, 9][: row["max_new_tokens"] - less] for row in rows]

    def negative_logprob(self, windows: list[list[int]]) -> tuple[float, int]:
        return 2.0, 2


if __name__ == "__main__":
    harness.main(Fake)
