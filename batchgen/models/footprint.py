"""How much memory a model's weights take, and how much of it is a mapped file. For sizing an engine."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

import torch


def weight_bytes(modules: Iterable[torch.nn.Module]) -> int:
    """Of all parameters and buffers that are the modules' own, tied ones once."""
    return sum(size for _, size in _storages(modules))


def mapped_bytes(modules: Iterable[torch.nn.Module]) -> int:
    """Of those that lie in a mapped file, as safetensors does; such pages look free and are not."""
    files = _file_mappings()
    starts = [start for start, _ in files]

    def is_mapped(address: int) -> bool:
        i = bisect_right(starts, address) - 1
        return i >= 0 and address < files[i][1]

    return sum(size for address, size in _storages(modules, "cpu") if is_mapped(address))


def _storages(modules: Iterable[torch.nn.Module], place: str | None = None) -> set[tuple[int, int]]:
    """(address, bytes) of each tensor once, those on one kind of device or all that have numbers."""
    tensors = [t for m in modules for t in (*m.parameters(recurse=False), *m.buffers(recurse=False))]
    return {
        (t.data_ptr(), t.nbytes)
        for t in tensors
        if (t.device.type == place if place else t.device.type != "meta")
    }


def _file_mappings() -> list[tuple[int, int]]:
    """(start, end) of this process's mappings of files, ascending (`man 5 proc_pid_maps`)."""
    found = []
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
        for line in maps:
            fields = line.split(maxsplit=5)
            if fields[4] != "0":
                start, _, end = fields[0].partition("-")
                found.append((int(start, 16), int(end, 16)))
    return found
