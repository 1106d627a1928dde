"""What compiled functions need of the machine besides arithmetic: addresses, atomic counters, waiting."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import platform
from collections.abc import Sequence
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from batchgen_kernels.cpu.vectors import I32, I64, index

_MONOTONIC = 1
"""`CLOCK_MONOTONIC` of Linux, the clock of `time.monotonic_ns`."""
_SPINS = 4096
"""Looks at a counter before the processor is left to somebody else."""
_IS_X86 = platform.machine().lower() in ("x86_64", "amd64")


@intrinsic
def as_pointer(typingctx: Any, address: Any) -> Any:
    """An int64 address as a pointer that `numba.carray` takes."""

    def codegen(context: Any, b: ir.IRBuilder, sig: Any, args: Sequence[ir.Value]) -> ir.Value:
        return b.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), codegen


@intrinsic
def fetch_add(typingctx: Any, address: Any, amount: Any) -> Any:
    """Atomically add to the int64 at `address`; returns what it held before.

    What this thread wrote earlier is seen by whoever finds the sum by `wait_until`.
    """

    def codegen(context: Any, b: ir.IRBuilder, sig: Any, args: Sequence[ir.Value]) -> ir.Value:
        pointer = b.inttoptr(args[0], I64.as_pointer())
        return b.atomic_rmw("add", pointer, args[1], "acq_rel")

    return types.int64(types.int64, types.int64), codegen


@intrinsic
def wait_until(typingctx: Any, address: Any, least: Any) -> Any:
    """Return when the int64 at `address` is `least` or more."""

    def codegen(context: Any, b: ir.IRBuilder, sig: Any, args: Sequence[ir.Value]) -> ir.Value:
        pointer = b.inttoptr(args[0], I64.as_pointer())
        spins = cgutils.alloca_once_value(b, index(0))
        look, spin, leave, end = (
            b.append_basic_block(f"wait.{name}") for name in ("look", "spin", "leave", "end")
        )
        b.branch(look)
        b.position_at_end(look)
        there = b.icmp_signed(">=", b.load_atomic(pointer, "acquire", 8), args[1])
        b.cbranch(there, end, spin)
        b.position_at_end(spin)
        if _IS_X86:
            pause = ir.FunctionType(ir.VoidType(), [])
            b.call(cgutils.get_or_insert_function(b.module, pause, "llvm.x86.sse2.pause"), [])
        tried = b.add(b.load(spins), index(1))
        b.store(tried, spins)
        b.cbranch(b.icmp_signed("<", b.and_(tried, index(_SPINS - 1)), index(_SPINS - 1)), look, leave)
        b.position_at_end(leave)
        b.call(cgutils.get_or_insert_function(b.module, ir.FunctionType(I32, []), "sched_yield"), [])
        b.branch(look)
        b.position_at_end(end)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), codegen


@intrinsic
def monotonic_ns(typingctx: Any) -> Any:
    """What `time.monotonic_ns` gives."""

    def codegen(context: Any, b: ir.IRBuilder, sig: Any, args: Sequence[ir.Value]) -> ir.Value:
        timespec = ir.LiteralStructType([I64, I64])
        now = cgutils.alloca_once(b, timespec)
        kind = ir.FunctionType(I32, [I32, timespec.as_pointer()])
        b.call(cgutils.get_or_insert_function(b.module, kind, "clock_gettime"), [I32(_MONOTONIC), now])
        seconds, nanoseconds = (b.load(b.gep(now, [I32(0), I32(i)])) for i in range(2))
        return b.add(b.mul(seconds, index(10**9)), nanoseconds)

    return types.int64(), codegen
