"""Run one step of the model: pack, forward, logits of the rows that sample, and of others when asked.

`ModelRunner` owns the memory of the KV cache. It knows nothing of queues or stop
conditions; `EngineCore` calls it once a step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from batchgen.core.kv_layout import KVCacheLayout
from batchgen.core.scheduler import SchedulerOutput
from batchgen.engine.device import HOST, Device
from batchgen.engine.graphs import GraphShape, StepGraphs, shared_sizes
from batchgen.engine.inputs import PackedStep, PendingTokens, Sharing, pack_step, round_up
from batchgen.engine.kv_memory import KVMemory
from batchgen.engine.transfer import Transfer
from batchgen.models.forward_context import forward_context
from batchgen.models.layer_attention import LayerAttention
from batchgen_kernels.backend import AttentionBackend
from batchgen_kernels.program import DecoderLayer, LayersProgram
from batchgen_kernels.shared_prefix import SharingCost

if TYPE_CHECKING:
    from batchgen.models.loader import LoadedModel
    from batchgen.models.prepared import PreparedModel
    from batchgen_kernels.cpu.decoder import DecoderWeights
    from batchgen_kernels.triton_kernels.program import DeviceWeights


class _StepContext:
    """The forward context of one step: writes a layer's K/V, then attends."""

    def __init__(self, runner: ModelRunner, step: PackedStep) -> None:
        self.runner = runner
        self.metadata = step.metadata
        self.needed = step.needed

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        **options: Any,
    ) -> torch.Tensor:
        index: int = module.layer_idx  # type: ignore[assignment]
        layer, cache = self.runner.layers[index], self.runner.kv.caches[index]
        backend, metadata = self.runner.backend, self.metadata[self.runner.layout.places[index].group]
        if layer.source is None:
            backend.write(cache, key[0].transpose(0, 1), value[0].transpose(0, 1), metadata)
        out = backend.attend(query[0].transpose(0, 1), cache, metadata, layer.spec, layer.sinks)
        return out.unsqueeze(0)

    def decode(
        self, hidden: torch.Tensor, tables: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> torch.Tensor:
        program = self.runner.program
        assert program is not None
        return program.run(hidden, tables, self.metadata, self.needed)


class ModelRunner:
    """A model with its paged KV cache.

    Args:
        loaded: the model.
        layers: what each layer's attention needs, from the probe.
        backend: computes attention and knows what is in a page.
        layout: which layers share block tables and memory.
        kv_dtype: what keys and values are stored as.
        num_blocks: blocks in the pool, the null block included.
        block_size: tokens in a block.
        row_multiple: forward passes are padded to a multiple of this many rows.
        device: where all of this is.
        decoder: the weights of the layers, where they run as one program.
        max_rows: for which such a program keeps memory; longer steps take more.
    """

    def __init__(
        self,
        loaded: LoadedModel | PreparedModel,
        layers: list[LayerAttention],
        backend: AttentionBackend,
        layout: KVCacheLayout,
        *,
        kv_dtype: torch.dtype,
        num_blocks: int,
        block_size: int,
        row_multiple: int,
        device: Device = HOST,
        decoder: DecoderWeights | DeviceWeights | None = None,
        max_rows: int = 0,
    ) -> None:
        self.parts = loaded.parts()
        self.layers = layers
        self.backend = backend
        self.block_size = block_size
        self.row_multiple = row_multiple
        self.layout = layout
        self.device = device
        self.transfer = Transfer(device)
        self.kv = KVMemory(
            layout, layers, backend, kv_dtype, num_blocks=num_blocks, block_size=block_size, device=device
        )
        self.sharing = self._sharing(loaded.dtype)
        self.program = None if decoder is None else self._program(decoder, max_rows)
        self.graphs: StepGraphs | None = None

    def _sharing(self, dtype: torch.dtype) -> Sharing:
        """What shared keys cost in the layers of each group; what is so of one of them is so of others."""
        costs: list[SharingCost | None] = [None] * len(self.layout.groups)
        for layer, cache, place in zip(self.layers, self.kv.caches, self.layout.places, strict=True):
            costs[place.group] = costs[place.group] or self.backend.sharing(layer.spec, dtype, cache)
        return costs

    def _program(self, decoder: DecoderWeights | DeviceWeights, max_rows: int) -> LayersProgram:
        layers = [
            DecoderLayer(layer.spec, cache, place.group, layer.sinks)
            for layer, cache, place in zip(self.layers, self.kv.caches, self.layout.places, strict=True)
        ]
        return decoder.program(layers, self.backend, max_rows)  # type: ignore[arg-type]

    @torch.inference_mode()
    def execute(
        self, output: SchedulerOutput, pending: PendingTokens | None = None, *, whole: bool = False
    ) -> torch.Tensor:
        """Compute the scheduled tokens.

        Args:
            output: what is to be computed.
            pending: tokens of it that the device has and the host not yet.
            whole: whether `hidden` is to have all rows.

        Returns:
            `(R, vocab)` float32 logits on the device, a row for each scheduled request with `samples`, in
            order.
        """
        self.kv.copy_blocks(output.copies)
        if self.graphs is not None and not whole and self.graphs.takes(output):
            return self.graphs.run(output, pending)
        step = pack_step(
            output, self.block_size, self.row_multiple, self.transfer, self.sharing, pending, whole=whole
        )
        return self.forward(step)

    @torch.inference_mode()
    def forward(self, step: PackedStep) -> torch.Tensor:
        """One packed forward pass; see `execute` for the result."""
        return self._compute(step)[: len(step.samplers)].float()

    def _compute(self, step: PackedStep) -> torch.Tensor:
        """Logits of all `logits_rows`, as the model makes them."""
        with forward_context(_StepContext(self, step)):
            return self.parts.forward(step.input_ids, step.position_ids, step.logits_rows)

    def capture(self, sizes: Sequence[int], longest: int) -> None:
        """Let steps that only decode be launched as a whole from now on.

        Args:
            sizes: of steps, the largest first; none: no more.
            longest: tokens of the longest sequence in such a step.

        Raises:
            Exception: of any kind, where a step does what cannot be captured; none is then.
        """
        self.graphs = None
        if sizes and self.device.capture is not None:
            blocks = -(-longest // self.block_size)
            shape = GraphShape(
                sizes,
                self.shared_sizes(sizes, longest),
                len(self.layout.groups),
                blocks,
                self.block_size,
                self.sharing,
            )
            self.graphs = StepGraphs(self._compute, shape, self.transfer, self.device.capture())

    def shared_sizes(self, sizes: Sequence[int], longest: int) -> list[int]:
        """Those of `capture` in which steps are captured that attend to shared keys once."""
        return shared_sizes(sizes, self.sharing, longest)

    @property
    def hidden(self) -> torch.Tensor:
        """`(T, H)` hidden states after the final norm, of the latest step: one request after the other.

        Rows that the step did not need may be NaN.
        """
        return self.parts.hidden

    @torch.inference_mode()
    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """`(R, V)` float32 logits of `(R, H)` hidden states."""
        missing = round_up(len(hidden), self.row_multiple) - len(hidden)
        padded = torch.cat([hidden, hidden[:1].expand(missing, -1)]) if missing else hidden
        return self.parts.head(padded)[: len(hidden)].float()

    def close(self) -> None:
        """Give the memory of the KV cache back, and that of the weights if nobody else holds the model."""
        self.graphs = self.program = None
        self.kv.close()
        self.parts.close()
        self.device.give_back()
