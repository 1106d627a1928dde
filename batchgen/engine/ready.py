"""A model with its runner and memory, ready for requests; how it became so makes no difference."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from batchgen.engine.backend_choice import choose_backend
from batchgen.engine.config import EngineConfig
from batchgen.engine.device import HOST
from batchgen.engine.memory import MemoryPlan
from batchgen.engine.prepared import Known
from batchgen.engine.reading import Labels
from batchgen.engine.room import has_room_for_checks
from batchgen.engine.runner import ModelRunner
from batchgen.engine.sizing import Sizing
from batchgen.models.dtypes import precision
from batchgen_kernels.registry import Selection

if TYPE_CHECKING:
    import torch

    from batchgen.models.loader import LoadedModel
    from batchgen.models.prepared import PreparedModel
    from batchgen_kernels.cpu.decoder import DecoderWeights


@dataclass(frozen=True, slots=True)
class Ready:
    """What an engine is put together from.

    Args:
        model: loaded or prepared.
        runner: of the model, checked.
        memory: of its cache.
        backend: of attention, and why.
        row_multiple: rows that steps are padded to; None where none makes rows independent.
        invariant: whether a row's bits do not depend on its batch.
        description: how the layers are computed; None where there is nothing to say.
        labels: of a model that classifies.
        notes: sentences for the user.
    """

    model: LoadedModel | PreparedModel
    runner: ModelRunner
    memory: MemoryPlan
    backend: Selection
    row_multiple: int | None
    invariant: bool
    description: str | None
    labels: Labels | None = None
    notes: list[str] = field(default_factory=list)


def ready_by_memory(config: EngineConfig, known: Known) -> Ready | None:
    """A model of which everything is known; None where its cache is too small for what was checked.

    Args:
        config: with every setting resolved that does not depend on memory.
        known: what an earlier start has kept.

    Raises:
        UsageError: the model cannot run as asked; says why.
    """
    weights, findings = known.model.weights, known.findings
    backend = choose_backend(config, weights.layers, HOST)
    sizing = _KnownSizing(config, known, backend)
    memory = sizing.memory()
    if not has_room_for_checks(memory.kv_config, memory.max_model_len):
        return None
    runner = sizing.runner(memory.shape.layout, memory.num_blocks, findings.row_multiple or 1)
    return Ready(
        known.model,
        runner,
        memory,
        backend,
        findings.row_multiple,
        findings.invariant,
        sizing.description,
    )


class _KnownSizing(Sizing):
    """A model that runs as one program, and whose steps were measured."""

    def __init__(self, config: EngineConfig, known: Known, backend: Selection) -> None:
        weights = known.model.weights
        super().__init__(config, known.model, weights.layers, backend.backend, HOST, known.findings.step)
        self._decoder = weights.decoder
        self._memory = known.model.memory

    @property
    def decoder(self) -> DecoderWeights:
        return self._decoder

    @property
    def description(self) -> str:
        return f"one program of our own products{precision(self._config.quantization, {'embeddings'})}"

    def kept(self) -> list[torch.nn.Module]:
        return [self._memory]
