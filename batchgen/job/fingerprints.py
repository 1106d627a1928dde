"""What a job's results depend on, so that a resumed job never mixes two.

`run` makes them at each start; the supervisor keeps them in the manifest and calls `check_drift`. `input`
and `result` block on change; `engine` never does. Each is canonical JSON, so that a difference can be
shown field by field, and its SHA-256.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchgen.data.fingerprint import describe_changes
from batchgen.job.faults import dotted, show_value
from batchgen.job.file_hash import hash_file, hash_files
from batchgen.job.resolved import resolved_dict
from batchgen.job.spec import JobSpec
from batchgen.text.tokenizer import fingerprint as tokenizer_fingerprint
from batchgen.types import DriftError

FORMAT = 1
WEIGHTS = ("*.safetensors", "*.bin", "config.json")
SHOWN = 100
MOST_DIFFERENCES = 12


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

    @classmethod
    def find(cls, model: Path, tokenizer: Path | None = None) -> ModelFiles:
        """Files of a model folder or a GGUF file, and another tokenizer's folder if there is one."""
        if model.is_file():
            return cls((model,), tokenizer)
        files = {file for pattern in WEIGHTS for file in model.glob(pattern) if file.is_file()}
        return cls(tuple(sorted(files)), tokenizer or model)


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
    model = job["model"]
    return Fingerprints(
        input={
            "format": FORMAT,
            "files": dict(input_files),
            "id": job["input"]["id"],
            "columns": job["input"]["columns"],
            "unicode": job["input"]["unicode"],
        },
        result={
            "format": FORMAT,
            "task": spec.task,
            "weights": hash_files(files.weights),
            "tokenizer": None if files.tokenizer is None else _tokenizer(files.tokenizer),
            "model": {key: model[key] for key in ("dtype", "max_model_len", "generation_defaults")},
            "prompt": job["prompt"],
            "sampling": job["sampling"],
            "output": {
                key: job["output"][key]
                for key in ("format", "compression", "columns", "include", "part_rows")
            },
        },
        engine={"format": FORMAT, "engine": job["engine"]},
    )


def _tokenizer(place: Path) -> str:
    return hash_file(place) if place.is_file() else tokenizer_fingerprint(place)


def digest(part: Mapping[str, Any]) -> str:
    """SHA-256 of canonical JSON: sorted keys, no spaces, ASCII only."""
    text = json.dumps(part, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def check_drift(
    old: Mapping[str, Any], new: Fingerprints, pinned: Mapping[str, Any], folder: Path | str
) -> list[str]:
    """Compare with what the output folder belongs to.

    Args:
        old: `Fingerprints.to_dict()` from the manifest.
        new: of the job as it is now.
        pinned: numeric choices made at the first attempt, which fill what either side left open.
        folder: the output folder, for the message.

    Returns:
        Differences in the engine's part, as notes.

    Raises:
        DriftError: the input or what decides results differs; shows every difference and what to do.
    """
    differences = _input_differences(old["input"], new.input)
    differences += diff(_filled(old["result"], pinned), _filled(new.result, pinned))
    if differences:
        shown = differences[:MOST_DIFFERENCES]
        if len(differences) > len(shown):
            shown.append(f"… and {len(differences) - len(shown)} more")
        raise DriftError(
            f"{folder} belongs to a job that differs from this one:\n"
            + "\n".join(shown)
            + "\nUndo the change to continue, choose another output.path to keep both, "
            "or start this folder over with --overwrite."
        )
    return diff(old["engine"], new.engine)


def _input_differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    files = [f"  {change}" for change in describe_changes(old["files"], new["files"])]
    rest = [{key: value for key, value in part.items() if key != "files"} for part in (old, new)]
    return files + diff({"input": rest[0]}, {"input": rest[1]})


def diff(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Readable differences, three lines each: the field, the old and the new value.

    Null and absent are the same, so that a key added by a later version, and left alone, is no difference.
    """
    before, after = dict(_leaves(old, ())), dict(_leaves(new, ()))
    paths = [path for path in {**before, **after} if before.get(path) != after.get(path)]
    return [_difference(path, before.get(path), after.get(path)) for path in paths]


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, (*path, str(key)))
    else:
        yield path, value


def _difference(path: tuple[str, ...], old: Any, new: Any) -> str:
    start = 0
    if isinstance(old, str) and isinstance(new, str):
        start = _common_prefix(old, new)
    return f"  {dotted(path)}\n    - {_window(old, start)}\n    + {_window(new, start)}"


def _common_prefix(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _window(value: Any, difference: int) -> str:
    """A value in one line; of a long text the surroundings of the first difference."""
    if not isinstance(value, str) or len(value) <= SHOWN:
        return show_value(value)
    start = max(0, min(difference - SHOWN // 4, len(value) - SHOWN))
    head, tail = "…" if start else "", "…" if start + SHOWN < len(value) else ""
    return f"{head}{value[start : start + SHOWN]!r}{tail}"


def _filled(result: Mapping[str, Any], pinned: Mapping[str, Any]) -> dict[str, Any]:
    """A result part with open choices (`auto`, null) replaced by what the first attempt pinned."""
    model = {
        key: pinned.get(key, value) if value in ("auto", None) else value
        for key, value in result["model"].items()
    }
    return {**result, "model": model}


def _concealed(literal: str, value: str) -> str:
    """A change of a secret shows, the secret does not."""
    return f"{literal} (sha256 {hashlib.sha256(value.encode(errors='surrogateescape')).hexdigest()[:16]})"
