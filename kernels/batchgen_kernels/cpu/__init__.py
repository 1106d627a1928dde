"""The CPU backend: the engine calls `backend.py`; `kernel.py` is compiled. Importing it loads numba."""

from batchgen_kernels.cpu.backend import CpuBackend

__all__ = ["CpuBackend"]
