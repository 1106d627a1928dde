"""Kernels against their references on the GPU: layers of real models, then random shapes until time is up."""

from __future__ import annotations

import dataclasses
import itertools
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from gpu_notes import Notes, Place

from batchgen.bench.kernel_cases import DEVICE_SIZES, attention_cases, layer_of
from batchgen.bench.kernels import ceilings, measure
from batchgen.models.loader import load_config
from batchgen.models.source import find_model
from batchgen_kernels import AttentionMetadata, AttentionSpec, select
from batchgen_kernels import layer_reference as reference
from batchgen_kernels.backend import AttentionBackend, allocate
from batchgen_kernels.capability import CAPABILITIES, KV_DTYPES
from batchgen_kernels.reference import ReferenceBackend
from batchgen_kernels.shared_prefix import SharedGroup
from batchgen_kernels.triton_kernels import TritonBackend, layers

TOLERANCE = {torch.float32: 5e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
LAYERS = {
    "llama-3.1-8b": {"heads": (32, 8), "width": 128},
    "smollm2-135m": {"heads": (9, 3), "width": 64},
    "gemma3-27b": {"heads": (32, 16), "width": 128, "sliding_window": 100},
    "gemma2-9b": {"heads": (16, 8), "width": 256, "sliding_window": 70, "softcap": 50.0},
    "gpt-oss-20b": {"heads": (64, 8), "width": 64, "sliding_window": 128, "has_sinks": True},
    "deepseek": {"heads": (16, 16), "width": 192, "v_width": 128},
    "phi-3": {"heads": (32, 32), "width": 96},
    "multi-query": {"heads": (71, 1), "width": 64},
}
STEPS = (
    [(0, 40), (37, 1), (300, 1), (0, 1)],
    [(0, 700)],
    [(1500, 1), (15, 1), (16, 1), (2000, 3)],
)
"""Of the named layers: (tokens before, tokens of the step) of each sequence."""


def attention(notes: Notes, place: Place, name: str, until: float) -> None:
    """Write and attend in one dtype, with every dtype of the cache."""
    dtype = getattr(torch, name)
    if dtype not in _dtypes(place):
        notes.skip(f"attention in {name}", "the interpreter gets its products wrong")
        return
    device, done, worst = place.device, 0, {}
    for name, spec, kv_dtype, sequences, block, fixed in _cases(place, dtype):
        if time.monotonic() > until and done:
            break
        backend, truth = TritonBackend(fixed_split=fixed), ReferenceBackend()
        refusal = backend.supports(spec, device, dtype, kv_dtype)
        if refusal is not None:
            notes.skip(f"attention {name}", refusal)
            continue
        difference, limit = _attend_both(backend, truth, spec, dtype, kv_dtype, sequences, block, device)
        done += 1
        kind = f"{_short(dtype)}, cache {_short(kv_dtype)}"
        worst[kind] = max(worst.get(kind, 0.0), difference / limit)
        if not difference <= limit:
            text = (
                f"{difference:.2e} off, {limit:.0e} allowed: {spec}, {sequences}, blocks of {block}, {fixed}"
            )
            notes.check(f"attention {name} in {kind}", False, text)
    for kind, share in worst.items():
        notes.check(f"attention in {kind}", share <= 1, f"largest difference is {share:.2f} of the limit")
    notes.figure("shapes of attention tried", done, "")


def flash(notes: Notes, place: Place) -> None:
    """The kernels of flash-attn where they are installed: as the reference, and how fast beside ours."""
    for name in ("flash_attn", "flash_attn_3"):
        refusal = CAPABILITIES[name].absence(place.device)
        if refusal is not None:
            notes.skip(name, refusal)
            continue
        try:
            backend = select(name, _spec(32, 8, 128, 128), place.device, torch.bfloat16).backend
            flash_parity(notes, place, backend)
            _flash_speed(notes, place, backend)
        except Exception as error:
            notes.crashed(name, error)


def flash_parity(notes: Notes, place: Place, backend: AttentionBackend) -> None:
    """One of them against the reference, over the layers and steps that our own are tried with."""
    block = max(16, CAPABILITIES[backend.name].block_size_multiple)
    for dtype in (torch.bfloat16, torch.float16):
        worst, done = 0.0, 0
        for layer, given in LAYERS.items():
            more = dict(given)
            heads, width = more.pop("heads"), more.pop("width")
            spec = _spec(*heads, width, more.pop("v_width", width), **more)
            refusal = backend.supports(spec, place.device, dtype, dtype)
            if refusal is not None:
                notes.skip(f"{backend.name} of {layer} in {_short(dtype)}", refusal)
                continue
            for sequences in STEPS[: 1 if place.dry else None]:
                off, limit = _attend_both(
                    backend, ReferenceBackend(), spec, dtype, dtype, sequences, block, place.device
                )
                worst, done = max(worst, off / limit), done + 1
        text = f"largest difference is {worst:.2f} of the limit, in {done} steps"
        notes.check(f"{backend.name} in {_short(dtype)}", done > 0 and worst <= 1, text)


def _flash_speed(notes: Notes, place: Place, backend: AttentionBackend) -> None:
    layer = layer_of(load_config(find_model("dummy:llama-3.1-8b").tokenizer_folder()))
    limits = ceilings(place.device, torch.bfloat16)
    sizes = dataclasses.replace(DEVICE_SIZES, rows=(), kv_dtypes=(), alike=())
    found = {
        one.name: measure(
            attention_cases(one, layer, sizes, place.device, torch.bfloat16), limits, place.device
        )
        for one in (backend, TritonBackend())
    }
    for theirs, ours in zip(*found.values(), strict=True):
        name = f"{theirs.kernel} {theirs.shape}: time of ours, of {backend.name}'s"
        notes.figure(name, ours.seconds / theirs.seconds, "x")
        notes.figure(f"{theirs.kernel} {theirs.shape}: {backend.name}, of the limit", 100 * theirs.share, "%")


def shared(notes: Notes, place: Place) -> None:
    """Keys that sequences have in common, attended to once."""
    others = [(0, 3)] if place.dry else [(0, 3), (200, 5)]
    first, *more_dtypes = _dtypes(place)
    tried = [("llama-3.1-8b", first, kv_dtype) for kv_dtype in _stored(first)]
    tried += [("llama-3.1-8b", dtype, dtype) for dtype in more_dtypes]
    tried += [(name, first, first) for name in ("gemma2-9b", "gpt-oss-20b", "deepseek", "phi-3")]
    for name, dtype, kv_dtype in tried[:: 3 if place.dry else 1]:
        more = {key: value for key, value in LAYERS[name].items() if key != "sliding_window"}
        heads, width = more.pop("heads"), more.pop("width")
        spec = _spec(*heads, width, more.pop("v_width", width), **more)
        worst = 0.0
        for blocks, block, count in ((2, 16, 3),) if place.dry else ((4, 16, 5), (33, 32, 70)):
            alike = [(blocks * block + 7 * n % 90, 1) for n in range(count)]
            difference, limit = _attend_both(
                *(TritonBackend(), ReferenceBackend(), spec, dtype, kv_dtype, alike + others, block),
                place.device,
                common=(count, blocks),
            )
            worst = max(worst, difference / limit)
        kind = f"{name} in {_short(dtype)}, cache {_short(kv_dtype)}"
        notes.check(f"shared keys, {kind}", worst <= 1, f"largest difference is {worst:.2f} of the limit")


def sampling(notes: Notes, place: Place) -> None:
    """Tokens drawn by the kernel are those that the host draws from the same logits."""
    import numpy as np

    from batchgen.sampling.sampler import SamplingRow, sample
    from batchgen.types import SamplingParams
    from batchgen_kernels.triton_kernels.sampling import draw

    for vocabulary in (130,) if place.dry else (400, 32_000, 128_256, 262_144):
        chance, count = np.random.default_rng(vocabulary), 6 if place.dry else 128
        logits = torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(1)) * 3
        rows = [
            SamplingRow(
                SamplingParams(
                    temperature=float(chance.choice([0.0, 0.7, 1.0])),
                    top_k=int(chance.choice([0, 1, 40])),
                    top_p=float(chance.choice([1.0, 0.9])),
                    min_p=float(chance.choice([0.0, 0.02])),
                    seed=int(chance.integers(0, 2**62)),
                ),
                i,
                0,
                i,
            )
            for i in range(count)
        ]
        settings = [(row, row.sampling) for row in rows]
        numbers = [[s.seed, row.row, row.sample, row.position, s.top_k] for row, s in settings]
        floats = [[s.temperature, s.min_p, s.top_p] for _, s in settings]
        got = draw(
            logits.to(place.device),
            torch.arange(count, device=place.device),
            torch.tensor(numbers, dtype=torch.int64, device=place.device),
            torch.tensor(floats, dtype=torch.float64, device=place.device),
        ).tolist()
        want = sample(logits, rows)
        same = sum(int(a) == int(b) for a, b in zip(got, want, strict=True))
        # A draw within a rounding of a border may fall to either side: one in a million.
        notes.check(f"tokens drawn of {vocabulary}", same >= count - 1, f"{same} of {count} are the host's")


def between(notes: Notes, place: Place) -> None:
    """Norms, gated activations, rotation with the write."""
    for dtype in _dtypes(place):
        draw = _drawing(place.device, dtype)
        worst: dict[str, float] = {}
        for rows, width in ((1, 64), (5, 96), *(() if place.dry else ((3, 4096), (257, 5376)))):
            x, residual, weight = draw(rows, width), draw(rows, width), draw(width)
            for unit in (False, True):
                got = layers.rms_norm(x, weight, 1e-5, residual=residual, unit_offset=unit)
                want = reference.rms_norm(x, weight, 1e-5, residual=residual, unit_offset=unit)
                _note(worst, "norm", zip(got, want, strict=True), dtype)
            gate, up = draw(rows, 2 * width).chunk(2, -1)
            for activation in reference.ACTIVATIONS:
                pair = layers.gated(gate, up, activation), reference.gated(gate, up, activation)
                _note(worst, f"gated {activation}", [pair], dtype)
        _rotation(worst, place, dtype, draw)
        for name, share in worst.items():
            text = f"largest difference is {share:.2f} of {TOLERANCE[dtype]:.0e}"
            notes.check(f"{name} in {_short(dtype)}", share <= 1, text)


def _rotation(worst: dict[str, float], place: Place, dtype: torch.dtype, draw: Callable[..., Any]) -> None:
    for heads, kv_heads, width, turned in ((4, 2, 64, 64), (3, 1, 80, 32)):
        rows = 21
        spec = _spec(heads, kv_heads, width, width)
        query, key, value = draw(rows, heads, width), draw(rows, kv_heads, width), draw(rows, kv_heads, width)
        angle = torch.rand(rows, turned // 2, device=place.device) * 6
        angle = torch.cat([angle, angle], -1)
        cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
        backend = TritonBackend()
        meta = AttentionMetadata.build([rows], [rows], [[3, 1]], 16, device=place.device)
        fused, apart = (allocate(backend, spec, 4, 16, place.device, dtype) for _ in range(2))
        got = layers.rotate_and_write(query, key, value, cos, sin, fused, meta)
        backend.write(apart, reference.rotate(key, cos, sin), value, meta)
        pairs = [(got, reference.rotate(query, cos, sin)), (fused.key, apart.key), (fused.value, apart.value)]
        _note(worst, "rotate and write", pairs, dtype)


def _attend_both(
    backend: AttentionBackend,
    truth: ReferenceBackend,
    spec: AttentionSpec,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    sequences: list[tuple[int, int]],
    block: int,
    device: torch.device,
    common: tuple[int, int] = (0, 0),
) -> tuple[float, float]:
    """The largest difference from the reference in float32 on the same numbers, and what is allowed.

    `common` are how many sequences begin with how many blocks of the first.
    """
    g = torch.Generator(device).manual_seed(7)
    counts = [-(-sum(n) // block) for n in sequences]
    free = list(range(1, sum(counts) + 1))
    random.Random(3).shuffle(free)
    tables = [[free.pop() for _ in range(n)] for n in counts]
    lens, rows = [sum(n) for n in sequences], [n for _, n in sequences]
    count, blocks = common
    for table in tables[1:count]:
        table[:blocks] = tables[0][:blocks]
    groups = [SharedGroup(range(count), blocks * block)] if count else []

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=g, device=device).to(dtype)

    query = draw(sum(rows), spec.num_heads, spec.head_size)
    key = draw(sum(lens), spec.num_kv_heads, spec.head_size)
    value = draw(sum(lens), spec.num_kv_heads, spec.v_head_size)
    for start in list(itertools.accumulate(lens, initial=0))[1:count]:
        for vectors in (key, value):
            vectors[start : start + blocks * block] = vectors[: blocks * block]
    sinks = torch.linspace(-2, 2, spec.num_heads, device=device).to(dtype) if spec.has_sinks else None
    whole = AttentionMetadata.build(lens, lens, tables, block, device=device)
    step = AttentionMetadata.build(rows, lens, tables, block, groups=groups, device=device)
    results = []
    for target, of in ((backend, dtype), (truth, torch.float32)):
        kv = allocate(target, spec, sum(counts) + 1, block, device, kv_dtype)
        # What no row may see is large, as memory that was used before is.
        for tensor in kv.tensors:
            tensor.view(torch.uint8).fill_(0x55 if tensor.dtype != torch.float8_e4m3fn else 0x70)
        target.write(kv, key.to(of), value.to(of), whole)
        own_sinks = None if sinks is None else sinks.to(of)
        results.append(target.attend(query.to(of), kv, step, spec, own_sinks).float())
    got, want = results
    # Relative above 1, absolute below.
    difference = ((got - want).abs() / want.abs().clamp(min=1)).nan_to_num(nan=float("inf")).max()
    return float(difference), TOLERANCE[dtype]


def _cases(place: Place, dtype: torch.dtype) -> Iterator[tuple[Any, ...]]:
    """Named layers, then random ones without end (three in a dry run)."""
    if not place.dry:
        for name, given in LAYERS.items():
            more = dict(given)
            heads, width = more.pop("heads"), more.pop("width")
            spec = _spec(*heads, width, more.pop("v_width", width), **more)
            for kv_dtype in _stored(dtype) if name == "llama-3.1-8b" else [dtype]:
                for sequences in STEPS:
                    yield name, spec, kv_dtype, sequences, 16, None
    chance = random.Random(0)
    for _ in range(3 if place.dry else 10_000):
        kv_heads = chance.choice([1, 2, 4])
        width = chance.choice([16, 24, 64, 80, 96, 128, 192, 256][: 2 if place.dry else 8])
        spec = _spec(
            kv_heads * chance.choice([1, 2, 4, 7]),
            kv_heads,
            width,
            chance.choice([width, width, 128 if not place.dry else 16]),
            sliding_window=chance.choice([None, 1, 17, 90]),
            softcap=chance.choice([None, None, 5.0]),
            has_sinks=chance.random() < 0.3,
        )
        most = 30 if place.dry else 600
        sequences = [
            (
                chance.choice([0, 15, 16, chance.randrange(most)]),
                chance.choice([1, 1, chance.randrange(1, 20)]),
            )
            for _ in range(chance.randrange(1, 3 if place.dry else 9))
        ]
        block = chance.choice([16, 32, 64, 128])
        fixed = chance.choice([None, None, 64, 512])
        yield "of random shape", spec, chance.choice(_stored(dtype)), sequences, block, fixed


def _dtypes(place: Place) -> list[torch.dtype]:
    every = [torch.float32, torch.float16] if place.dry else [torch.bfloat16, torch.float16, torch.float32]
    return [dtype for dtype in every if dtype in CAPABILITIES["triton"].dtypes]


def _stored(dtype: torch.dtype) -> list[torch.dtype]:
    known = (torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn)
    return [d for d in known if d in KV_DTYPES[dtype] & CAPABILITIES["triton"].kv_dtypes]


def _spec(heads: int, kv_heads: int, width: int, v_width: int, **more: Any) -> AttentionSpec:
    return AttentionSpec(
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_size=width,
        v_head_size=v_width,
        scale=width**-0.5,
        **more,
    )


def _drawing(device: torch.device, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
    g = torch.Generator(device).manual_seed(1)
    return lambda *shape: torch.randn(shape, generator=g, device=device).to(dtype)


def _note(worst: dict[str, float], name: str, pairs: Any, dtype: torch.dtype) -> None:
    for got, want in pairs:
        got, want = got.float(), want.float()
        off = ((got - want).abs() / want.abs().clamp(min=1)).nan_to_num(nan=float("inf")).max()
        worst[name] = max(worst.get(name, 0.0), float(off) / TOLERANCE[dtype])


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.").replace("float8_e4m3fn", "fp8")
