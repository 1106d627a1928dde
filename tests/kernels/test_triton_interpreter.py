"""The Triton kernels without a GPU: what lies in `interpreted/`, in a process of its own.

TRITON_INTERPRET must be set before triton is imported, which other tests or torch may have done here.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent / "interpreted"
FILES = [
    "triton_attend.py",
    "triton_write.py",
    "triton_layers.py",
    "triton_sampling.py",
    "triton_matmul.py",
    "triton_program.py",
    "triton_mutations.py",
    "triton_engine.py",
    "triton_gpu.py",
]


def test_kernels_under_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *FILES]
    environment = os.environ | {"TRITON_INTERPRET": "1"}
    ended = subprocess.run(command, cwd=FOLDER, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
