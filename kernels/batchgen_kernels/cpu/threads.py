"""Runs a compiled function on every thread of torch's own OpenMP team. Called by `backend.py`.

A second pool beside torch's would fight it for the cores: OpenMP's threads spin for a while after each
matrix product, so whoever wakes up then waits for them. The team that just multiplied is awake already.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache
from pathlib import Path

import torch

Run = Callable[[int, ctypes.Structure, int], None]
"""(address of a `void (*)(void *)`, what it is given the address of, number of threads)."""

_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def run_on_caller(function: int, argument: ctypes.Structure, threads: int) -> None:
    """One thread: this one."""
    _FUNCTION(function)(ctypes.addressof(argument))


@cache
def team() -> Run:
    """torch's OpenMP team where torch has one that speaks GNU's interface, else Python threads."""
    return _openmp_team() or _python_team()


def _openmp_team() -> Run | None:
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    try:
        # Looked up through libtorch, so it is the very copy of OpenMP that torch was linked with.
        parallel = ctypes.CDLL(str(library)).GOMP_parallel
    except (OSError, AttributeError):
        return None
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    parallel.restype = None

    def run(function: int, argument: ctypes.Structure, threads: int) -> None:
        parallel(function, ctypes.addressof(argument), threads, 0)

    return run


def _python_team() -> Run:
    pools: dict[int, ThreadPoolExecutor] = {}

    def run(function: int, argument: ctypes.Structure, threads: int) -> None:
        if threads not in pools:
            pools[threads] = ThreadPoolExecutor(threads - 1, "batchgen-attention")
        others = [pools[threads].submit(run_on_caller, function, argument, 1) for _ in range(threads - 1)]
        run_on_caller(function, argument, 1)
        wait(others)

    return run
