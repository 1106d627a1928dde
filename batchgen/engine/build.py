"""Put an engine together from an `EngineConfig`: load, probe, size, check, wire."""

from __future__ import annotations

import dataclasses
import logging
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers

import batchgen
from batchgen.core.scheduler import Scheduler, SchedulerConfig
from batchgen.engine.config import EngineConfig
from batchgen.engine.core import EngineCore
from batchgen.engine.invariance import model_is_invariant
from batchgen.engine.materials import KV_DTYPE_NAMES, Materials
from batchgen.engine.memory import (
    MemoryPlan,
    default_threads,
)
from batchgen.engine.reading import Labels
from batchgen.grammar import counted
from batchgen.models.latent import latent_notes
from batchgen.models.loader import DTYPES, LoadedModel, load_config, load_model, task_of
from batchgen.models.probe import LayerAttention, probe_model
from batchgen.models.refusals import refuse_config
from batchgen.models.rope import pin_rope
from batchgen.models.source import ModelSource, find_model, find_tokenizer
from batchgen.promise import SAME, VARIES, Promise, check_kv_dtype, promise, resolve_dtypes
from batchgen.text.tokenizer import Tokenizer
from batchgen.types import Task, UsageError
from batchgen_kernels.backend import AttentionBackend
from batchgen_kernels.capability import CAPABILITIES
from batchgen_kernels.registry import BackendError, Selection, select

CPU_BATCHED_TOKENS = 512
CPU_SEQUENCES = 64
BLOCK_SIZE = 16
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Engine:
    """A ready engine with what was decided on the way.

    `pinned` are numeric choices that a resumed job must repeat; `facts` describe the machine and the
    libraries; `notes` are sentences for the user.
    """

    core: EngineCore
    tokenizer: Tokenizer
    loaded: LoadedModel
    config: EngineConfig
    pinned: dict[str, Any]
    facts: dict[str, Any]
    notes: list[str] = field(default_factory=list)


def load_tokenizer(config: EngineConfig) -> Tokenizer:
    """The tokenizer, without touching weights, so that a job's prompts can be tried first.

    Raises:
        UsageError: there is none, or it cannot be used.
    """
    source = find_tokenizer(config.tokenizer) if config.tokenizer else _source(config)
    return Tokenizer.load(str(source.tokenizer_folder()))


def source_folder(config: EngineConfig) -> Path:
    """The model's folder, for files beside weights and tokenizer; of a GGUF file that of its tokenizer."""
    return _source(config).tokenizer_folder()


def _source(config: EngineConfig) -> ModelSource:
    return find_model(config.model, config.revision, allow_pickle=config.allow_pickle)


def build_engine(config: EngineConfig, tokenizer: Tokenizer | None = None) -> Engine:
    """Load the model and make everything ready for the first request.

    Args:
        config: what was asked for.
        tokenizer: from `load_tokenizer`, if it was called before.

    Raises:
        UsageError: the model cannot run here as asked; says why and which setting to change.
    """
    threads = config.num_threads or max(1, default_threads() // config.sharers)
    torch.set_num_threads(threads)
    dtype, kv_dtype = resolve_dtypes(config.dtype, config.kv_cache_dtype)
    check_kv_dtype(dtype, kv_dtype)
    tokenizer = tokenizer or load_tokenizer(config)
    source = _source(config)
    task = _task(config, source.tokenizer_folder())
    refuse_config(load_config(source.tokenizer_folder()), task)
    loaded = load_model(source.weights_folder(), dtype, allow_pickle=config.allow_pickle, task=task)
    config = dataclasses.replace(
        config,
        dtype=dtype,
        kv_cache_dtype=kv_dtype,
        max_num_batched_tokens=config.max_num_batched_tokens or CPU_BATCHED_TOKENS,
        max_num_seqs=config.max_num_seqs or CPU_SEQUENCES,
        block_size=config.block_size or BLOCK_SIZE,
        num_threads=threads,
    )
    layers = probe_model(loaded.model)
    backend, reason = _backend(config, layers)
    _check_block_size(backend, config.block_size or BLOCK_SIZE)
    materials = Materials(config, loaded, layers, backend)
    memory = materials.memory()
    rope_notes = pin_rope(loaded.model, memory.max_model_len)
    promised = promise("cpu", dtype, kv_dtype, config.deterministic)
    runner, row_multiple = materials.checked_runner(memory, invariant=promised.checked)
    invariant = (
        row_multiple is not None
        and CAPABILITIES[backend.name].batch_invariant
        and model_is_invariant(runner, loaded.vocab_size, memory.num_blocks)
    )
    core = EngineCore(
        runner,
        Scheduler(_scheduler_config(config, memory), memory.kv_config),
        tokenizer,
        loaded.eos_token_ids,
        memory.max_model_len,
        loaded.vocab_size,
        _labels(loaded),
    )
    return Engine(
        core=core,
        tokenizer=tokenizer,
        loaded=loaded,
        config=config,
        pinned={"dtype": dtype, "kv_cache_dtype": kv_dtype, "max_model_len": memory.max_model_len},
        facts=_facts(threads, backend, invariant, row_multiple, memory),
        notes=[
            *memory.table(),
            *latent_notes(loaded.config, layers, KV_DTYPE_NAMES[kv_dtype].itemsize),
            *rope_notes,
            f"attention: {reason}",
            *([f"layers: {materials.substitutes.description}"] if materials.substitutes else []),
            _invariance_note(promised, config, invariant),
        ],
    )


def _task(config: EngineConfig, folder: Path) -> Task:
    if config.task == "auto":
        return task_of(folder)
    if config.task not in set(Task):
        raise UsageError(f"task: {config.task!r} is not allowed; use auto, {', '.join(Task)}")
    return Task(config.task)


def _labels(loaded: LoadedModel) -> Labels | None:
    if loaded.task is not Task.CLASSIFY:
        return None
    config: Any = loaded.config
    names = tuple(str(config.id2label[i]) for i in range(config.num_labels))
    return Labels(names, config.problem_type)


def _backend(config: EngineConfig, layers: list[LayerAttention]) -> Selection:
    specs = [layer.spec for layer in layers]
    dtype, kv_dtype = DTYPES[config.dtype], KV_DTYPE_NAMES[config.kv_cache_dtype]
    try:
        return select(config.attention, specs, torch.device("cpu"), dtype, kv_dtype)
    except BackendError as error:
        raise UsageError(f"engine.attention: {error}") from error


def _check_block_size(backend: AttentionBackend, block_size: int) -> None:
    multiple = CAPABILITIES[backend.name].block_size_multiple
    if block_size % multiple:
        raise UsageError(
            f"engine.block_size: {block_size} is not a multiple of {multiple}, which the {backend.name} "
            "attention backend needs"
        )


def _invariance_note(promised: Promise, config: EngineConfig, invariant: bool) -> str:
    if invariant:
        return f"batch-invariant: {SAME}"
    if promised.required:
        assert config.num_threads is not None
        raise UsageError(
            "engine.deterministic: true asks that a row has the same bits in every batch, and the check at "
            f"load found that this model has not, in {config.dtype} with "
            f"{counted(config.num_threads, 'thread')} and engine.attention: {config.attention} on this "
            "machine; use engine.deterministic: auto, or attention: auto with model.dtype: float32"
        )
    return f"not batch-invariant: {VARIES}"


def _scheduler_config(config: EngineConfig, memory: MemoryPlan) -> SchedulerConfig:
    assert config.max_num_batched_tokens is not None
    assert config.max_num_seqs is not None
    return SchedulerConfig(
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_num_seqs=config.max_num_seqs,
        max_model_len=memory.max_model_len,
        prefix_caching=config.prefix_caching,
        debug_checks=config.debug_checks,
    )


def _facts(
    threads: int,
    backend: AttentionBackend,
    invariant: bool,
    row_multiple: int | None,
    memory: MemoryPlan,
) -> dict[str, Any]:
    return {
        "batchgen": batchgen.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "device": "cpu",
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": threads,
        "attention": backend.name,
        "batch_invariant": invariant,
        "row_multiple": row_multiple,
        "num_blocks": memory.num_blocks,
    }
