"""A folder with a job over given bytes, run by the command line with the fake engine; for the hard cases."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

from fake_engine import VARIABLE, launcher

from batchgen.cli.main import main

Rows = list[dict[str, Any]]
Behaviour = Mapping[str, Any]
"""Arguments of `fake_engine.Behaviour`."""
PROGRAM = Path(__file__).parents[1] / "fake_batchgen.py"


class Place:
    """A folder with a job whose input is given as bytes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.output = folder / "out"
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text('{"model_type": "llama"}')
        (folder / "model" / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")

    def write(self, data: bytes, name: str = "in.jsonl", **keys: Any) -> str:
        """The job file over these bytes."""
        (self.folder / name).write_bytes(data)
        job = {
            "model": "model/",
            "input": {"path": name, **keys.pop("input", {})},
            "output": {
                "path": "out/",
                "format": "jsonl",
                "compression": "none",
                **keys.pop("output", {}),
            },
            "prompt": {"mode": "completion", **keys.pop("prompt", {})},
            "sampling": {"max_tokens": 4, **keys.pop("sampling", {})},
            "run": {"progress": "none", "min_free_disk": 0, **keys.pop("run", {})},
            **keys,
        }
        path = self.folder / "job.yaml"
        path.write_text(json.dumps(job))
        return str(path)

    def run(self, data: bytes, name: str = "in.jsonl", code: int = 0, **keys: Any) -> Rows:
        """Run the job; its rows, in order."""
        self.call(["run", self.write(data, name, **keys)], code)
        return self.rows()

    def rows(self) -> Rows:
        """Those of the complete output."""
        self.call(["verify", str(self.output)], 0)
        lines = [line for part in sorted((self.output / "data").iterdir()) for line in self.lines(part)]
        return [json.loads(line, parse_constant=_refuse) for line in lines]

    def refuse(self, verb: str, data: bytes, code: int, name: str = "in.jsonl", **keys: Any) -> str:
        """What is said when a verb ends with a code."""
        return self.call([verb, self.write(data, name, **keys)], code)

    def call(self, arguments: list[str], code: int, worker: Behaviour | None = None) -> str:
        """What a command line says, which must end with a code."""
        said = io.StringIO()
        with redirect_stdout(said), redirect_stderr(said):
            found = main(arguments, launch=launcher(worker))
        assert found == code, said.getvalue()
        return said.getvalue()

    def start(self, job: str, worker: Behaviour) -> subprocess.Popen[str]:
        """`batchgen run` as a process of its own, which says everything on one pipe."""
        path = os.pathsep.join(filter(None, sys.path))
        return subprocess.Popen(
            [sys.executable, str(PROGRAM), "run", job],
            env={**os.environ, VARIABLE: json.dumps(worker), "PYTHONPATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    @staticmethod
    def lines(part: Path) -> list[bytes]:
        """The records of a part: what ends with a newline, nothing else ends one."""
        data = part.read_bytes()
        assert not data or data.endswith(b"\n")
        return data.split(b"\n")[:-1]


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def lines(*rows: Any) -> bytes:
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)
