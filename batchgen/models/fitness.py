"""Whether a model can run here by its configuration, asked from any process and without weights.

Called by the checks of `validate`, `plan` and `run`. `batchgen.models.refusals` knows, and needs the model's
code in transformers, which takes seconds to load, and torch, for which a supervisor has no memory: without it
another process is asked. What may run is remembered, so either happens once for each configuration.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from batchgen.cache import cache_dir
from batchgen.models import source
from batchgen.types import Task, UsageError


def check_fitness(folder: Path, task: Task) -> None:
    """Refuse a model that can never run.

    Args:
        folder: with its `config.json`.
        task: decides which head the model must have.

    Raises:
        UsageError: as of `refusals.refuse_config` and `loader.load_config`.
    """
    passed = _passed(folder, task)
    if passed is not None and passed.exists():
        return
    if not _runs(folder, task) or passed is None:
        return
    with suppress(OSError):
        passed.parent.mkdir(exist_ok=True)
        passed.touch()


def _runs(folder: Path, task: Task) -> bool:
    """Whether the model can run, as far as that could be found out; raises UsageError where it cannot."""
    if _torch_is_here():
        from batchgen.models.loader import load_config
        from batchgen.models.refusals import refuse_config

        refuse_config(load_config(folder), task)
        return True
    refusal = _ask(folder, task)
    if refusal:
        raise UsageError(refusal)
    return refusal is not None


def _torch_is_here() -> bool:
    return "torch" in sys.modules


def _ask(folder: Path, task: Task) -> str | None:
    """What another process says; None where it failed, which the worker will meet again and explain."""
    command = (sys.executable, "-m", "batchgen.models.refusals", str(folder), task.value)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        command, env=environment, stdin=subprocess.DEVNULL, capture_output=True, encoding="utf-8", check=False
    )
    return done.stdout if done.returncode == 0 else None


def _passed(folder: Path, task: Task) -> Path | None:
    """The file that stands for a model's having passed, by everything that decides it."""
    with suppress(OSError):
        parts = (
            (folder / "config.json").read_bytes(),
            task.encode(),
            Path(source.__file__).with_name("refusals.py").read_bytes(),
            importlib.metadata.version("transformers").encode(),
        )
        digest = hashlib.sha256(b"".join(hashlib.sha256(part).digest() for part in parts))
        return cache_dir() / "fitness" / digest.hexdigest()
    return None
