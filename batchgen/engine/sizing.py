"""Size the memory of an engine whose model is there, and make its runner."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from batchgen.core.kv_layout import KVCacheLayout
from batchgen.engine.config import EngineConfig
from batchgen.engine.device import Device, DeviceMemory
from batchgen.engine.device_step import run_largest_step
from batchgen.engine.graphs import bucket_sizes, graph_bytes
from batchgen.engine.kv_memory import plan_kv_layout
from batchgen.engine.memory import ALL, SOME, Budget, CacheShape, MemoryPlan, available_memory, plan_memory
from batchgen.engine.runner import ModelRunner
from batchgen.engine.step_memory import SCRATCH_BLOCKS, StepMemory, largest_step
from batchgen.grammar import counted
from batchgen.models.dtypes import DTYPES
from batchgen.models.footprint import mapped_bytes, weight_bytes
from batchgen.models.layer_attention import LayerAttention
from batchgen.types import Task
from batchgen_kernels.backend import AttentionBackend

if TYPE_CHECKING:
    from batchgen.models.loader import LoadedModel
    from batchgen.models.prepared import PreparedModel
    from batchgen_kernels.cpu.decoder import DecoderWeights
    from batchgen_kernels.triton_kernels.program import DeviceWeights

GPU_SHARE = 0.92
"""Of a GPU's free memory that an engine takes: the rest is for code that is loaded while it runs, for what
the allocator loses between tensors of different steps, and for who shares the GPU."""
INVARIANT_GRAPH_TOKENS = 4096
"""A captured step launches attention for every piece of 512 keys that its longest sequence may have. To find
that it has not so many takes some 2 us, a few loads one after the other, of which a chip hides a thousand at
a time: 8 pieces of 8 heads of 64 rows are 8 us a layer, where launching kernel by kernel takes the host 40;
those of a context of 131,072 keys would be 260. Attention to longer sequences takes longer than to launch it.
"""
KV_DTYPE_NAMES = {**DTYPES, "int8": torch.int8, "fp8": torch.float8_e4m3fn}
_WITHOUT_LOGITS = frozenset({Task.EMBED, Task.CLASSIFY})
"""Tasks for which a model is loaded without what makes logits of tokens."""


class Sizing(ABC):
    """A model and what its layers need, for which memory is planned.

    Args:
        config: with every setting resolved that does not depend on memory.
        loaded: the model.
        layers: what each layer's attention needs.
        backend: of attention.
        device: where everything is.
        step: the memory of the largest step; None: it is measured.
    """

    def __init__(
        self,
        config: EngineConfig,
        loaded: LoadedModel | PreparedModel,
        layers: list[LayerAttention],
        backend: AttentionBackend,
        device: Device,
        step: StepMemory | None = None,
    ) -> None:
        assert config.max_num_batched_tokens is not None
        assert config.max_num_seqs is not None
        assert config.block_size is not None
        assert config.num_threads is not None
        self.max_tokens, self.max_seqs = config.max_num_batched_tokens, config.max_num_seqs
        self.threads = config.num_threads
        self.layers = layers
        self.step = step
        self._block_size = config.block_size
        self._config = config
        self._model = loaded
        self._backend = backend
        self.device = device
        self._kv_dtype = KV_DTYPE_NAMES[config.kv_cache_dtype]

    @property
    @abstractmethod
    def decoder(self) -> DecoderWeights | DeviceWeights | None:
        """Of the layers, where they run as one program."""

    @property
    @abstractmethod
    def description(self) -> str | None:
        """How the layers are computed, for a person; None where there is nothing to say."""

    @abstractmethod
    def kept(self) -> list[torch.nn.Module]:
        """Modules that hold the weights when all is settled."""

    def memory(self) -> MemoryPlan:
        """How much the cache gets.

        Raises:
            UsageError: one sequence does not fit; says which knob to turn.
        """
        config, model = self._config, self._model
        context = model.context if config.max_model_len is None else model.longest
        layout = plan_kv_layout(
            self.layers,
            self._backend,
            self._kv_dtype,
            block_size=self._block_size,
            max_chunk=self.max_tokens,
            max_tokens=config.max_model_len or context,
        )
        return plan_memory(
            shape=CacheShape(layout, self._block_size, self.max_tokens),
            context=context,
            max_model_len=config.max_model_len,
            max_num_seqs=self.max_seqs,
            kv_cache_memory=config.kv_cache_memory,
            budget=self._budget(layout),
        )

    def _budget(self, layout: KVCacheLayout) -> Budget:
        step = self.step = self.step or self._measured(layout)
        kept, memory = self.kept(), self.device.memory
        if memory is not None:
            available, share = int(memory.free() * GPU_SHARE), ALL
        else:
            # Pages of a mapped file count as memory that can be had, but weights are needed in every step.
            available, share = max(0, available_memory() - mapped_bytes(kept)), SOME
        return Budget(
            available=available // self._config.sharers,
            weights=weight_bytes(kept),
            step=step.step,
            scoring=step.scoring,
            graphs=step.graphs,
            step_name=f"{counted(self.max_tokens, 'token')}, {self.max_seqs:,} sampled",
            share=share,
        )

    def _measured(self, layout: KVCacheLayout) -> StepMemory:
        memory, scores = self.device.memory, self._model.task not in _WITHOUT_LOGITS
        scratch = self.runner(layout, SCRATCH_BLOCKS, row_multiple=1)
        if memory is None:
            step = largest_step(scratch, tokens=self.max_tokens, sampled=self.max_seqs, scores=scores)
        else:
            step = run_largest_step(
                scratch,
                memory,
                tokens=self.max_tokens,
                sampled=self.max_seqs,
                longest=self._config.max_model_len or self._model.context,
                # Otherwise a step takes no more behind a long context than behind a short one.
                whole_context=self._config.deterministic is True,
                scores=scores,
            )
            if self.captures:
                step = replace(step, graphs=self._graph_bytes(scratch, memory))
        scratch.close()
        return step

    @property
    def captures(self) -> bool:
        """Whether steps that only decode are to be captured."""
        asked, makes_logits = self._config.cuda_graphs, self._model.task not in _WITHOUT_LOGITS
        # What transformers computes may wait for the device, as it does where experts are chosen.
        wanted = asked is True or (asked == "auto" and self.decoder is not None)
        return wanted and makes_logits and self.device.capture is not None

    def graph_sizes(self, row_multiple: int) -> list[int]:
        """Of steps that are captured."""
        return bucket_sizes(min(self.max_seqs, self.max_tokens), row_multiple)

    def graph_tokens(self, longest: int) -> int:
        """Of the longest sequence in a captured step, where sequences have at most `longest`."""
        return min(longest, INVARIANT_GRAPH_TOKENS) if self._config.deterministic is True else longest

    def _graph_bytes(self, scratch: ModelRunner, memory: DeviceMemory) -> int:
        longest = self.graph_tokens(self._config.max_model_len or self._model.context)
        try:
            sizes = self.graph_sizes(1)
            more = max(0, len(scratch.shared_sizes(sizes, longest)) - 1)
            return graph_bytes(memory, lambda some: scratch.capture(some, longest), sizes, more)
        except Exception:
            # It will fail again, and be told, when the engine is ready.
            return 0

    def runner(self, layout: KVCacheLayout, num_blocks: int, row_multiple: int) -> ModelRunner:
        """A runner with a cache of so many blocks."""
        return ModelRunner(
            self._model,
            self.layers,
            self._backend,
            layout,
            kv_dtype=self._kv_dtype,
            num_blocks=num_blocks,
            block_size=self._block_size,
            row_multiple=row_multiple,
            device=self.device,
            decoder=self.decoder,
            max_rows=self.max_tokens,
        )
