"""Load a model by transformers, probe it, size it, check it: a start in full. `build.py` calls this.

Nothing of transformers is imported before: a start of which everything is known does without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transformers.utils import logging as transformers_logging

from batchgen.engine.backend_choice import choose_backend
from batchgen.engine.config import EngineConfig
from batchgen.engine.device import Device
from batchgen.engine.invariance import model_is_invariant
from batchgen.engine.materials import Materials
from batchgen.engine.prepared import Findings, Place, remember_start
from batchgen.engine.reading import Labels
from batchgen.engine.ready import Ready
from batchgen.engine.room import has_room_for_checks
from batchgen.engine.sizing import KV_DTYPE_NAMES
from batchgen.models.latent import latent_notes
from batchgen.models.loader import LoadedModel, load_config, load_model, task_of
from batchgen.models.probe import probe_model
from batchgen.models.refusals import refuse_config
from batchgen.models.rope import pin_rope
from batchgen.models.source import ModelSource
from batchgen.promise import Promise
from batchgen.types import Task
from batchgen_kernels.capability import CAPABILITIES

if TYPE_CHECKING:
    from batchgen.engine.runner import ModelRunner
    from batchgen.models.prepared import PreparedWeights


def first_start(
    config: EngineConfig,
    source: ModelSource,
    place: Place | None,
    promised: Promise,
    device: Device,
    *,
    progress: bool,
) -> Ready:
    """Do everything that there is to do.

    Args:
        config: with every setting resolved that does not depend on memory.
        source: the model.
        place: where to keep what makes later starts faster; None to keep nothing.
        promised: whether to look for a number of rows that makes rows independent.
        device: where to compute.
        progress: whether transformers may show bars while it loads.

    Raises:
        UsageError: the model cannot run here as asked; says why and which setting to change.
    """
    if not progress:
        transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    task = task_of(source.tokenizer_folder()) if config.task == "auto" else Task(config.task)
    refuse_config(load_config(source.tokenizer_folder()), task)
    loaded = load_model(
        source.weights_folder(),
        config.dtype,
        allow_pickle=config.allow_pickle,
        task=task,
        place=device.place,
    )
    layers = probe_model(loaded.model)
    backend = choose_backend(config, layers, device)
    materials = Materials(config, loaded, layers, backend.backend, device)
    memory = materials.memory()
    rope_notes = pin_rope(loaded.model, memory.max_model_len)
    runner, row_multiple = materials.checked_runner(memory, invariant=promised.checked)
    invariant = (
        row_multiple is not None
        and _may_be_invariant(backend.backend.name, config)
        and model_is_invariant(runner, loaded.vocab_size, memory.num_blocks)
    )
    itemsize = KV_DTYPE_NAMES[config.kv_cache_dtype].itemsize
    notes = [*latent_notes(loaded.config, layers, itemsize), *rope_notes]
    ready = Ready(
        loaded,
        runner,
        memory,
        backend,
        row_multiple,
        invariant,
        materials.description,
        _labels(loaded),
        notes,
    )
    if place is not None and not notes and has_room_for_checks(memory.kv_config, memory.max_model_len):
        weights = _prepared(materials, runner)
        assert materials.step is not None
        findings = Findings(materials.step, row_multiple, invariant)
        failure = None if weights is None else remember_start(place, weights, findings)
        notes += [] if failure is None else [failure]
    notes += materials.capture(runner, memory, row_multiple, invariant=invariant)
    return ready


def _may_be_invariant(backend: str, config: EngineConfig) -> bool:
    """Whether attention gives a row the same bits in every batch, as `choose_backend` has made it."""
    capability = CAPABILITIES[backend]
    return capability.batch_invariant or (config.deterministic is True and bool(capability.made_invariant))


def _prepared(materials: Materials, runner: ModelRunner) -> PreparedWeights | None:
    if materials.decoder is None:
        return None
    # Needs Numba, as the program does.
    from batchgen.engine.prepare import prepare

    return prepare(materials, runner)


def _labels(loaded: LoadedModel) -> Labels | None:
    if loaded.task is not Task.CLASSIFY:
        return None
    config: Any = loaded.config
    names = tuple(str(config.id2label[i]) for i in range(config.num_labels))
    return Labels(names, config.problem_type)
