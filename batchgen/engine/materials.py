"""What an engine is made of once its model is loaded: sizes its memory and makes its runner.

`build.py` puts the rest together. The runner is checked against transformers before it is given out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from batchgen.core.kv_layout import KVCacheLayout
from batchgen.engine.config import EngineConfig
from batchgen.engine.invariance import find_row_multiple
from batchgen.engine.kv_memory import plan_kv_layout
from batchgen.engine.memory import Budget, CacheShape, MemoryPlan, available_memory, plan_memory
from batchgen.engine.output_check import EXACT, ROUNDED, check_difference, output_difference
from batchgen.engine.runner import ModelRunner
from batchgen.engine.step_memory import SCRATCH_BLOCKS, largest_step
from batchgen.grammar import counted
from batchgen.models.activations import make_activations_rowwise
from batchgen.models.experts import make_experts_rowwise
from batchgen.models.footprint import mapped_bytes, weight_bytes
from batchgen.models.loader import DTYPES, LoadedModel, context_length
from batchgen.models.parts import body_of
from batchgen.models.probe import LayerAttention
from batchgen.models.rope import longest_sequence
from batchgen.types import Task
from batchgen_kernels.backend import AttentionBackend

if TYPE_CHECKING:
    from batchgen.models.substitutes import Substitutes

KV_DTYPE_NAMES = {**DTYPES, "int8": torch.int8}
_WITHOUT_LOGITS = frozenset({Task.EMBED, Task.CLASSIFY})
"""Tasks for which a model is loaded without what makes logits of tokens."""
_LANES = 16
"""Numbers in the widest vector that torch has."""
_ROUNDED_CACHE = 0.1
"""As `ROUNDED`, where nothing but the cache is coarser."""


class CheckedRunner(NamedTuple):
    """A runner that computes what transformers does, and what was found of the rows of its products.

    Their bits do not depend on how many there are, in multiples of `row_multiple`; None: they may.
    """

    runner: ModelRunner
    row_multiple: int | None


class Materials:
    """A loaded model, and what was found and chosen for it.

    Args:
        config: with every setting resolved that does not depend on memory.
        loaded: the model; our own products and layers take the place of some of its parts.
        layers: what each layer's attention needs.
        backend: of attention.
    """

    def __init__(
        self,
        config: EngineConfig,
        loaded: LoadedModel,
        layers: list[LayerAttention],
        backend: AttentionBackend,
    ) -> None:
        assert config.max_num_batched_tokens is not None
        assert config.max_num_seqs is not None
        assert config.block_size is not None
        assert config.num_threads is not None
        self._max_tokens, self._max_seqs = config.max_num_batched_tokens, config.max_num_seqs
        self._block_size, self._threads = config.block_size, config.num_threads
        self._config = config
        self._loaded = loaded
        self._layers = layers
        self._backend = backend
        self._kv_dtype = KV_DTYPE_NAMES[config.kv_cache_dtype]
        self.substitutes = self._substitutes()

    def _substitutes(self) -> Substitutes | None:
        if self._backend.name != "cpu" or self._config.dtype != "float32":
            return None
        # Needs Numba, as the backend does.
        from batchgen.models.substitutes import Substitutes

        body = body_of(self._loaded.model, self._loaded.task)
        with torch.inference_mode():
            return Substitutes(self._loaded.model, body)

    def memory(self) -> MemoryPlan:
        """How much the cache gets.

        Raises:
            UsageError: one sequence does not fit; says which knob to turn.
        """
        config, loaded = self._config, self._loaded
        context = context_length(loaded.config)
        if config.max_model_len is not None:
            context = longest_sequence(loaded.config, context)
        layout = plan_kv_layout(
            self._layers,
            self._backend,
            self._kv_dtype,
            block_size=self._block_size,
            max_chunk=self._max_tokens,
            max_tokens=config.max_model_len or context,
        )
        return plan_memory(
            shape=CacheShape(layout, self._block_size, self._max_tokens),
            context=context,
            max_model_len=config.max_model_len,
            max_num_seqs=self._max_seqs,
            kv_cache_memory=config.kv_cache_memory,
            budget=self._budget(layout),
        )

    def _budget(self, layout: KVCacheLayout) -> Budget:
        scratch = self._runner(layout, SCRATCH_BLOCKS, row_multiple=1)
        step = largest_step(
            scratch,
            tokens=self._max_tokens,
            sampled=self._max_seqs,
            scores=self._loaded.task not in _WITHOUT_LOGITS,
        )
        scratch.close()
        kept = self.substitutes.kept() if self.substitutes else list(self._loaded.model.modules())
        # Pages of a mapped file count as memory that can be had, but weights are needed in every step.
        available = max(0, available_memory() - mapped_bytes(kept))
        return Budget(
            available=available // self._config.sharers,
            weights=weight_bytes(kept),
            step=step.step,
            scoring=step.scoring,
            step_name=f"{counted(self._max_tokens, 'token')}, {self._max_seqs:,} sampled",
        )

    def _runner(self, layout: KVCacheLayout, num_blocks: int, row_multiple: int) -> ModelRunner:
        return ModelRunner(
            self._loaded,
            self._layers,
            self._backend,
            layout,
            kv_dtype=self._kv_dtype,
            num_blocks=num_blocks,
            block_size=self._block_size,
            row_multiple=row_multiple,
            decoder=self.substitutes.decoder if self.substitutes else None,
            max_rows=self._max_tokens,
        )

    def checked_runner(self, memory: MemoryPlan, *, invariant: bool) -> CheckedRunner:
        """A runner whose output was compared with what transformers computes.

        Layers that are one program and compute something else are given back to transformers.

        Args:
            memory: of the cache.
            invariant: whether to look for a number of rows to pad to that makes rows independent.

        Raises:
            UsageError: the model computes something else in pieces than as a whole.
        """
        exact = self._config.dtype == self._config.kv_cache_dtype == "float32"
        checked, difference = self._try(memory, invariant)
        if self.substitutes and self.substitutes.decoder:
            reason = _against_the_program(difference, EXACT if exact else _ROUNDED_CACHE)
            if reason:
                checked.runner.close()
                self.substitutes.unfuse(reason)
                checked, difference = self._try(memory, invariant)
        check_difference(difference, EXACT if exact else ROUNDED)
        if self.substitutes:
            self.substitutes.settle()
        return checked

    def _try(self, memory: MemoryPlan, invariant: bool) -> tuple[CheckedRunner, float | None]:
        multiple = self._row_multiple() if invariant else None
        runner = self._runner(memory.shape.layout, memory.num_blocks, multiple or 1)
        difference = output_difference(
            runner, self._loaded, memory.kv_config, memory.max_model_len, self.substitutes
        )
        return CheckedRunner(runner, multiple), difference

    def _row_multiple(self) -> int | None:
        """Rows to pad to, or None where there is no number that makes the model invariant."""
        model = self._loaded.model
        if self.substitutes and self.substitutes.decoder and self._rows_are_whole_vectors():
            return 1
        if self._threads > 2:
            make_activations_rowwise(model)
        multiple = find_row_multiple(
            model,
            self.substitutes.remaining() if self.substitutes else list(model.modules()),
            self._threads,
            self._max_tokens,
            self._max_seqs,
        )
        if multiple is not None:
            make_experts_rowwise(model, multiple)
        return multiple

    def _rows_are_whole_vectors(self) -> bool:
        """Whether torch computes the rotation of every position in whole vectors.

        What is left at the end of a tensor it computes one by one, with other bits.
        """
        return all(layer.spec.head_size % _LANES == 0 for layer in self._layers)


def _against_the_program(difference: float | None, limit: float) -> str | None:
    if difference is None:
        return "there is no room to check what they would compute as a program"
    return "they would compute something else as a program" if difference > limit else None
