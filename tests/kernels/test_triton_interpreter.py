"""The Triton kernels without a GPU: what lies in `interpreted/`, in a process of its own.

TRITON_INTERPRET must be set before triton is imported, which other tests or torch may have done here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"
FILES = ["triton_attend.py", "triton_write.py", "triton_layers.py"]
LONGER = [
    "triton_engine.py",
    "triton_sampling.py",
    "triton_shared.py",
    "triton_matmul.py",
    "triton_program.py",
    "triton_mutations.py",
    "triton_gpu.py",
]


@pytest.mark.parametrize("file", [*FILES, *(pytest.param(file, marks=pytest.mark.slow) for file in LONGER)])
def test_kernels_under_the_interpreter(file: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", file]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    ended = subprocess.run(command, cwd=FOLDER, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_every_file_is_run() -> None:
    tests = {path.name for path in FOLDER.glob("triton_*.py") if "\ndef test_" in path.read_text()}
    assert tests == {*FILES, *LONGER}
