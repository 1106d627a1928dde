"""The layers of a dense decoder on a device, as one program, for models whose layers compute

    h = h + m * norm(output(attend(rotate(norm(qkv(norm(h)))))))
    h = h + m * norm(down(activation(gate(norm(h))) * up(norm(h))))

where each norm may be missing. What weights multiply is torch's, which calls the vendor's library,
or a kernel of our own where a row's bits must not depend on its batch; what lies between is one kernel each:
norms, rotation with the norms of heads and the write to the cache, attention, the gated activation. Sums
with the hidden states are part of the product where no norm comes behind it.

Of the last layer, what follows its keys and values is computed for the rows alone that somebody reads: the
rotated queries of these are gathered, and attend as a step of their own. Queries of all rows are still
multiplied, as they are part of one product with keys and values: for a model of 8 billion weights 8 % of the
layer, of which output and gated unit are 88 %, and attention of all rows may be a tenth and more beside it.

Nothing waits for the device, and activations lie in buffers that are kept, so that a step can be captured.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from batchgen_kernels.metadata import AttentionMetadata, NeededRows, RowsApart
from batchgen_kernels.program import DecoderLayer
from batchgen_kernels.triton_kernels import layers as kernels
from batchgen_kernels.triton_kernels.backend import TritonBackend
from batchgen_kernels.triton_kernels.layers import HeadNorms
from batchgen_kernels.triton_kernels.matmul import multiply


@dataclass(frozen=True, slots=True)
class DeviceNorm:
    """x / sqrt(mean(x**2) + epsilon) * weight, or times 1 + weight with `unit_offset`; `(width,)`."""

    weight: torch.Tensor
    epsilon: float
    unit_offset: bool = False


@dataclass(frozen=True, slots=True)
class DeviceProduct:
    """x @ weight.T + bias: `(out_features, in_features)`, and `(out_features,)` or None."""

    weight: torch.Tensor
    bias: torch.Tensor | None = None

    def tensors(self) -> list[torch.Tensor]:
        """All that is kept."""
        return [self.weight, *([] if self.bias is None else [self.bias])]


@dataclass(frozen=True, slots=True)
class DeviceLayer:
    """One layer.

    Args:
        attention_norm: before `qkv`, or None.
        qkv: to queries, keys and values, side by side.
        query_norm, key_norm: of each head, or of all heads together, which the width tells; or None.
        rope: the number of the table by which queries and keys turn with their positions, or None.
        output: of attention.
        output_norm: of what `output` gives, before it is added to the hidden states; or None.
        mlp_norm: before `gate_up`, or None.
        gate_up: the two halves of a gated unit, side by side.
        activation: of `layer_reference.ACTIVATIONS`.
        down: of the gated unit, as `output`.
        down_norm: as `output_norm`.
        multiplier: of what is added to the hidden states.
    """

    attention_norm: DeviceNorm | None
    qkv: DeviceProduct
    query_norm: DeviceNorm | None
    key_norm: DeviceNorm | None
    rope: int | None
    output: DeviceProduct
    output_norm: DeviceNorm | None
    mlp_norm: DeviceNorm | None
    gate_up: DeviceProduct
    activation: str
    down: DeviceProduct
    down_norm: DeviceNorm | None
    multiplier: float = 1.0

    def tensors(self) -> Iterator[torch.Tensor]:
        """All that is kept."""
        for norm in (
            *(self.attention_norm, self.query_norm, self.key_norm),
            *(self.output_norm, self.mlp_norm, self.down_norm),
        ):
            if norm is not None:
                yield norm.weight
        for product in (self.qkv, self.output, self.gate_up, self.down):
            yield from product.tensors()


@dataclass(frozen=True, slots=True)
class DeviceWeights:
    """All layers of a decoder, whose products are of the same shapes, and its last norm."""

    layers: Sequence[DeviceLayer]
    norm: DeviceNorm

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states."""
        return len(self.norm.weight)

    def tensors(self) -> Iterator[torch.Tensor]:
        """All that is kept."""
        yield self.norm.weight
        for layer in self.layers:
            yield from layer.tensors()

    def program(self, layers: Sequence[DecoderLayer], backend: TritonBackend, max_rows: int) -> TritonProgram:
        """What runs them."""
        return TritonProgram(self, layers, backend, max_rows)


@dataclass(frozen=True, slots=True)
class _Buffers:
    """Activations of some rows; `shared` holds those of attention, and then those of the gated unit."""

    hidden: torch.Tensor
    normed: torch.Tensor
    shared: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, ...]:
        return self.hidden, self.normed, self.shared

    def first(self, rows: int) -> _Buffers:
        return _Buffers(self.hidden[:rows], self.normed[:rows], self.shared)

    def select(self, rows: torch.Tensor) -> _Buffers:
        """Some rows of the hidden states, put where `normed` was."""
        some = _Buffers(self.normed[: len(rows)], self.hidden[: len(rows)], self.shared)
        torch.index_select(self.hidden, 0, rows, out=some.hidden)
        return some

    def carve(self, *widths: int, rows: int | None = None) -> list[torch.Tensor]:
        """A contiguous `(rows, width)` for each width, one behind the other; of all rows unless given."""
        rows = len(self.hidden) if rows is None else rows
        parts = torch.split(self.shared[: rows * sum(widths)], [rows * width for width in widths])
        return [part.view(rows, width) for part, width in zip(parts, widths, strict=True)]


class TritonProgram:
    """See `LayersProgram`.

    Args:
        weights: of the layers.
        layers: what each attends to.
        backend: of attention.
        max_rows: of a step for which memory is kept; longer ones take memory of their own.
    """

    def __init__(
        self,
        weights: DeviceWeights,
        layers: Sequence[DecoderLayer],
        backend: TritonBackend,
        max_rows: int = 0,
    ) -> None:
        self._weights = weights
        self._layers = list(zip(weights.layers, layers, strict=True))
        self._backend = backend
        self._spec = layers[0].spec
        self._max_rows = max_rows
        self._kept = self._allocate(max_rows)

    @property
    def buffer_bytes(self) -> int:
        """See `LayersProgram`."""
        return sum(tensor.nbytes for tensor in self._kept.tensors)

    @torch.inference_mode()
    def run(
        self,
        hidden: torch.Tensor,
        tables: Sequence[tuple[torch.Tensor, torch.Tensor]],
        metadata: Sequence[AttentionMetadata],
        needed: NeededRows | None = None,
    ) -> torch.Tensor:
        """See `LayersProgram`; in the dtype of the weights, NaN in rows that are not needed."""
        rows = len(hidden)
        buffers = self._kept.first(rows) if rows <= self._max_rows else self._allocate(rows)
        buffers.hidden.copy_(hidden)
        still = _still(tables[0]) if any(w.rope is None for w, _ in self._layers) else None
        apart, last = None if needed is None else needed.apart, self._layers[-1][0]
        for weights, layer in self._layers:
            table = still if weights.rope is None else tables[weights.rope]
            assert table is not None
            some = apart if weights is last else None
            buffers = self._attend(buffers, weights, layer, table, metadata[layer.group], some)
            self._transform(buffers, weights)
        if apart is None:
            return _normed(buffers.hidden, self._weights.norm, torch.empty_like(buffers.hidden))
        out = buffers.hidden.new_full(hidden.shape, torch.nan)
        return out.index_copy_(0, apart.rows, _normed(buffers.hidden, self._weights.norm, buffers.normed))

    def watch(self) -> None:
        """None: the host does not know how long the device takes for what."""

    def _attend(
        self,
        buffers: _Buffers,
        weights: DeviceLayer,
        layer: DecoderLayer,
        table: tuple[torch.Tensor, torch.Tensor],
        metadata: AttentionMetadata,
        some: RowsApart | None,
    ) -> _Buffers:
        """The first half of a layer; all behind its keys and values for some rows alone, or for all.

        Returns:
            Where the hidden states of these rows are.
        """
        spec = layer.spec
        widths = self._attention_widths
        qkv, turned, *normed = buffers.carve(sum(widths), widths[0], *self._whole_norm_widths(weights))
        self._multiply(_normed(buffers.hidden, weights.attention_norm, buffers.normed), weights.qkv, qkv)
        query, key, value = torch.split(qkv, widths, dim=1)
        if normed:
            query, key = (
                _normed(query, weights.query_norm, normed[0]),
                _normed(key, weights.key_norm, normed[1]),
            )
        query = kernels.rotate_and_write(
            torch.unflatten(query, 1, (spec.num_heads, spec.head_size)),
            torch.unflatten(key, 1, (spec.num_kv_heads, spec.head_size)),
            torch.unflatten(value, 1, (spec.num_kv_heads, spec.v_head_size)),
            *table,
            layer.cache,
            metadata,
            norms=None if normed else _head_norms(weights),
            out=turned.view(-1, spec.num_heads, spec.head_size),
        )
        if some is not None:
            # Queries go to where they came from, and hidden states to where they were normed.
            (chosen,) = buffers.carve(widths[0], rows=len(some.rows))
            query = torch.index_select(turned, 0, some.rows, out=chosen).view(-1, *query.shape[1:])
            buffers, metadata = buffers.select(some.rows), some.metadata(metadata)
        attended = self._backend.attend(query, layer.cache, metadata, spec, layer.sinks)
        self._add(buffers, attended.flatten(1), weights.output, weights.output_norm, weights.multiplier)
        return buffers

    def _transform(self, buffers: _Buffers, weights: DeviceLayer) -> None:
        """The second half: the gated unit."""
        width = weights.down.weight.shape[1]
        both, gated = buffers.carve(2 * width, width)
        self._multiply(_normed(buffers.hidden, weights.mlp_norm, buffers.normed), weights.gate_up, both)
        gate, up = both.chunk(2, dim=1)
        kernels.gated(gate, up, weights.activation, out=gated)
        self._add(buffers, gated, weights.down, weights.down_norm, weights.multiplier)

    def _add(
        self,
        buffers: _Buffers,
        x: torch.Tensor,
        product: DeviceProduct,
        norm: DeviceNorm | None,
        multiplier: float,
    ) -> None:
        """Add to the hidden states what a product gives, after a norm if there is one."""
        hidden = buffers.hidden
        if norm is None and self._backend.invariant:
            multiply(x, product.weight, product.bias, out=hidden, factor=multiplier)
            return
        if norm is None:
            hidden.addmm_(x, product.weight.t(), alpha=multiplier)
            if product.bias is not None:
                hidden.add_(product.bias, alpha=multiplier)
            return
        self._multiply(x, product, buffers.normed)
        hidden.add_(_normed(buffers.normed, norm, buffers.normed), alpha=multiplier)

    def _multiply(self, x: torch.Tensor, product: DeviceProduct, out: torch.Tensor) -> None:
        if self._backend.invariant:
            multiply(x, product.weight, product.bias, out=out)
        elif product.bias is None:
            torch.mm(x, product.weight.t(), out=out)
        else:
            torch.addmm(product.bias, x, product.weight.t(), out=out)

    @property
    def _attention_widths(self) -> list[int]:
        """Of queries, keys and values of a row."""
        spec = self._spec
        return [
            spec.num_heads * spec.head_size,
            spec.num_kv_heads * spec.head_size,
            spec.num_kv_heads * spec.v_head_size,
        ]

    def _whole_norm_widths(self, weights: DeviceLayer) -> list[int]:
        """Of queries and keys, where they are normalised over all heads together."""
        norms = (weights.query_norm, weights.key_norm)
        found = [len(norm.weight) for norm in norms if norm is not None]
        return found if found == self._attention_widths[:2] and self._spec.num_heads > 1 else []

    def _allocate(self, rows: int) -> _Buffers:
        first, widths = self._weights.layers[0], self._attention_widths
        of_attention = sum(widths) + widths[0] + sum(self._whole_norm_widths(first))
        widest = max(of_attention, 3 * first.down.weight.shape[1])

        def empty(*sizes: int) -> torch.Tensor:
            return self._weights.norm.weight.new_empty(sizes, dtype=first.qkv.weight.dtype)

        hidden = self._weights.hidden_size
        return _Buffers(empty(rows, hidden), empty(rows, hidden), empty(rows * widest))


def _normed(x: torch.Tensor, norm: DeviceNorm | None, out: torch.Tensor) -> torch.Tensor:
    """`x` where there is no norm."""
    if norm is None:
        return x
    return kernels.rms_norm(x, norm.weight, norm.epsilon, unit_offset=norm.unit_offset, out=out)[0]


def _head_norms(weights: DeviceLayer) -> HeadNorms | None:
    query, key = weights.query_norm, weights.key_norm
    if query is None or key is None:
        return None
    return HeadNorms(query.weight, key.weight, query.epsilon, query.unit_offset)


def _still(table: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """A table like `table` by which nothing turns."""
    cos, sin = table
    return torch.ones_like(cos), torch.zeros_like(sin)
