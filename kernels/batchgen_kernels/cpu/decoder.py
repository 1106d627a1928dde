"""The layers of a decoder as one program: norm, product, rotation, attention, product, norm, two products.

For models whose layers compute

    h = h + norm(output(attend(rotate(qkv(norm(h))))))
    h = h + norm(down(activation(gate(norm(h))) * up(norm(h))))

where each norm may be missing: Llama, Mistral, Qwen, Phi 3 and many others have those before the products,
OLMo 2 those behind them, Gemma 2 and 3 all. All activations of a step lie in buffers that are kept.
Where products are quantised, what they multiply is made into records first: by norms beside their results,
elsewhere by operations of their own.

Of the last layer, what follows its keys and values is computed for the rows alone that somebody reads: from
its attention on they stand one after the other.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from batchgen_kernels.backend import KVCache
from batchgen_kernels.cpu.backend import CpuBackend, point_to
from batchgen_kernels.cpu.kernel import Attend, AttendArgument, Write, WriteArgument
from batchgen_kernels.cpu.linear import ROWS_PER_CHUNK, PackedWeights, cut, quantise
from batchgen_kernels.cpu.matmul import ALIGNMENT, Matmul
from batchgen_kernels.cpu.program import ARGUMENT, CHUNKS, CODE, FIELDS, Code, Program
from batchgen_kernels.cpu.records import Quantise, record_bytes
from batchgen_kernels.cpu.rows import Gather, Norm, Rotate
from batchgen_kernels.metadata import AttentionMetadata, NeededRows
from batchgen_kernels.program import DecoderLayer
from batchgen_kernels.spec import AttentionSpec

_FLOAT = 4
_OF_LAYER = [
    Attend.QUERY_HEAD_STRIDE,
    Attend.SINKS,
    Attend.KEY,
    Attend.VALUE,
    Attend.KEY_SCALE,
    Attend.VALUE_SCALE,
    Attend.PAGE,
    Attend.ITEM_SIZE,
]
"""What is the same for a layer in all steps."""


@dataclass(frozen=True, slots=True)
class NormWeights:
    """x / sqrt(mean(x**2) + epsilon) * weight, `(width,)` float32."""

    weight: torch.Tensor
    epsilon: float


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer; products as `PackedWeights` says.

    Args:
        attention_norm: before `qkv`, or None.
        qkv: to queries, keys and values, side by side.
        query_norm, key_norm: of each head, or of all heads together, which the width tells; or None.
        rope: the number of the table by which queries and keys turn with their positions, or None.
        output: of attention; adds to the hidden states where no norm comes behind.
        output_norm: of what `output` gives, before it is added to the hidden states; or None.
        mlp_norm: before `gate_up`, or None.
        gate_up: a gated unit.
        down: of the gated unit, as `output`.
        down_norm: as `output_norm`.
    """

    attention_norm: NormWeights | None
    qkv: PackedWeights
    query_norm: NormWeights | None
    key_norm: NormWeights | None
    rope: int | None
    output: PackedWeights
    output_norm: NormWeights | None
    mlp_norm: NormWeights | None
    gate_up: PackedWeights
    down: PackedWeights
    down_norm: NormWeights | None

    @property
    def norms(self) -> list[NormWeights]:
        """Those that there are."""
        places = (
            *(self.attention_norm, self.query_norm, self.key_norm),
            *(self.output_norm, self.mlp_norm, self.down_norm),
        )
        return [norm for norm in places if norm is not None]

    def tensors(self) -> Iterator[torch.Tensor]:
        """All that is kept."""
        yield from (norm.weight for norm in self.norms)
        for product in (self.qkv, self.output, self.gate_up, self.down):
            yield from product.tensors()


@dataclass(frozen=True, slots=True)
class DecoderWeights:
    """All layers of a decoder, which are of one kind, and its last norm."""

    layers: Sequence[LayerWeights]
    norm: NormWeights
    hidden_size: int

    def tensors(self) -> Iterator[torch.Tensor]:
        """All that is kept."""
        yield self.norm.weight
        for layer in self.layers:
            yield from layer.tensors()

    def program(self, layers: Sequence[DecoderLayer], backend: CpuBackend, max_rows: int) -> DecoderProgram:
        """What runs them."""
        return DecoderProgram(self, layers, backend, max_rows)


@dataclass(slots=True)
class _Buffers:
    """Activations of at most `rows` rows."""

    rows: int
    hidden: torch.Tensor
    normed: torch.Tensor
    qkv: torch.Tensor
    attended: torch.Tensor
    gated: torch.Tensor
    records: torch.Tensor


@dataclass(slots=True)
class _Operations:
    """Numbers of the operations of each kind in the program, one a layer, and the last norm's."""

    attention_norm: list[int] = field(default_factory=list)
    qkv: list[int] = field(default_factory=list)
    rotate: list[int] = field(default_factory=list)
    rotate_by_table: dict[int, list[int]] = field(default_factory=dict)
    attend: list[int] = field(default_factory=list)
    gather: list[int] = field(default_factory=list)
    quantise_hidden: list[int] = field(default_factory=list)
    quantise_attended: list[int] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    output_norm: list[int] = field(default_factory=list)
    mlp_norm: list[int] = field(default_factory=list)
    gate_up: list[int] = field(default_factory=list)
    quantise_gated: list[int] = field(default_factory=list)
    down: list[int] = field(default_factory=list)
    down_norm: list[int] = field(default_factory=list)
    last_norm: list[int] = field(default_factory=list)

    @property
    def quantisations(self) -> list[int]:
        """All that are no part of a norm."""
        return [*self.quantise_hidden, *self.quantise_attended, *self.quantise_gated]

    @property
    def norms(self) -> list[int]:
        """All of them."""
        return [*self.attention_norm, *self.output_norm, *self.mlp_norm, *self.down_norm, *self.last_norm]

    def apart(self, numbers: Sequence[int]) -> tuple[list[int], list[int]]:
        """Those of all rows, and those behind the last layer's attention."""
        (border,) = self.gather
        return [n for n in numbers if n < border], [n for n in numbers if n > border]


class OperationTimes:
    """How long operations took in all runs since they are watched.

    Args:
        kinds: numbers of the operations of each kind.
        elapsed: `[count]` nanoseconds.
    """

    def __init__(self, kinds: Mapping[str, Sequence[int]], elapsed: npt.NDArray[np.int64]) -> None:
        self._kinds = kinds
        self._elapsed = elapsed

    def seconds(self) -> dict[str, float]:
        """Of each kind; writing to the cache is part of the rotation."""
        return {kind: float(self._elapsed[list(at)].sum()) / 1e9 for kind, at in self._kinds.items()}


class DecoderProgram:
    """Runs a decoder's layers over a packed step; one caller at a time.

    Args:
        weights: of the layers.
        layers: what each attends to.
        backend: of attention, whose scratch memory is shared.
        max_rows: of a step for which memory is kept from the start.
    """

    def __init__(
        self,
        weights: DecoderWeights,
        layers: Sequence[DecoderLayer],
        backend: CpuBackend,
        max_rows: int = 0,
    ) -> None:
        self._weights = weights
        self._layers = layers
        self._backend = backend
        self._numbers = _Operations()
        self._quantised = weights.layers[0].qkv.quantised
        self._fields = np.zeros((len(layers) * _operations(weights.layers[0]) + 2, FIELDS), dtype=np.int64)
        self._attend = np.zeros((len(layers), len(Attend)), dtype=np.int64)
        self._write = np.zeros((len(layers), len(Write)), dtype=np.int64)
        self._program = Program(self._fields, layers[0].cache.dtype, quantised=self._quantised)
        self._epsilons = np.zeros(len(self._fields) + len(layers), dtype=np.float64)
        self._of_layer = np.zeros((len(layers), len(_OF_LAYER)), dtype=np.int64)
        self._kinds: dict[tuple[AttentionSpec, int], list[int]] = {}
        self._describe()
        self._buffers = self._allocate(max_rows)
        self._cut: tuple[int, int, int] = (0, 0, 0)

    @property
    def buffer_bytes(self) -> int:
        """Memory that is kept for the activations of a step."""
        kept = self._buffers
        tensors = (kept.hidden, kept.normed, kept.qkv, kept.attended, kept.gated, kept.records)
        return sum(t.nbytes for t in tensors)

    def run(
        self,
        hidden: torch.Tensor,
        tables: Sequence[tuple[torch.Tensor, torch.Tensor]],
        metadata: Sequence[AttentionMetadata],
        needed: NeededRows | None = None,
    ) -> torch.Tensor:
        """Write keys and values of the step's tokens and compute all layers.

        Args:
            hidden: `(T, H)` float32, the embedded tokens.
            tables: cosines and sines of the step's positions, `(T, rotary size)` float32, by which the first
                numbers of a head turn.
            metadata: of each group of layers.
            needed: the rows that are read; all of them unless given.

        Returns:
            `(T, H)` float32, after the last norm; NaN in rows that are not needed.
        """
        rows, threads = len(hidden), torch.get_num_threads()
        tokens = metadata[0].num_tokens
        # Padding comes last, and attention makes nothing of it.
        some = None if needed is None or len(needed.on_host) >= tokens else needed.on_host
        read = np.arange(rows if needed is None else tokens) if some is None else some
        if rows > self._buffers.rows:
            self._buffers = self._allocate(rows)
        # torch would wake other threads for this, which costs more than it saves.
        np.copyto(self._buffers.hidden.numpy()[:rows, : self._weights.hidden_size], hidden.numpy())
        self._share_out(rows, len(read), threads)
        self._attend_to(metadata, some)
        fields, at = self._fields, self._numbers
        fields[at.gather, Gather.ROWS] = read.ctypes.data
        tables = [(cos.float().contiguous(), sin.float().contiguous()) for cos, sin in tables]
        for number, rotations in at.rotate_by_table.items():
            cos, sin = tables[number]
            fields[rotations, Rotate.COS], fields[rotations, Rotate.SIN] = cos.data_ptr(), sin.data_ptr()
            fields[rotations, Rotate.ROTARY_SIZE] = cos.shape[1]
        self._program.run(threads)
        out = torch.empty(rows, self._weights.hidden_size)
        out.numpy()[:] = np.nan
        out.numpy()[read] = self._buffers.hidden.numpy()[: len(read), : self._weights.hidden_size]
        return out

    def watch(self) -> OperationTimes:
        """From now on add up how long each kind of operation takes; costs a look at the clock for each."""
        at = self._numbers
        kinds = {
            "qkv": at.qkv,
            "rotation": at.rotate,
            "attention": at.attend,
            "output": at.output,
            "gate_up": at.gate_up,
            "down": at.down,
            "norm": at.norms,
        }
        if self._quantised:
            kinds["quantisation"] = at.quantisations
        return OperationTimes(kinds, self._program.watch())

    def _describe(self) -> None:
        """Everything that is the same in all steps."""
        at, count = self._numbers, itertools.count()
        for i, (layer, weights) in enumerate(zip(self._layers, self._weights.layers, strict=True)):
            self._describe_norm(at.attention_norm, count, weights.attention_norm)
            if weights.attention_norm is None:
                self._describe_quantisation(at.quantise_hidden, count)
            self._describe_product(at.qkv, next(count), weights.qkv)
            self._describe_rotation(next(count), i, layer, weights)
            self._describe_attention(next(count), i, layer)
            if i == len(self._layers) - 1:
                self._describe_gathering(next(count))
            self._describe_quantisation(at.quantise_attended, count)
            self._describe_product(at.output, next(count), weights.output)
            self._describe_norm(at.output_norm, count, weights.output_norm)
            self._describe_norm(at.mlp_norm, count, weights.mlp_norm)
            if weights.mlp_norm is None:
                self._describe_quantisation(at.quantise_hidden, count)
            self._describe_product(at.gate_up, next(count), weights.gate_up)
            self._describe_quantisation(at.quantise_gated, count)
            self._describe_product(at.down, next(count), weights.down)
            self._describe_norm(at.down_norm, count, weights.down_norm)
        self._describe_norm(at.last_norm, count, self._weights.norm)
        self._fields[at.output_norm + at.down_norm, Norm.ADDS] = 1

    def _describe_quantisation(self, numbers: list[int], count: Iterator[int]) -> None:
        if self._quantised:
            numbers.append(next(count))

    def _describe_norm(self, numbers: list[int], count: Iterator[int], norm: NormWeights | None) -> None:
        if norm is None:
            return
        number = next(count)
        numbers.append(number)
        operation = self._fields[number]
        operation[CODE] = Code.NORM
        operation[Norm.WEIGHT] = norm.weight.data_ptr()
        operation[Norm.WIDTH] = len(norm.weight)
        operation[Norm.EPSILON] = self._epsilon(number, norm.epsilon)
        operation[Norm.ROWS_PER_CHUNK] = ROWS_PER_CHUNK

    def _epsilon(self, place: int, value: float) -> int:
        self._epsilons[place] = value
        return self._epsilons[place:].ctypes.data

    def _describe_product(self, numbers: list[int], number: int, weights: PackedWeights) -> None:
        numbers.append(number)
        weights.describe(self._fields[number])

    def _describe_rotation(self, number: int, i: int, layer: DecoderLayer, weights: LayerWeights) -> None:
        self._numbers.rotate.append(number)
        if weights.rope is not None:
            self._numbers.rotate_by_table.setdefault(weights.rope, []).append(number)
        spec, operation = layer.spec, self._fields[number]
        operation[CODE] = Code.ROTATE
        operation[Rotate.NUM_HEADS], operation[Rotate.NUM_KV_HEADS] = spec.num_heads, spec.num_kv_heads
        operation[Rotate.HEAD_SIZE] = spec.head_size
        if weights.query_norm is not None and weights.key_norm is not None:
            operation[Rotate.QUERY_NORM] = weights.query_norm.weight.data_ptr()
            operation[Rotate.KEY_NORM] = weights.key_norm.weight.data_ptr()
            operation[Rotate.EPSILON] = self._epsilon(len(self._fields) + i, weights.query_norm.epsilon)
            operation[Rotate.WHOLE_NORMS] = len(weights.query_norm.weight) != spec.head_size
        operation[Rotate.WRITE] = self._write[i].ctypes.data
        operation[Rotate.ROWS_PER_CHUNK] = ROWS_PER_CHUNK
        argument = WriteArgument(
            block_size=layer.cache.block_size,
            num_kv_heads=spec.num_kv_heads,
            head_size=spec.head_size,
            v_head_size=spec.v_head_size,
            v_width=layer.cache.value.shape[3],
            key_token_stride=weights.qkv.out_stride * _FLOAT,
            key_head_stride=spec.head_size * _FLOAT,
            value_token_stride=weights.qkv.out_stride * _FLOAT,
            value_head_stride=spec.v_head_size * _FLOAT,
        )
        point_to(argument, layer.cache)
        self._write[i] = _numbers(argument)

    def _describe_attention(self, number: int, i: int, layer: DecoderLayer) -> None:
        self._numbers.attend.append(number)
        self._fields[number, CODE] = Code.ATTEND
        self._fields[number, ARGUMENT] = self._attend[i].ctypes.data
        self._kinds.setdefault((layer.spec, layer.group), []).append(i)
        argument = AttendArgument(
            query_head_stride=layer.spec.head_size,
            sinks=0 if layer.sinks is None else layer.sinks.data_ptr(),
        )
        point_to(argument, layer.cache)
        self._of_layer[i] = _numbers(argument)[_OF_LAYER]

    def _describe_gathering(self, number: int) -> None:
        self._numbers.gather.append(number)
        self._fields[number, CODE] = Code.GATHER
        self._fields[number, Gather.ROWS_PER_CHUNK] = ROWS_PER_CHUNK

    def _allocate(self, rows: int) -> _Buffers:
        layer, attention = self._weights.layers[0], self._layers[0].spec
        aligned = -(-self._weights.hidden_size // ALIGNMENT) * ALIGNMENT
        buffers = _Buffers(
            rows,
            torch.zeros(rows, aligned),
            torch.zeros(rows, aligned),
            torch.zeros(rows, layer.qkv.out_stride),
            torch.zeros(rows, attention.num_heads * attention.v_head_size),
            torch.zeros(rows, layer.gate_up.out_stride),
            torch.zeros(rows, self._record_bytes(), dtype=torch.uint8),
        )
        fields, at = self._fields, self._numbers
        fields[at.gather, Gather.X], fields[at.gather, Gather.X_STRIDE] = _place(buffers.hidden)
        fields[at.gather, Gather.OUT], fields[at.gather, Gather.OUT_STRIDE] = _place(buffers.normed)
        fields[at.gather, Gather.WIDTH] = aligned
        fields[at.rotate, Rotate.X], fields[at.rotate, Rotate.X_STRIDE] = _place(buffers.qkv)
        keys = buffers.qkv.data_ptr() + _FLOAT * attention.num_heads * attention.head_size
        self._write[:, Write.KEY_IN] = keys
        self._write[:, Write.VALUE_IN] = keys + _FLOAT * attention.num_kv_heads * attention.head_size
        of_all, of_needed = 0, 1
        self._place(buffers, of_all, buffers.hidden, buffers.normed)
        # Needed rows are copied to where results of norms were, and change places with those from there on.
        self._place(buffers, of_needed, buffers.normed, buffers.hidden)
        return buffers

    def _place(self, buffers: _Buffers, half: int, hidden: torch.Tensor, normed: torch.Tensor) -> None:
        """Tell one of the two halves of `apart` where hidden states are, and what norms make of them."""
        fields, at = self._fields, self._numbers
        # What is normed before it is added lies where the norm before its product has put what that read.
        for numbers, source, target in (
            ([*at.attention_norm, *at.mlp_norm, *at.last_norm], hidden, normed),
            ([*at.output_norm, *at.down_norm], normed, hidden),
        ):
            norms = at.apart(numbers)[half]
            fields[norms, Norm.X], fields[norms, Norm.X_STRIDE] = _place(source)
            fields[norms, Norm.OUT], fields[norms, Norm.OUT_STRIDE] = _place(target)
        for numbers, source, target in (
            (at.qkv, normed if at.attention_norm else hidden, buffers.qkv),
            (at.output, buffers.attended, normed if at.output_norm else hidden),
            (at.gate_up, normed if at.mlp_norm else hidden, buffers.gated),
            (at.down, buffers.gated, normed if at.down_norm else hidden),
        ):
            products = at.apart(numbers)[half]
            fields[products, Matmul.X], fields[products, Matmul.X_STRIDE] = _place(
                buffers.records if self._quantised else source
            )
            fields[products, Matmul.OUT], fields[products, Matmul.OUT_STRIDE] = _place(target)
        if self._quantised:
            self._place_records(buffers, half, hidden)

    def _record_bytes(self) -> int:
        """Of the widest records of a layer's products, if they take any."""
        layer = self._weights.layers[0]
        widest = max(w.in_features for w in (layer.qkv, layer.output, layer.gate_up, layer.down))
        return record_bytes(widest) if self._quantised else 0

    def _place_records(self, buffers: _Buffers, half: int, hidden: torch.Tensor) -> None:
        fields, at, layer = self._fields, self._numbers, self._weights.layers[0]
        for norms in (at.attention_norm, at.mlp_norm):
            fields[norms, Norm.RECORDS], fields[norms, Norm.RECORD_STRIDE] = _place(buffers.records)
        for numbers, source, weights in (
            (at.quantise_hidden, hidden, layer.qkv),
            (at.quantise_attended, buffers.attended, layer.output),
            (at.quantise_gated, buffers.gated, layer.down),
        ):
            rows = source[:, : weights.in_features]
            for number in at.apart(numbers)[half]:
                quantise(fields[number], rows, buffers.records)

    def _share_out(self, rows: int, needed: int, threads: int) -> None:
        """Cut every operation but attention into chunks."""
        if self._cut == (rows, needed, threads):
            return
        fields, at, first = self._fields, self._numbers, self._weights.layers[0]
        for numbers, weights in (
            (at.qkv, first.qkv),
            (at.output, first.output),
            (at.gate_up, first.gate_up),
            (at.down, first.down),
        ):
            for products, count in zip(at.apart(numbers), (rows, needed), strict=True):
                panels, per_chunk, chunks = cut(weights, max(1, count), threads)
                fields[products, Matmul.NUM_ROWS] = count
                fields[products, CHUNKS] = chunks if count else 0
                fields[products, Matmul.PANELS_PER_CHUNK] = panels
                fields[products, Matmul.ROWS_PER_CHUNK] = per_chunk
        for num_rows, numbers in (
            (Norm.NUM_ROWS, at.norms),
            (Rotate.NUM_ROWS, at.rotate),
            (Quantise.NUM_ROWS, at.quantisations),
        ):
            for each, count in zip(at.apart(numbers), (rows, needed), strict=True):
                fields[each, num_rows], fields[each, CHUNKS] = count, -(-count // ROWS_PER_CHUNK)
        fields[at.gather, Gather.NUM_ROWS] = needed
        fields[at.gather, CHUNKS] = -(-needed // ROWS_PER_CHUNK)
        self._write[:, Write.NUM_ROWS] = rows
        self._cut = rows, needed, threads

    def _attend_to(self, metadata: Sequence[AttentionMetadata], needed: npt.NDArray[np.int64] | None) -> None:
        """Where this step's tokens are written and what they see; in the last layer those that are needed."""
        last = len(self._layers) - 1
        for (spec, group), numbers in self._kinds.items():
            cache = self._layers[numbers[0]].cache
            self._write[numbers, Write.SLOTS] = self._backend.slots(cache, metadata[group])
            self._attend_in([i for i in numbers if i != last], cache, metadata[group], spec, None)
            self._attend_in([i for i in numbers if i == last], cache, metadata[group], spec, needed)
        self._attend[:, _OF_LAYER] = self._of_layer
        self._attend[:, Attend.SCRATCH] = self._backend.scratch
        self._attend[:, Attend.QUERY] = self._buffers.qkv.data_ptr()
        self._attend[:, Attend.QUERY_TOKEN_STRIDE] = self._buffers.qkv.shape[1]
        self._attend[:, Attend.OUT] = self._buffers.attended.data_ptr()

    def _attend_in(
        self,
        layers: list[int],
        cache: KVCache,
        metadata: AttentionMetadata,
        spec: AttentionSpec,
        needed: npt.NDArray[np.int64] | None,
    ) -> None:
        if layers:
            argument, plan = self._backend.argument(cache, metadata, spec, needed)
            self._attend[layers] = _numbers(argument)
            self._fields[[self._numbers.attend[i] for i in layers], CHUNKS] = len(plan.chunks)


def _operations(layer: LayerWeights) -> int:
    """Of a layer."""
    norms = (layer.attention_norm, layer.output_norm, layer.mlp_norm, layer.down_norm)
    quantisations = 2 + sum(norm is None for norm in (layer.attention_norm, layer.mlp_norm))
    # Four products, the rotation and attention.
    return 6 + sum(norm is not None for norm in norms) + quantisations * layer.qkv.quantised


def _numbers(argument: ctypes.Structure) -> npt.NDArray[np.int64]:
    return np.frombuffer(bytes(argument), dtype=np.int64)


def _place(tensor: torch.Tensor) -> tuple[int, int]:
    """Address, and numbers between rows."""
    return tensor.data_ptr(), tensor.stride(0)
