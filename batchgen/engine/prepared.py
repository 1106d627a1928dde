"""Keep what a first start has found out, so that later ones need not: weights as they are computed with, and
what the checks at load have shown.

`build.py` asks before it loads a model, and tells afterwards. There are two keys. Weights are used while
everything is the same that decides their bits: the model's files, the code that packs them, the libraries.
Findings (how much memory a step takes, that the output is that of transformers, that rows do not depend on
each other) are used while that and everything is the same on which the checks depend: settings, threads,
processor, environment. Whatever is missing, damaged or cannot be written only costs the time of a full start.
"""

from __future__ import annotations

import dataclasses
import fcntl
import importlib.metadata
import json
import logging
import os
import platform
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

import batchgen
import batchgen_kernels
from batchgen.cache import cache_dir, keep, key_of, recall
from batchgen.devices import CPU
from batchgen.engine.config import EngineConfig
from batchgen.engine.step_memory import StepMemory
from batchgen.file_hash import hash_files
from batchgen.grammar import counted
from batchgen.models.object_tree import NotStorableError, put_together, take_apart
from batchgen.models.source import ModelSource
from batchgen.models.tensor_file import DamagedFileError, open_tensors, write_tensors
from batchgen.types import UsageError

if TYPE_CHECKING:
    from batchgen.models.prepared import PreparedModel, PreparedWeights

FORMAT = "1"
LEAST_BYTES = 32 * 1024 * 1024
"""Of weights: smaller models are loaded anew each time."""
_MOST_DEFLATED = 16
"""How many times larger weights are in memory than in a file, at most."""
MOST_SHARE = 0.25
"""Of what is free or ours on the cache's disk that all packed weights may take."""
UNUSED_SECONDS = 30 * 24 * 3600.0
FINDINGS, WEIGHTS = "findings", "packed"
_CODE = ("core", "engine", "models", "sampling", "devices.py", "promise.py", "types.py", "scores.py")
_LIBRARIES = ("torch", "transformers", "numba", "llvmlite", "numpy", "safetensors", "gguf")
_ENVIRONMENT = ("NUMBA_", "MKL_", "OMP_", "GOMP_", "KMP_", "ATEN_", "TORCH_", "DNNL_", "ONEDNN_")
_WHERE_FROM = ("model", "tokenizer", "revision")
"""Settings that say which files are meant, whose content counts."""
_OF_MEMORY = ("max_model_len", "kv_cache_memory", "sharers", "debug_checks", "prefix_caching")
"""Settings that no check looks at: what they decide is the size of the cache."""
_OF_A_STEP = (
    "attention",
    "max_num_batched_tokens",
    "max_num_seqs",
    "block_size",
    "kv_cache_dtype",
    "cuda_graphs",
    "deterministic",
    "num_threads",
)
"""Settings that do not change weights."""
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Findings:
    """What the checks at load have shown.

    Args:
        step: the memory of the largest step.
        row_multiple: rows that steps are padded to; None where none makes rows independent.
        invariant: whether a row's bits do not depend on its batch.
    """

    step: StepMemory
    row_multiple: int | None
    invariant: bool


class Known(NamedTuple):
    """A model that can be used as it is, and what is known of it."""

    model: PreparedModel
    findings: Findings


@dataclass(frozen=True, slots=True)
class Place:
    """Where weights and findings of one start belong; `key` and `findings` stand for what decides each."""

    key: str
    findings: str

    @property
    def file(self) -> Path:
        """Of the weights."""
        return cache_dir() / WEIGHTS / f"{self.key}.tensors"


def place_of(config: EngineConfig, source: ModelSource) -> Place | None:
    """The place of a start.

    Args:
        config: with every setting resolved that does not depend on memory.
        source: the model.

    Returns:
        None where starts are not remembered: models that are not computed by programs of ours.
    """
    if config.device != CPU or config.dtype != "float32" or config.attention not in ("auto", "cpu"):
        return None
    with suppress(OSError, UsageError, ImportError):
        if sum(file.stat().st_size for file in source.weight_files()) < LEAST_BYTES / _MOST_DEFLATED:
            return None
        settings = dataclasses.asdict(config)
        of_findings = {k: v for k, v in settings.items() if k not in (*_WHERE_FROM, *_OF_MEMORY)}
        of_weights = {k: v for k, v in of_findings.items() if k not in _OF_A_STEP}
        key = key_of([FORMAT, *_of_files(source), *_of_code(), *_of_machine(), json.dumps(of_weights)])
        return Place(key, key_of([key, json.dumps(of_findings), *_of_environment()]))
    return None


def recall_start(place: Place) -> Known | None:
    """The model and what is known of it, if a start has been remembered that was like this one."""
    content = recall(FINDINGS, place.findings)
    if content is None:
        return None
    try:
        found = json.loads(content)
        findings = Findings(StepMemory(**found.pop("step")), **found)
        return Known(_open(place), findings)
    except FileNotFoundError:
        return None
    except (DamagedFileError, OSError, ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
        logger.warning("%s is made anew: %s", place.file, error)
        with suppress(OSError):
            place.file.unlink(missing_ok=True)
        return None


def remember_start(place: Place, weights: PreparedWeights, findings: Findings) -> str | None:
    """Keep a start for later ones.

    Returns:
        Why it could not be kept, for a person; None if it was, or somebody else is just doing it.
    """
    try:
        tree, tensors = take_apart(weights)
        if sum(tensor.nbytes for tensor in tensors.values()) < LEAST_BYTES:
            return None
        place.file.parent.mkdir(exist_ok=True)
        with _lock(place.file.with_suffix(".lock")) as alone:
            if not alone:
                return None
            if not _is_there(place, tree, tensors):
                _make_room(place.file, sum(tensor.nbytes for tensor in tensors.values()))
                write_tensors(place.file, tensors, tree)
    except (OSError, NotStorableError) as error:
        return f"what makes later starts faster was not kept: {error}"
    keep(FINDINGS, place.findings, json.dumps(dataclasses.asdict(findings)).encode())
    return None


def _open(place: Place) -> PreparedModel:
    # Needs Numba, which is there where something has been kept.
    from batchgen.models.prepared import PreparedModel

    stored = open_tensors(place.file)
    with suppress(OSError):
        os.utime(place.file.with_suffix(".lock"))
    return PreparedModel(put_together(stored.facts, stored.tensors), iter(stored.tensors.values()))


def _is_there(place: Place, tree: Any, tensors: dict[str, torch.Tensor]) -> bool:
    """Whether the file holds these very weights already."""
    try:
        stored = open_tensors(place.file)
    except (OSError, DamagedFileError):
        return False
    return (
        stored.facts == json.loads(json.dumps(tree))
        and stored.tensors.keys() == tensors.keys()
        and all(torch.equal(tensor, tensors[name]) for name, tensor in stored.tensors.items())
    )


def _make_room(file: Path, size: int) -> None:
    """Remove weights that nobody has used for long, and whatever a killed writer has left.

    Raises:
        OSError: there is no room for so many bytes.
    """
    others = []
    for other in file.parent.iterdir():
        with suppress(OSError):
            if other.suffix == ".tmp" and not other.name.startswith(file.name):
                # Of a writer that is still at it, if it is young.
                if time.time() - other.stat().st_mtime > 3600:
                    other.unlink()
            elif other.suffix == ".tmp":
                other.unlink()
            elif other.suffix == ".tensors" and other != file:
                used = max(_time(other), _time(other.with_suffix(".lock")))
                others.append((used, other.stat().st_size, other))
    taken = sum(bytes_ for _, bytes_, _ in others)
    most = MOST_SHARE * (shutil.disk_usage(file.parent).free + taken)
    for used, bytes_, other in sorted(others):
        if taken + size > most or time.time() - used > UNUSED_SECONDS:
            other.unlink(missing_ok=True)
            other.with_suffix(".lock").unlink(missing_ok=True)
            taken -= bytes_
    if size > most:
        raise OSError(f"it takes {counted(size, 'byte')}, which is too much of the disk of {file.parent}")


@contextmanager
def _lock(path: Path) -> Iterator[bool]:
    """Whether nobody else holds the lock, which is held then."""
    handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield True
    except BlockingIOError:
        yield False
    finally:
        os.close(handle)


def _time(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return 0.0


def _of_files(source: ModelSource) -> Iterator[str]:
    for name, digest in sorted(hash_files(source.weight_files()).items()):
        yield from (name, digest)
    if source.folder is not None:
        for file in sorted(source.folder.glob("*.json")):
            yield from (file.name, key_of([file.read_bytes()]))


def _of_code() -> Iterator[str | bytes]:
    ours = Path(batchgen.__file__).parent
    kernels = Path(batchgen_kernels.__path__[0])
    for place in (*(ours / name for name in _CODE), kernels):
        for file in sorted(place.rglob("*.py")) if place.is_dir() else [place]:
            yield from (file.name, file.read_bytes())


def _of_machine() -> Iterator[str]:
    import llvmlite.binding as llvm

    yield batchgen.__version__
    yield from (platform.python_version(), platform.machine())
    for name in _LIBRARIES:
        yield importlib.metadata.version(name)
    yield torch.backends.cpu.get_cpu_capability()
    yield llvm.get_host_cpu_name()
    yield llvm.get_host_cpu_features().flatten()


def _of_environment() -> Iterator[str]:
    for name in sorted(os.environ.keys() - {"NUMBA_CACHE_DIR"}):
        if name.startswith(_ENVIRONMENT):
            yield f"{name}={os.environ[name]}"
