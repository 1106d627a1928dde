"""Which device is found, what is said of it, and how numbers get there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from batchgen import devices
from batchgen.devices import likely_kind
from batchgen.engine import device as device_module
from batchgen.engine.device import HOST, Device, find_device
from batchgen.engine.transfer import ALIGNMENT, Transfer, size
from batchgen.types import UsageError

Patch = pytest.MonkeyPatch


def pretend(monkeypatch: Patch, tmp_path: Path, capability: tuple[int, int] = (9, 0)) -> None:
    """torch finds an H200."""
    driver = tmp_path / "version"
    driver.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Thu Jan 9 2025\nGCC 12\n")
    monkeypatch.setattr(device_module, "_DRIVER", driver)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    answers = {
        "is_available": True,
        "current_device": 0,
        "get_device_name": "NVIDIA H200",
        "get_device_capability": capability,
        "get_device_properties": SimpleNamespace(total_memory=139 * 2**30),
    }
    for name, answer in answers.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, answer=answer: answer)


def test_a_gpu_is_described(monkeypatch: Patch, tmp_path: Path) -> None:
    pretend(monkeypatch, tmp_path)
    for asked in ("auto", "cuda"):
        found = find_device(asked)
        assert found.is_gpu
        assert found.place == torch.device("cuda", 0)
        assert dict(found.facts) == {
            "gpu": "NVIDIA H200",
            "gpu_capability": "9.0",
            "gpu_memory": 139 * 2**30,
            "gpu_driver": "570.86.15",
            "cuda": "12.8",
        }
        assert found.note == "device: NVIDIA H200, 139 GiB, compute capability 9.0"
    assert find_device("cpu") is HOST
    assert torch.get_float32_matmul_precision() == "highest"


def test_a_gpu_that_is_too_old(monkeypatch: Patch, tmp_path: Path) -> None:
    pretend(monkeypatch, tmp_path, capability=(7, 5))
    with pytest.raises(UsageError, match=r"engine\.device: cuda cannot be had here: NVIDIA H200 has compute"):
        find_device("cuda")
    found = find_device("auto")
    assert (found.kind, found.memory) == ("cpu", None)
    assert found.note is not None
    assert found.note.startswith("device: cpu: NVIDIA H200 has compute capability 7.5, and 8.0 or more")


@pytest.mark.parametrize(
    ("cuda", "reason"),
    [
        (
            None,
            r"cannot be had here: torch .* is built without CUDA; install a build with it, or use engine\.",
        ),
        (
            "12.8",
            r"torch finds no NVIDIA GPU; see whether nvidia-smi shows one, .* new enough for CUDA 12\.8,",
        ),
    ],
)
def test_no_gpu(monkeypatch: Patch, cuda: str | None, reason: str) -> None:
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match=reason):
        find_device("cuda")
    assert find_device("auto") == HOST
    with pytest.raises(UsageError, match=r"engine\.device: 'cuda:1' is not allowed; use auto, cpu or cuda"):
        find_device("cuda:1")


def test_a_driver_that_says_nothing(monkeypatch: Patch, tmp_path: Path) -> None:
    pretend(monkeypatch, tmp_path)
    (tmp_path / "version").unlink()
    assert dict(find_device("cuda").facts)["gpu_driver"] is None


def test_what_auto_will_likely_be(monkeypatch: Patch, tmp_path: Path) -> None:
    node = tmp_path / "nvidiactl"
    monkeypatch.setattr(devices, "_NODES", (tmp_path / "dxg", node))
    monkeypatch.setattr(devices.importlib.metadata, "version", lambda _: "2.11.0+cu128")
    assert likely_kind("auto") == "cpu"
    node.touch()
    assert [likely_kind(asked) for asked in ("auto", "cpu", "cuda")] == ["cuda", "cpu", "cuda"]
    monkeypatch.setattr(devices.importlib.metadata, "version", lambda _: "2.11.0+cpu")
    assert likely_kind("auto") == "cpu"


ARRAYS = [
    np.arange(5, dtype=np.int64),
    np.zeros((3, 0), dtype=np.int32),
    np.arange(100, dtype=np.int32).reshape(4, 25),
    np.empty(0, dtype=np.int64),
    np.linspace(0, 1, 33)[:, None],
    np.ones(1, dtype=np.float32),
]


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_numbers_arrive_as_they_were(kind: str) -> None:
    transfer = Transfer(Device(kind, torch.device("cpu")))
    tensors = transfer(ARRAYS)
    for array, tensor in zip(ARRAYS, tensors, strict=True):
        assert torch.equal(tensor, torch.from_numpy(array))
        assert tensor.dtype == torch.from_numpy(array).dtype
    if kind == "cuda":
        offsets = [tensor.data_ptr() - tensors[0].data_ptr() for tensor in tensors if tensor.numel()]
        assert [offset % ALIGNMENT for offset in offsets] == [0] * len(offsets)
    again = torch.full((size(ARRAYS) + 7,), 255, dtype=torch.uint8)
    for array, tensor in zip(ARRAYS, transfer(ARRAYS, again), strict=True):
        assert torch.equal(tensor, torch.from_numpy(array))
    assert (again[-7:] == 255).all()
