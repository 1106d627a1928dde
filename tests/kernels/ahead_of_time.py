"""Compile the Triton kernels' production settings for GPUs that are not here, and print what they take.

Fails where a kernel spills registers, beyond `ALLOWED_SPILL`, where its shared memory is more than the GPU
has, or more than `tiles.shared_bytes` says. Called by `make kernels-aot`, for each version of triton in a
process of its own.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from batchgen_kernels import AttentionSpec, KVCache
from batchgen_kernels.storage import LARGEST
from batchgen_kernels.triton_kernels import backend, layers, matmul, sampling, tiles
from batchgen_kernels.triton_kernels.attend_kernel import attend_kernel, merge_kernel
from batchgen_kernels.triton_kernels.layer_kernel import (
    gated_kernel,
    rms_norm_kernel,
    rotate_and_write_kernel,
)
from batchgen_kernels.triton_kernels.matmul_kernel import multiply_kernel
from batchgen_kernels.triton_kernels.sampling_kernel import draw_kernel
from batchgen_kernels.triton_kernels.write_kernel import write_kernel

TYPES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int8: "i8",
    torch.float8_e4m3fn: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.float64: "fp64",
}
CHIPS = {chip.capability: chip for chip in (tiles.A100, tiles.H100, tiles.B200)}
FLOATS = {"factor", "cap", "eps"}
UNALIGNED = {"num_seqs", "num_splits", "num_shared", "num_rows", "table_stride"}
OPTIONS = ("num_warps", "num_stages", "enable_fp_fusion")
ALLOWED_SPILL = {80: 24, 100: 16}
"""Bytes a thread, elsewhere none: there the assembler gives up a few of some 134 registers by itself, for a
second program on a processor; on 10.0 the one that triton 3.6 brings does."""
DISASSEMBLER = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One launch of a layer; `rows` is the tokens of a sequence in the step.

    `shared`: sequences begin with the same keys, which is a launch before it.
    """

    name: str
    spec: AttentionSpec
    rows: int
    dtype: torch.dtype = torch.bfloat16
    kv_dtype: torch.dtype | None = None
    block_size: int = 16
    split: bool = False
    fixed_split: int | None = None
    shared: bool = False

    @property
    def cache(self) -> KVCache:
        """A block of the layer, without memory."""
        kv_dtype = self.kv_dtype or self.dtype
        key, value = (
            torch.empty(1, self.spec.num_kv_heads, self.block_size, width, dtype=kv_dtype, device="meta")
            for width in (self.spec.head_size, self.spec.v_head_size)
        )
        return KVCache(key, value, self.block_size)


def layer(heads: int, kv_heads: int, width: int, v_width: int | None = None, **more: Any) -> AttentionSpec:
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=width,
        v_head_size=v_width or width,
        scale=width**-0.5,
        **more,
    )


LLAMA = layer(32, 8, 128)
GEMMA = layer(16, 8, 256, sliding_window=4096, softcap=50.0)
GPT_OSS = layer(64, 8, 64, sliding_window=128, has_sinks=True)
CASES = [
    Case(name="llama 128, prompts", spec=LLAMA, rows=512),
    Case(name="llama 128, decode", spec=LLAMA, rows=1),
    Case(name="llama 128, mixed, blocks of 64", spec=LLAMA, rows=10, block_size=64),
    Case(name="llama 128, decode, split", spec=LLAMA, rows=1, split=True),
    Case(name="llama 128, fixed split", spec=LLAMA, rows=1, split=True, fixed_split=512),
    Case(name="llama 128, decode, float16", spec=LLAMA, rows=1, dtype=torch.float16),
    Case(name="llama 128, decode, int8", spec=LLAMA, rows=1, kv_dtype=torch.int8),
    Case(name="llama 128, prompts, int8", spec=LLAMA, rows=512, kv_dtype=torch.int8),
    Case(name="llama 128, decode, fp8", spec=LLAMA, rows=1, kv_dtype=torch.float8_e4m3fn),
    Case(name="llama 128, prompts, fp8", spec=LLAMA, rows=512, kv_dtype=torch.float8_e4m3fn),
    Case(name="llama 128, float32", spec=LLAMA, rows=512, dtype=torch.float32),
    Case(name="gemma 256, prompts", spec=GEMMA, rows=512),
    Case(name="gemma 256, decode", spec=GEMMA, rows=1, block_size=128),
    Case(name="gpt-oss 64, prompts", spec=GPT_OSS, rows=512),
    Case(name="gpt-oss 64, decode", spec=GPT_OSS, rows=1, block_size=32),
    Case(name="phi 96, prompts", spec=layer(32, 32, 96), rows=512),
    Case(name="phi 80, decode", spec=layer(32, 32, 80), rows=1),
    Case(name="phi 96, decode", spec=layer(32, 32, 96), rows=1, block_size=64),
    Case(name="phi 80, prompts", spec=layer(32, 32, 80), rows=512, block_size=32),
    Case(name="deepseek 192/128, prompts", spec=layer(16, 16, 192, 128), rows=512),
    Case(name="deepseek 192/128, decode", spec=layer(16, 16, 192, 128), rows=1, block_size=64),
    Case(name="gemma 256, decode, fp8", spec=GEMMA, rows=1, kv_dtype=torch.float8_e4m3fn, block_size=64),
    Case(name="one head of keys for 128", spec=layer(128, 1, 128), rows=1),
    Case(name="shared, llama 128", spec=LLAMA, rows=1, shared=True),
    Case(name="shared, llama 128, split", spec=LLAMA, rows=1, shared=True, split=True),
    Case(name="shared, llama 128, mixed", spec=LLAMA, rows=10, shared=True, block_size=64),
    Case(name="shared, llama 128, int8", spec=LLAMA, rows=1, shared=True, kv_dtype=torch.int8),
    Case(name="shared, llama 128, fp8", spec=LLAMA, rows=1, shared=True, kv_dtype=torch.float8_e4m3fn),
    Case(name="shared, llama 128, float32", spec=LLAMA, rows=1, shared=True, dtype=torch.float32),
    Case(name="shared, gemma 256", spec=replace(GEMMA, sliding_window=None), rows=1, shared=True),
    Case(name="shared, gpt-oss 64", spec=replace(GPT_OSS, sliding_window=None), rows=1, shared=True),
    Case(name="shared, phi 96", spec=layer(32, 32, 96), rows=1, shared=True),
    Case(name="shared, deepseek 192/128", spec=layer(16, 16, 192, 128), rows=1, shared=True),
]


@dataclass(frozen=True, slots=True)
class Build:
    """A kernel to compile, and the shared memory that it may take by the formula."""

    kernel: Any
    types: dict[str, str]
    constants: dict[str, Any]
    expected_shared: int | None


def pointers(dtypes: dict[str, torch.dtype | None]) -> dict[str, str]:
    return {name: "constexpr" if d is None else f"*{TYPES[d]}" for name, d in dtypes.items()}


def pages(case: Case) -> dict[str, int]:
    """Elements between blocks of a layer, all of whose memory is its own."""
    kv_dtype = case.kv_dtype or case.dtype
    page = backend.TritonBackend().bytes_per_block(case.spec, case.block_size, kv_dtype)
    scale_page = page // 4 if kv_dtype in LARGEST else 0
    return {
        "KEY_PAGE": page // kv_dtype.itemsize,
        "VALUE_PAGE": page // kv_dtype.itemsize,
        "KEY_SCALE_PAGE": scale_page,
        "VALUE_SCALE_PAGE": scale_page,
    }


def builds(case: Case, chip: tiles.Chip) -> Iterator[Build]:
    """The launch of attention itself, and with it those that go with it."""
    spec, kv, dtype = case.spec, case.cache, case.dtype
    tile = (
        tiles.choose_tile(spec, dtype, kv.dtype, case.rows, chip, continued=case.shared)
        if case.fixed_split is None
        else tiles.choose_fixed_tile(spec, dtype, kv.dtype, chip)
    )
    scale = torch.float32 if kv.dtype in LARGEST else None
    partial = torch.float32 if case.split else None
    sinks = dtype if spec.has_sinks else None
    outputs = {"out_ptr": dtype, "partial_ptr": partial, "stats_ptr": partial}
    stored = {
        "key_ptr": kv.dtype,
        "value_ptr": kv.dtype,
        "key_scale_ptr": scale,
        "value_scale_ptr": scale,
    }
    step = {"starts_ptr": torch.int32, "seq_lens_ptr": torch.int32, "table_ptr": torch.int32}
    given = {**outputs, "query_ptr": dtype, **stored, "sinks_ptr": sinks, **step}
    sums = dict.fromkeys(("shared_partial_ptr", "shared_stats_ptr"), torch.float32 if case.shared else None)
    of_members = dict.fromkeys(("members_ptr", "count_ptr", "rows_ptr"))
    skipped = torch.int32 if case.shared else None
    yield Build(
        attend_kernel,
        pointers({**given, **of_members, "skipped_ptr": skipped, **sums}),
        {
            **backend.attend_constants(
                *(spec, kv, tile, chip),
                split=case.split,
                fixed_split=case.fixed_split,
                one_row=case.rows == 1,
                continued=case.shared,
            ),
            **pages(case),
        },
        tiles.shared_bytes(spec, dtype, kv.dtype, tile.rows, tile.keys, tile.stages),
    )
    if case.shared:
        tile = tiles.choose_fixed_tile(spec, dtype, kv.dtype, chip)
        given |= dict.fromkeys(("partial_ptr", "stats_ptr"), torch.float32)
        given |= dict.fromkeys(("out_ptr", "sinks_ptr", "skipped_ptr", *sums))
        given |= dict.fromkeys(of_members, torch.int32)
        yield Build(
            attend_kernel,
            pointers(given),
            {**backend.attend_constants(spec, kv, tile, chip, split=True, shared=True), **pages(case)},
            tiles.shared_bytes(spec, dtype, kv.dtype, tile.rows, tile.keys, tile.stages),
        )
        return
    if case.split:
        yield Build(
            merge_kernel,
            pointers({**outputs, "sinks_ptr": sinks}),
            backend.merge_constants(spec),
            None,
        )
    if "decode" in case.name and not case.split:
        written = {"key_in_ptr": dtype, "value_in_ptr": dtype, **stored, "slots_ptr": torch.int64}
        yield Build(
            write_kernel,
            pointers(written),
            backend.write_constants(spec.head_size, spec.v_head_size, kv),
            None,
        )
        rotated = {"query_out_ptr": dtype, "query_ptr": dtype, "cos_ptr": dtype, "sin_ptr": dtype}
        weight = torch.empty(spec.head_size, device="meta")
        for norms in (None, layers.HeadNorms(weight, weight, 1e-6)):
            of_norms = dict.fromkeys(("query_norm_ptr", "key_norm_ptr"), norms and dtype)
            yield Build(
                rotate_and_write_kernel,
                pointers({**rotated, **written, **of_norms}),
                layers.rotate_constants(spec.num_heads, spec.head_size, spec.head_size, kv, norms),
                None,
            )


def builds_without_attention() -> Iterator[Build]:
    """Norms and activations of Llama 8B and Gemma 27B."""
    narrow = torch.bfloat16
    for width, unit_offset in ((4096, False), (5376, True)):
        names = ("out_ptr", "total_ptr", "x_ptr", "residual_ptr", "weight_ptr")
        yield Build(
            rms_norm_kernel,
            pointers(dict.fromkeys(names, narrow)),
            layers.norm_constants(width, add=True, unit_offset=unit_offset),
            None,
        )
    for width, activation in ((14336, "silu"), (21504, "gelu_tanh")):
        yield Build(
            gated_kernel,
            pointers(dict.fromkeys(("out_ptr", "gate_ptr", "up_ptr"), narrow)),
            layers.gated_constants(width, activation),
            None,
        )


def builds_of_products() -> Iterator[Build]:
    """Llama 8B, where rows must not depend on how many there are."""
    for width, outputs in ((4096, 6144), (4096, 28672), (14336, 4096)):
        names = ("out_ptr", "x_ptr", "weight_ptr", "bias_ptr")
        constants = matmul.multiply_constants(width, outputs, torch.bfloat16, bias=False, add=outputs == 4096)
        types = pointers({**dict.fromkeys(names[:3], torch.bfloat16), "bias_ptr": None})
        yield Build(multiply_kernel, types, constants, None)


def builds_of_sampling() -> Iterator[Build]:
    """Over the vocabulary of Llama 3, and of a Gemma, whose logits have 16 bits."""
    for dtype, vocab in ((torch.float32, 128_256), (torch.bfloat16, 262_144)):
        types = {"tokens_ptr": torch.int64, "logits_ptr": dtype, "source_ptr": torch.int64}
        settings = {"numbers_ptr": torch.int64, "floats_ptr": torch.float64}
        yield Build(draw_kernel, pointers({**types, **settings}), sampling.draw_constants(vocab), None)


def compiled(build: Build, arch: int) -> Any:
    """The kernel as it is specialised at a launch: pointers and strides are multiples of 16."""
    constants = dict(build.constants)
    options = {name: constants.pop(name) for name in OPTIONS}
    signature, attributes = {}, {}
    for place, name in enumerate(build.kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        kind = build.types.get(name, "fp32" if name in FLOATS else "i32")
        signature[name] = kind
        if kind == "constexpr":
            constants[name] = None
        elif name not in UNALIGNED | FLOATS:
            attributes[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(build.kernel, signature, constants, attributes)
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def resources(cubin: bytes) -> tuple[int, int]:
    """Registers of a thread, and bytes of its stack, where spilled registers lie."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(DISASSEMBLER), "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    if found is None:
        raise SystemExit(f"{DISASSEMBLER} says nothing of registers: {text}")
    return int(found[1]), int(found[2])


def faults(shared: int, spilled: int, expected: int | None, chip: tiles.Chip) -> list[str]:
    said = []
    if spilled > ALLOWED_SPILL.get(chip.capability, 0):
        said.append(f"spills {spilled} bytes a thread")
    limit = chip.shared_memory
    if shared > limit:
        said.append(f"takes more shared memory than the {limit:,} bytes there are")
    if expected is not None and shared > expected:
        said.append(f"takes more shared memory than the {expected:,} bytes of the formula")
    return said


def report(name: str, build: Build, chip: tiles.Chip) -> int:
    """Compile, print a line, and count what is wrong with it."""
    kernel, constants = compiled(build, chip.capability), build.constants
    registers, spilled = resources(kernel.asm["cubin"])
    shared = kernel.metadata.shared
    print(f"{build.kernel.__name__:<24}{name:<33}{chip.capability:>4}", end="")
    print(f"{constants.get('BLOCK_M', ''):>6}{constants['num_warps']:>6}{constants['num_stages']:>7}", end="")
    print(f"{registers:>10}{spilled:>8}{shared:>9,}{build.expected_shared or 0:>9,}", flush=True)
    wrong = faults(shared, spilled, build.expected_shared, chip)
    for fault in wrong:
        print(f"  FAULT: {fault}")
    return len(wrong)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--arch", type=int, nargs="+", default=list(CHIPS))
    parser.add_argument("--only", default="", help="part of a case's name")
    arguments = parser.parse_args()
    started, failed = time.monotonic(), 0
    print(f"triton {triton.__version__}")
    print(f"{'kernel':<24}{'case':<33}{'sm':>4}{'rows':>6}{'warps':>6}{'stages':>7}", end="")
    print(f"{'registers':>10}{'spilled':>8}{'shared':>9}{'formula':>9}")
    chosen = [case for case in CASES if arguments.only in case.name]
    for arch in arguments.arch:
        chip = CHIPS[arch]
        every = [(case.name, build) for case in chosen for build in builds(case, chip)]
        every += [("norms and activations", build) for build in builds_without_attention()]
        every += [("products", build) for build in builds_of_products()]
        every += [("sampling", build) for build in builds_of_sampling()]
        for name, build in every:
            failed += report(name, build, chip)
    print(f"{failed} faults, {time.monotonic() - started:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET"):
        sys.exit("TRITON_INTERPRET is set: nothing would be compiled")
    sys.exit(main())
