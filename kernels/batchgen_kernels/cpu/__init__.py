"""The CPU backend: `backend.py` is called by the engine, `kernel.py` is compiled. Importing it loads numba."""

from batchgen_kernels.cpu.backend import CpuBackend

__all__ = ["CpuBackend"]
