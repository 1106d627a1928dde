"""Put an engine together from an `EngineConfig`: load, probe, size, check, wire."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import batchgen
from batchgen.core.scheduler import Scheduler, SchedulerConfig
from batchgen.devices import CPU, CUDA
from batchgen.engine.backend_choice import check_attention
from batchgen.engine.config import EngineConfig
from batchgen.engine.core import EngineCore
from batchgen.engine.device import Device, check_graphs, find_device
from batchgen.engine.memory import MemoryPlan, default_threads
from batchgen.engine.prepared import place_of, recall_start
from batchgen.engine.ready import Ready, ready_by_memory
from batchgen.grammar import counted
from batchgen.models.source import ModelSource, find_model, find_tokenizer
from batchgen.promise import (
    SAME,
    VARIES,
    Promise,
    check_kv_dtype,
    check_quantization,
    promise,
    resolve_dtypes,
)
from batchgen.text.tokenizer import Tokenizer
from batchgen.types import Task, UsageError

if TYPE_CHECKING:
    from batchgen.models.loader import LoadedModel
    from batchgen.models.prepared import PreparedModel

BLOCK_SIZE = 16


class Defaults(NamedTuple):
    """Of settings that are left to the device: tokens of a step, and requests that run at once."""

    batched_tokens: int
    sequences: int


DEFAULTS = {
    CPU: Defaults(512, 64),
    # 8,192 tokens of a model of 8 billion weights take a GPU some 0.2 s, behind which the host's work for a
    # step disappears; 512 rows share one reading of the weights, which is most of what a decoding step does.
    CUDA: Defaults(8192, 512),
}
# Attention whose bits do not depend on the batch keeps sums for each token and each 512 keys before it.
INVARIANT_GPU = Defaults(2048, 512)


@dataclass(frozen=True, slots=True)
class Engine:
    """A ready engine with what was decided on the way.

    `pinned` are numeric choices that a resumed job must repeat; `facts` describe the machine and the
    libraries; `notes` are sentences for the user.
    """

    core: EngineCore
    tokenizer: Tokenizer
    loaded: LoadedModel | PreparedModel
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


def build_engine(
    config: EngineConfig, tokenizer: Tokenizer | None = None, *, progress: bool = True
) -> Engine:
    """Load the model and make everything ready for the first request.

    Args:
        config: what was asked for.
        tokenizer: from `load_tokenizer`, if it was called before.
        progress: whether bars may be shown while weights are loaded.

    Raises:
        UsageError: the model cannot run here as asked; says why and which setting to change.
    """
    threads = config.num_threads or max(1, default_threads() // config.sharers)
    torch.set_num_threads(threads)
    device = find_device(config.device)
    dtype, kv_dtype = resolve_dtypes(config.dtype, config.kv_cache_dtype, device.kind)
    check_kv_dtype(dtype, kv_dtype)
    check_attention(config.attention, device, dtype, kv_dtype)
    check_quantization(config.quantization, dtype, device.kind)
    check_graphs(config.cuda_graphs, device)
    tokenizer = tokenizer or load_tokenizer(config)
    if config.task not in ("auto", *Task):
        raise UsageError(f"task: {config.task!r} is not allowed; use auto, {', '.join(Task)}")
    defaults = INVARIANT_GPU if device.is_gpu and config.deterministic is True else DEFAULTS[device.kind]
    config = dataclasses.replace(
        config,
        device=device.kind,
        dtype=dtype,
        kv_cache_dtype=kv_dtype,
        max_num_batched_tokens=config.max_num_batched_tokens or defaults.batched_tokens,
        max_num_seqs=config.max_num_seqs or defaults.sequences,
        block_size=config.block_size or BLOCK_SIZE,
        num_threads=threads,
    )
    promised = promise(device.kind, dtype, kv_dtype, config.deterministic)
    ready = _ready(config, promised, device, progress)
    memory = ready.memory
    core = EngineCore(
        ready.runner,
        Scheduler(_scheduler_config(config, memory), memory.kv_config),
        tokenizer,
        ready.model.eos_token_ids,
        memory.max_model_len,
        ready.model.vocab_size,
        ready.labels,
    )
    return Engine(
        core=core,
        tokenizer=tokenizer,
        loaded=ready.model,
        config=config,
        pinned={"dtype": dtype, "kv_cache_dtype": kv_dtype, "max_model_len": memory.max_model_len},
        facts=_facts(threads, ready, device),
        notes=[
            *([device.note] if device.note else []),
            *memory.table(),
            *ready.notes,
            f"attention: {ready.backend.reason}",
            *([f"layers: {ready.description}"] if ready.description else []),
            _invariance_note(promised, config, ready.invariant),
        ],
    )


def _ready(config: EngineConfig, promised: Promise, device: Device, progress: bool) -> Ready:
    """From what an earlier start has kept, else in full."""
    source = _source(config)
    place = place_of(config, source)
    known = None if place is None else recall_start(place)
    ready = None if known is None else ready_by_memory(config, known)
    if ready is not None:
        return ready
    # Loads transformers, which takes seconds.
    from batchgen.engine.first_start import first_start

    return first_start(config, source, place, promised, device, progress=progress)


def _invariance_note(promised: Promise, config: EngineConfig, invariant: bool) -> str:
    if invariant:
        return f"batch-invariant: {SAME}"
    if promised.required:
        assert config.num_threads is not None
        by = counted(config.num_threads, "thread") if config.device == CPU else config.device
        raise UsageError(
            "engine.deterministic: true asks that a row has the same bits in every batch, and the check at "
            f"load found that this model has not, in {config.dtype} with {by} and engine.attention: "
            f"{config.attention} on this machine; use engine.deterministic: auto, or attention: auto with "
            f"model.dtype: float32{'' if config.device == CPU else ' on engine.device: cpu'}"
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


def _facts(threads: int, ready: Ready, device: Device) -> dict[str, Any]:
    return {
        "batchgen": batchgen.__version__,
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
        "python": platform.python_version(),
        "device": device.kind,
        **dict(device.facts),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "threads": threads,
        "attention": ready.backend.backend.name,
        "batch_invariant": ready.invariant,
        "row_multiple": ready.row_multiple,
        "num_blocks": ready.memory.num_blocks,
    }
