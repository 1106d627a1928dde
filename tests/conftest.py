"""Settings and fixtures for all tests."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from stand_in_hub import StandInHub

# Waiting OpenMP threads must not spin while another process needs the core; read when torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Where a hang-up is ignored (`nohup`), a job ignores it too; the tests send it.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# How fast a busy machine makes examples says nothing of the code, and fixtures here are not changed.
# A run for a commit tries the same examples each time, so that what fails is the commit's doing; the longer
# runs by hand look for new ones.
BY_HAND = {"BATCHGEN_STEPS", "BATCHGEN_FUZZ", "BATCHGEN_RANDOM", "BATCHGEN_KERNELS"}
settings.register_profile(
    "batchgen",
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=BY_HAND.isdisjoint(os.environ),
)
settings.load_profile("batchgen")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator["StandInHub"]:
    """An empty hub, and an empty cache. The constants are what HF_ENDPOINT and HF_HOME become at import."""
    from huggingface_hub import constants
    from stand_in_hub import serve_hub

    with serve_hub() as server:
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", server.url + "/{repo_id}/resolve/{revision}/{filename}"
        )
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub_cache"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield server


@pytest.fixture
def launched() -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that are ended with their workers, and their pipes closed, whatever the test does."""
    processes: list[subprocess.Popen[str]] = []
    yield processes
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            for child in psutil.Process(process.pid).children():
                child.kill()
        process.kill()
        process.communicate()
