"""What a job's results depend on, so that a resumed job never mixes two.

`run` makes them at each start; recovery keeps them in the manifest and compares (`drift.py`). `input` and
`result` block on change; `engine` never does. Each is canonical JSON, so that a difference can be
shown field by field, and its SHA-256.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchgen.file_hash import hash_file, hash_files
from batchgen.job.resolved import resolved_dict
from batchgen.job.spec.job import JobSpec
from batchgen.text.tokenizer import fingerprint as tokenizer_fingerprint
from batchgen.types import Task

FORMAT = 1


@dataclass(frozen=True, slots=True)
class Fingerprints:
    """The three parts as plain JSON values."""

    input: Mapping[str, Any]
    result: Mapping[str, Any]
    engine: Mapping[str, Any]

    def digests(self) -> dict[str, str]:
        """SHA-256 of each part, in hexadecimal."""
        return {name: digest(part) for name, part in self.to_dict().items()}

    def to_dict(self) -> dict[str, Any]:
        """For the manifest."""
        return {"input": self.input, "result": self.result, "engine": self.engine}


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """What a model consists of.

    Args:
        weights: weight files and configuration, or the GGUF file.
        tokenizer: the folder with the tokenizer, or another GGUF file; None where `weights` holds it.
    """

    weights: tuple[Path, ...]
    tokenizer: Path | None


def fingerprint(spec: JobSpec, files: ModelFiles, input_files: Mapping[str, Any]) -> Fingerprints:
    """Everything that decides what the output folder holds.

    Args:
        spec: the job.
        files: of the model; hashed here, which takes no time for files hashed before.
        input_files: `InputSet.fingerprint()`.

    Raises:
        UsageError: a file of the model cannot be read.
    """
    job = resolved_dict(spec, _concealed)
    model, engine = job["model"], dict(job["engine"])
    kv_dtype = engine.pop("kv_cache_dtype")
    return Fingerprints(
        input={
            "format": FORMAT,
            "files": dict(input_files),
            "id": job["input"]["id"],
            "columns": job["input"]["columns"],
            "unicode": job["input"]["unicode"],
            "strict_json": job["input"]["strict_json"] or None,
            "where": job["input"]["where"],
            "schema": job["input"]["schema"],
        },
        result={
            "format": FORMAT,
            "task": spec.task,
            "weights": hash_files(files.weights),
            "tokenizer": None if files.tokenizer is None else _tokenizer(files.tokenizer),
            "model": {
                key: model[key] for key in ("dtype", "quantization", "max_model_len", "generation_defaults")
            },
            "engine": {"kv_cache_dtype": None if kv_dtype == "auto" else kv_dtype},
            "prompt": job["prompt"],
            "sampling": job["sampling"],
            "embedding": job["embedding"] if spec.task == Task.EMBED else None,
            "output": {
                **{
                    key: job["output"][key]
                    for key in ("format", "compression", "columns", "include", "part_rows")
                },
                "samples": spec.samples,
            },
        },
        engine={"format": FORMAT, "engine": engine},
    )


def _tokenizer(place: Path) -> str:
    return hash_file(place) if place.is_file() else tokenizer_fingerprint(place)


def digest(part: Mapping[str, Any]) -> str:
    """SHA-256 of canonical JSON: sorted keys, no spaces, ASCII only."""
    text = json.dumps(part, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _concealed(literal: str, value: str) -> str:
    """A change of a secret shows, the secret does not."""
    return f"{literal} (sha256 {hashlib.sha256(value.encode(errors='surrogateescape')).hexdigest()[:16]})"
