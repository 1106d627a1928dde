"""The kinds of devices by their names in job files. No torch: for whoever says something before an engine
runs."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

CPU, CUDA = "cpu", "cuda"
_NODES = tuple(map(Path, ("/dev/nvidiactl", "/dev/dxg", "/dev/nvmap")))
"""One of which a process that may use an NVIDIA GPU sees: on Linux, in WSL, on Jetson."""


def likely_kind(asked: str) -> str:
    """What `engine.device: asked` will be on this machine; whether torch can use its GPU, the engine
    knows."""
    if asked != "auto":
        return asked
    return CUDA if any(node.exists() for node in _NODES) and _torch_takes_gpus() else CPU


def _torch_takes_gpus() -> bool:
    try:
        return not importlib.metadata.version("torch").endswith("+cpu")
    except importlib.metadata.PackageNotFoundError:
        return False
