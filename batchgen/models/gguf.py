"""Turn a GGUF file into a folder that transformers loads in seconds, once.

transformers reads GGUF itself, but dequantising takes tens of seconds at each start. The result is
kept in the cache folder under the file's identity: written to a temporary folder, then renamed, so
that a killed conversion leaves nothing half done. Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from batchgen.cache import cache_dir
from batchgen.types import UsageError

FORMAT = 1


def tokenizer_folder(file: Path, key: str = "model.path") -> Path:
    """The file's tokenizer and configuration as a folder; `key` of the job file names it in messages."""
    return _cached(file, "tokenizer", _convert_tokenizer, key)


def weights_folder(file: Path, key: str = "model.path") -> Path:
    """The file's dequantised float32 weights, configuration and tokenizer as a folder."""
    return _cached(file, "weights", _convert_weights, key)


def _cached(file: Path, kind: str, convert: Callable[[Path, Path], None], key: str) -> Path:
    target = cache_dir() / "gguf" / f"{file.stem}-{_identity(file)}" / kind
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with _locked(target.with_suffix(".lock")):
        if target.is_dir():
            return target
        temporary = Path(tempfile.mkdtemp(prefix=f"{kind}.", dir=target.parent))
        try:
            with _readable(file, key):
                convert(file, temporary)
            temporary.rename(target)
        except BaseException:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
    return target


def _identity(file: Path) -> str:
    stat = file.stat()
    text = f"{FORMAT}:{file.resolve()}:{stat.st_size}:{stat.st_mtime_ns}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock, so that two workers do not convert the same file twice."""
    handle = os.open(path, os.O_CREAT | os.O_RDWR, 0o644)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


@contextlib.contextmanager
def _readable(file: Path, key: str) -> Iterator[None]:
    """Turn whatever the readers raise on a broken file into one sentence."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(
            f"{key}: {file} could not be read as GGUF ({type(error).__name__}: {error}); "
            "is the download complete, and is its architecture one that transformers reads from GGUF?"
        ) from error


def _convert_tokenizer(file: Path, out: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer

    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    tokenizer.save_pretrained(out)
    config.save_pretrained(out)


def _convert_weights(file: Path, out: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    quantized = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    settings = quantized.config.to_dict()
    for key in ("quantization_config", "_name_or_path"):
        settings.pop(key, None)
    with torch.device("meta"):
        plain = type(quantized)(type(quantized.config).from_dict(settings))
    plain.load_state_dict(quantized.state_dict(), assign=True)
    plain.tie_weights()
    plain.generation_config = quantized.generation_config
    plain.save_pretrained(out)
    tokenizer.save_pretrained(out)
