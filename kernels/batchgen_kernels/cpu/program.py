"""A sequence of operations that all threads work through together, in one call.

Threads claim chunks of the operation that is running by an atomic counter and go on to the next when all its
chunks are done. Nobody counts threads: one that comes late finds operations finished, one that the system
has taken off the processor holds up the others only with the chunk it has in hand. Which thread takes which
chunk has no influence on any result.

A decoder's step of 30 layers is some 240 operations; calling each from Python, and waking the threads for
it, would take longer than a step of one token needs.
"""

# mypy: disable-error-code="attr-defined,call-arg,call-overload,no-untyped-call,var-annotated"
# Numba types these functions; its stubs know neither intrinsics nor carray of an address.

from __future__ import annotations

import ctypes
import enum
import time
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from numba import carray, cfunc, float32, int8, int64, njit, types
from numba.extending import overload

from batchgen_kernels.cpu.cache import numba_cache
from batchgen_kernels.cpu.intrinsics import as_pointer, fetch_add, monotonic_ns, wait_until
from batchgen_kernels.cpu.kernel import STORAGE, Attend, Write, attend_chunk, write_chunk
from batchgen_kernels.cpu.matmul import matmul_chunk
from batchgen_kernels.cpu.quantised import quantised_matmul_chunk
from batchgen_kernels.cpu.records import quantise_chunk
from batchgen_kernels.cpu.rows import gather_chunk, norm_chunk, rotate_chunk
from batchgen_kernels.cpu.threads import run_on_caller, team

FIELDS = 20
"""int64 numbers in an operation; a row of a program."""
CODE, CLAIMED, DONE, CHUNKS = range(4)
"""Every operation begins with these; others are in `Matmul`, `Norm`, `Rotate`, `Gather` and `Quantise`."""
ARGUMENT = 4
"""The address of an `AttendArgument` or `WriteArgument`."""


class Code(enum.IntEnum):
    """What an operation does."""

    MATMUL = 0
    NORM = 1
    ROTATE = 2
    ATTEND = 3
    WRITE = 4
    QUANTISE = 5
    QUANTISED_MATMUL = 6
    GATHER = 7


class _Header(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_int64) for name in ("threads_started", "count", "operations", "ended"))


_ATTEND_FIELDS, _WRITE_FIELDS = len(Attend), len(Write)
_NORM, _ROTATE, _ATTEND = Code.NORM.value, Code.ROTATE.value, Code.ATTEND.value
_WRITE, _QUANTISE, _GATHER = Code.WRITE.value, Code.QUANTISE.value, Code.GATHER.value


def _product_chunk(a: Any, chunk: Any, products: Any) -> None:
    """A chunk of a product, or of making records for one."""


@overload(_product_chunk, jit_options={"error_model": "numpy"})
def _product_chunk_of(a: Any, chunk: Any, products: Any) -> Any:
    return _quantised_product_chunk if products.dtype is int8 else _float_product_chunk


def _float_product_chunk(a: Any, chunk: Any, products: Any) -> None:
    matmul_chunk(a, chunk)


def _quantised_product_chunk(a: Any, chunk: Any, products: Any) -> None:
    if a[CODE] == _QUANTISE:
        quantise_chunk(a, chunk)
    else:
        quantised_matmul_chunk(a, chunk)


@njit(error_model="numpy")
def _chunk(a: Any, chunk: Any, slot: Any, source_type: Any, storage: Any, products: Any) -> None:
    code = a[CODE]
    if code == _ATTEND:
        attend = carray(as_pointer(a[ARGUMENT]), _ATTEND_FIELDS, int64)
        own = attend[Attend.SCRATCH] + 4 * slot * attend[Attend.SCRATCH_STRIDE]
        attend_chunk(attend, chunk, own, storage)
    elif code == _WRITE:
        write_chunk(carray(as_pointer(a[ARGUMENT]), _WRITE_FIELDS, int64), chunk, source_type, storage)
    elif code == _NORM:
        norm_chunk(a, chunk)
    elif code == _ROTATE:
        rotate_chunk(a, chunk, storage, source_type)
    elif code == _GATHER:
        gather_chunk(a, chunk)
    else:
        _product_chunk(a, chunk, products)


@njit(error_model="numpy")
def _run(header: Any, source_type: Any, storage: Any, products: Any) -> None:
    slot = fetch_add(header.ctypes.data, 1)
    for i in range(header[1]):
        address = header[2] + 8 * FIELDS * i
        a = carray(as_pointer(address), FIELDS, int64)
        done = 0
        while True:
            chunk = fetch_add(address + 8 * CLAIMED, 1)
            if chunk >= a[CHUNKS]:
                break
            _chunk(a, chunk, slot, source_type, storage, products)
            done += 1
        before = fetch_add(address + 8 * DONE, done)
        if header[3] != 0 and done > 0 and before + done == a[CHUNKS]:
            carray(as_pointer(header[3]), header[1], int64)[i] = monotonic_ns()
        wait_until(address + 8 * DONE, a[CHUNKS])


@cache
def compiled(kv_dtype: torch.dtype, *, quantised: bool = False) -> Any:
    """A `void (*)(void *)`, whose `address` every thread of a team is to call.

    Keys and values are stored as `kv_dtype`, and given to `WRITE` so, too, but as float32 for int8. Products
    are all quantised, or none is.
    """
    storage = STORAGE[kv_dtype]
    products = int8 if quantised else float32
    source_type = float32 if storage is int8 else storage

    def run(address: Any) -> None:
        _run(carray(address, 4, int64), source_type, storage, products)

    signature = types.void(types.voidptr)
    try:
        with numba_cache() as cached:
            return cfunc(signature, cache=cached)(run)
    except OSError:
        # On a full disk Numba cannot keep what it has compiled.
        return cfunc(signature)(run)


class Program:
    """Operations to be run again and again; compiled the first time on a machine, which takes seconds.

    Args:
        operations: `[count, FIELDS]` int64; the caller changes fields between runs.
        kv_dtype: what keys and values are stored as, where operations use a cache.
        quantised: whether products are.
    """

    def __init__(
        self,
        operations: npt.NDArray[np.int64],
        kv_dtype: torch.dtype = torch.float32,
        *,
        quantised: bool = False,
    ) -> None:
        self._operations = operations
        self._function = compiled(kv_dtype, quantised=quantised).address
        self._watched: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None = None

    @classmethod
    def of_one(cls, code: Code, chunks: int, argument: ctypes.Structure, kv_dtype: torch.dtype) -> Program:
        """One operation that has an argument; it must live until the program has run."""
        operation = np.zeros((1, FIELDS), dtype=np.int64)
        operation[0, [CODE, CHUNKS, ARGUMENT]] = code, chunks, ctypes.addressof(argument)
        return cls(operation, kv_dtype)

    def watch(self) -> npt.NDArray[np.int64]:
        """From now on add up how long each operation takes; costs a look at the clock for each.

        Returns:
            `[count]` nanoseconds of all runs so far, from the end of the operation before; zeros at first.
        """
        elapsed = np.zeros(len(self._operations), dtype=np.int64)
        self._watched = elapsed, np.zeros_like(elapsed)
        return elapsed

    def run(self, threads: int) -> None:
        """Run all operations on at most so many threads."""
        self._operations[:, CLAIMED : DONE + 1] = 0
        if self._watched is None:
            self._run(threads, 0)
            return
        elapsed, ended = self._watched
        ended[:] = 0
        began = time.monotonic_ns()
        self._run(threads, ended.ctypes.data)
        # One without chunks is ended by nobody.
        elapsed += np.diff(np.maximum.accumulate(ended), prepend=began).clip(min=0)

    def _run(self, threads: int, ended: int) -> None:
        header = _Header(0, len(self._operations), self._operations.ctypes.data, ended)
        (team() if threads > 1 else run_on_caller)(self._function, header, threads)
