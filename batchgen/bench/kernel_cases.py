"""The kernels of an engine at the shapes of a model, with the bytes and operations that each call needs.

Counted is what any way of computing must do: every input read once, every output written once, two operations
for each multiply-add of visible pairs. So a share of what the device can do has the same meaning for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from batchgen.bench.shapes import Product
from batchgen.grammar import counted
from batchgen_kernels.backend import AttentionBackend, KVCache, allocate
from batchgen_kernels.capability import CAPABILITIES
from batchgen_kernels.metadata import AttentionMetadata, SharedPrefixes
from batchgen_kernels.shared_prefix import SharedGroup, pack_groups
from batchgen_kernels.spec import AttentionSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig

BLOCK_SIZE = 16
ALIKE_EACH, ALIKE_ONCE = "attend alike, each", "attend alike, once"
"""Decoding of sequences that begin with the same keys, which each reads for itself or all together once."""


@dataclass(frozen=True, slots=True)
class Layer:
    """What a layer of a model computes.

    Args:
        attention: of the layer.
        hidden: width of its input.
        intermediate: width inside its gated unit.
        products: of all its kinds, and of the head; none of a model with experts.
    """

    attention: AttentionSpec
    hidden: int
    intermediate: int
    products: tuple[Product, ...] = ()


@dataclass(frozen=True, slots=True)
class Sizes:
    """Steps to measure.

    Args:
        prompts: of attention, (sequences, tokens of each, tokens before them).
        decoding: of attention, (sequences, tokens before each).
        rows: of everything else.
        kv_dtypes: what keys and values are stored as, for one decoding step each beside the first.
        alike: of attention, (sequences, tokens that all begin with, in whole blocks, tokens after them).
    """

    prompts: Sequence[tuple[int, int, int]]
    decoding: Sequence[tuple[int, int]]
    rows: Sequence[int]
    kv_dtypes: Sequence[torch.dtype] = field(default=())
    alike: Sequence[tuple[int, int, int]] = field(default=())


DEVICE_SIZES = Sizes(
    prompts=((8, 1024, 0), (4, 2048, 0), (2, 4096, 0), (1, 8192, 0), (1, 2048, 6144)),
    decoding=(
        *((1, 1024), (1, 8192), (1, 32768), (8, 8192), (64, 1024), (64, 4096)),
        *((64, 16384), (256, 1024), (256, 4096)),
    ),
    rows=(1, 256, 8192),
    kv_dtypes=(torch.float8_e4m3fn, torch.int8),
    alike=((8, 4096, 256), (64, 256, 256), (64, 2048, 256), (256, 512, 256), (256, 2048, 256)),
)
HOST_SIZES = Sizes(
    prompts=((4, 128, 0), (1, 512, 0), (1, 2048, 0), (1, 512, 1536)),
    decoding=((1, 512), (1, 4096), (16, 512), (64, 512), (16, 4096)),
    rows=(1, 16, 64, 512),
    kv_dtypes=(torch.int8,),
)
TINY_SIZES = Sizes(
    prompts=((2, 9, 0), (1, 8, 24)),
    decoding=((3, 40),),
    rows=(1, 5),
    kv_dtypes=(torch.int8,),
    alike=((3, 32, 8),),
)


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One call to measure; `bytes` and `flop` are what it needs."""

    kernel: str
    shape: str
    dtype: str
    run: Callable[[], object]
    bytes: int
    flop: int


def layer_of(config: PretrainedConfig) -> Layer:
    """The layer of a model as its configuration describes it, without windows and caps."""
    from batchgen.bench.shapes import model_shapes

    text: Any = config.get_text_config()
    heads = int(text.num_attention_heads)
    width = int(getattr(text, "head_dim", None) or text.hidden_size // heads)
    attention = AttentionSpec(
        num_heads=heads,
        num_kv_heads=int(getattr(text, "num_key_value_heads", None) or heads),
        head_size=width,
        v_head_size=width,
        scale=width**-0.5,
    )
    shapes = model_shapes(config, [attention])
    products = () if shapes is None else (*shapes.products, shapes.head)
    inside = getattr(text, "intermediate_size", None) or 4 * text.hidden_size
    return Layer(attention, int(text.hidden_size), int(inside), products)


def attention_cases(
    backend: AttentionBackend, layer: Layer, sizes: Sizes, device: torch.device, dtype: torch.dtype
) -> Iterator[KernelCase]:
    """Attention over the cache and writing to it; each case's memory is there while it is measured."""
    spec = layer.attention
    for count, tokens, before in sizes.prompts:
        name = "attend prompts" if not before else "attend a chunk"
        yield _attend(backend, spec, name, [(before, tokens)] * count, device, dtype, dtype)
    for count, before in sizes.decoding:
        yield _attend(backend, spec, "attend decoding", [(before, 1)] * count, device, dtype, dtype)
    for kv_dtype in sizes.kv_dtypes:
        if backend.supports(spec, device, dtype, kv_dtype) is None:
            count, before = sizes.decoding[-1]
            name = f"attend decoding, {_name(kv_dtype)} cache"
            yield _attend(backend, spec, name, [(before, 1)] * count, device, dtype, kv_dtype)
    for count, common, own in sizes.alike:
        yield from _attend_alike(backend, spec, count, common, own, device, dtype)
    for rows in sizes.rows:
        yield _write(backend, spec, rows, device, dtype)


def product_cases(
    layer: Layer, sizes: Sizes, device: torch.device, dtype: torch.dtype, *, ours: bool
) -> Iterator[KernelCase]:
    """Products with weights: torch's and, if asked for, our own."""
    for product in layer.products:
        inputs, outputs = product.in_features, product.out_features
        weight = torch.randn(outputs, inputs, dtype=dtype, device=device) * inputs**-0.5
        functions: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
            "torch": lambda x, weight=weight: F.linear(x, weight)  # type: ignore[misc]
        }
        if ours and (packed := _our_product(weight)) is not None:
            functions = {"ours": packed, **functions}
        for rows in sizes.rows:
            x = torch.randn(rows, inputs, dtype=dtype, device=device)
            needed = (rows * (inputs + outputs) + inputs * outputs) * dtype.itemsize
            for name, function in functions.items():
                yield KernelCase(
                    f"{product.kind} ({name})",
                    f"{rows} x {inputs} x {outputs}",
                    _name(dtype),
                    partial(function, x),
                    needed,
                    rows * product.flop,
                )


def triton_layer_cases(
    layer: Layer, sizes: Sizes, device: torch.device, dtype: torch.dtype
) -> Iterator[KernelCase]:
    """What a GPU does between attention and products."""
    from batchgen_kernels.triton_kernels import TritonBackend, layers

    spec, item = layer.attention, dtype.itemsize
    for rows in sizes.rows:
        x, residual = (torch.randn(rows, layer.hidden, dtype=dtype, device=device) for _ in range(2))
        weight = torch.ones(layer.hidden, dtype=dtype, device=device)
        yield KernelCase(
            "norm with residual",
            f"{rows} x {layer.hidden}",
            _name(dtype),
            partial(layers.rms_norm, x, weight, 1e-5, residual=residual),
            4 * x.nbytes + weight.nbytes,
            0,
        )
        gate, up = torch.randn(rows, 2 * layer.intermediate, dtype=dtype, device=device).chunk(2, -1)
        yield KernelCase(
            "gated activation",
            f"{rows} x {layer.intermediate}",
            _name(dtype),
            partial(layers.gated, gate, up, "silu"),
            3 * rows * layer.intermediate * item,
            0,
        )
        query, key, value = _rows(spec, rows, device, dtype)
        angles = torch.rand(rows, spec.head_size, device=device)
        kv, meta = _cache(TritonBackend(), spec, [(0, rows)], device, dtype)
        yield KernelCase(
            "rotate and write",
            counted(rows, "token"),
            _name(dtype),
            partial(
                layers.rotate_and_write,
                query,
                key,
                value,
                angles.cos().to(dtype),
                angles.sin().to(dtype),
                kv,
                meta,
            ),
            2 * (query.nbytes + key.nbytes + value.nbytes + rows * spec.head_size * item),
            0,
        )


def sampling_cases(
    vocabulary: int, sizes: Sizes, device: torch.device, dtype: torch.dtype
) -> Iterator[KernelCase]:
    """Drawing tokens by top-k and top-p; the logits are read once at least."""
    from batchgen_kernels.triton_kernels.sampling import draw

    for rows in sizes.rows[:2]:
        logits = torch.randn(rows, vocabulary, dtype=dtype, device=device) * 3
        numbers = torch.tensor([[0, row, 0, 0, 40] for row in range(rows)], device=device)
        floats = torch.tensor([[0.8, 0.0, 0.95]] * rows, dtype=torch.float64, device=device)
        source = torch.arange(rows, device=device)
        yield KernelCase(
            "draw tokens",
            f"{rows} of {vocabulary}",
            _name(dtype),
            partial(draw, logits, source, numbers, floats),
            logits.nbytes,
            0,
        )


def _attend(
    backend: AttentionBackend,
    spec: AttentionSpec,
    name: str,
    sequences: Sequence[tuple[int, int]],
    device: torch.device,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
) -> KernelCase:
    """`sequences` are (tokens before, tokens of the step), all alike."""
    kv, meta = _cache(backend, spec, sequences, device, kv_dtype)
    before, tokens = sequences[0]
    query, _, _ = _rows(spec, meta.num_rows, device, dtype)
    pairs = len(sequences) * sum(range(before + 1, before + tokens + 1))
    widths = spec.head_size + spec.v_head_size
    scales = 8 * spec.num_kv_heads if kv.key_scale is not None else 0
    stored = len(sequences) * (before + tokens) * (spec.num_kv_heads * widths * kv_dtype.itemsize + scales)
    shape = f"{len(sequences)} x {tokens}" + (f" after {before}" if before else "")
    return KernelCase(
        name,
        shape,
        _name(dtype),
        partial(backend.attend, query, kv, meta, spec),
        stored + meta.num_rows * spec.num_heads * widths * dtype.itemsize,
        2 * spec.num_heads * widths * pairs,
    )


def _attend_alike(
    backend: AttentionBackend,
    spec: AttentionSpec,
    count: int,
    common: int,
    own: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Iterator[KernelCase]:
    """Where a backend can be told that sequences begin with the same keys: without that, and with it."""
    kv, meta = _cache(backend, spec, [(common + own, 1)] * count, device, dtype, common)
    if backend.sharing(spec, dtype, kv) is None:
        return
    query, _, _ = _rows(spec, count, device, dtype)
    groups = pack_groups([SharedGroup(range(count), common)], count)
    told = replace(meta, shared=SharedPrefixes(*(torch.from_numpy(array).to(device) for array in groups)))
    widths, keys = spec.head_size + spec.v_head_size, common + count * (own + 1)
    needed = (keys * spec.num_kv_heads + count * spec.num_heads) * widths * dtype.itemsize
    for name, step in ((ALIKE_EACH, meta), (ALIKE_ONCE, told)):
        yield KernelCase(
            name,
            f"{count} x 1 after {common} + {own}",
            _name(dtype),
            partial(backend.attend, query, kv, step, spec),
            needed,
            2 * spec.num_heads * widths * count * (common + own + 1),
        )


def _write(
    backend: AttentionBackend, spec: AttentionSpec, rows: int, device: torch.device, dtype: torch.dtype
) -> KernelCase:
    kv, meta = _cache(backend, spec, [(0, rows)], device, dtype)
    _, key, value = _rows(spec, rows, device, dtype)
    return KernelCase(
        "write", counted(rows, "token"), _name(dtype), partial(backend.write, kv, key, value, meta),
        2 * (key.nbytes + value.nbytes), 0,
    )  # fmt: skip


def _cache(
    backend: AttentionBackend,
    spec: AttentionSpec,
    sequences: Sequence[tuple[int, int]],
    device: torch.device,
    kv_dtype: torch.dtype,
    common: int = 0,
) -> tuple[KVCache, AttentionMetadata]:
    """A cache that holds every sequence in blocks that are not neighbours, `common` tokens in the same."""
    lens = [sum(n) for n in sequences]
    block = max(BLOCK_SIZE, CAPABILITIES[backend.name].block_size_multiple)
    counts = [-(-n // block) for n in lens]
    free = (torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)) + 1).tolist()
    tables, start = [], 0
    for count in counts:
        tables.append(free[: common // block] + free[start + common // block : start + count])
        start += count
    kv = allocate(backend, spec, sum(counts) + 1, block, device, kv_dtype)
    for tensor in kv.tensors:
        if tensor.dtype in (torch.int8, torch.float8_e4m3fn):
            # 56 is 1.0 in e4m3.
            tensor.view(torch.int8).fill_(56)
        elif tensor is kv.key_scale or tensor is kv.value_scale:
            tensor.fill_(0.02)
        else:
            tensor.normal_()
    return kv, AttentionMetadata.build([n for _, n in sequences], lens, tables, block, device=device)


def _rows(
    spec: AttentionSpec, rows: int, device: torch.device, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shapes = (
        (rows, spec.num_heads, spec.head_size),
        (rows, spec.num_kv_heads, spec.head_size),
        (rows, spec.num_kv_heads, spec.v_head_size),
    )
    query, key, value = (torch.randn(shape, dtype=dtype, device=device) for shape in shapes)
    return query, key, value


def _our_product(weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor] | None:
    try:
        from batchgen_kernels.cpu.linear import Linear, pack
    except ImportError:
        # Numba does not work here, and products are torch's.
        return None
    return Linear(pack(weight))


def _name(dtype: torch.dtype) -> str:
    return "fp8" if dtype == torch.float8_e4m3fn else str(dtype).removeprefix("torch.")
