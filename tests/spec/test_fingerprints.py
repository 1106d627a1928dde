"""What blocks a resume and what does not, what the difference looks like, and hashes that are remembered."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from job_files import SMALLEST, Write

from batchgen import file_hash
from batchgen.job.drift import check_drift
from batchgen.job.fingerprints import Fingerprints, ModelFiles, digest, fingerprint
from batchgen.job.load import load_job
from batchgen.types import DriftError, UsageError

FILES = {
    "version": 1,
    "format": "jsonl",
    "files": [{"path": "a.jsonl", "compression": None, "size": 10, "mtime_ns": 5, "footer": None}],
}
ACCEPT = " To keep what is finished and compute the other rows this way, add --accept-drift."
PINNED = {
    "dtype": "float32",
    "kv_cache_dtype": "float32",
    "max_model_len": 2048,
    "generation_defaults": {"temperature": 0.6},
}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that looks like a model, hashed with a cache of its own."""
    monkeypatch.setenv("BATCHGEN_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("model.safetensors", "config.json", "tokenizer.json", "chat_template.jinja", "README.md"):
        (folder / name).write_text(name)
        os.utime(folder / name, (1_000_000, 1_000_000))
    return folder


def _files(model: Path) -> ModelFiles:
    return ModelFiles((model / "config.json", model / "model.safetensors"), model)


def _prints(model: Path, file: Path, *sets: str, **changed_input: Any) -> Fingerprints:
    files = {**FILES, "files": [{**FILES["files"][0], **changed_input}]}  # type: ignore[dict-item]
    return fingerprint(load_job(file, sets), _files(model), files)


def test_the_same_job_has_the_same_digests(model: Path, job_file: Write) -> None:
    file = job_file(SMALLEST)
    first, second = _prints(model, file), _prints(model, file)
    assert first.digests() == second.digests()
    assert check_drift(json.loads(json.dumps(first.to_dict())), second, {}, "out") == []


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ("sampling.temperature=0.7", "  sampling.temperature\n    - null\n    + 0.7"),
        ("sampling.stop=[a]", "  sampling.stop\n    - []\n    + ['a']"),
        ("prompt.system=Be brief", "  prompt.system\n    - null\n    + 'Be brief'"),
        ("prompt.chat_template={{ 1 }}", "  prompt.chat_template\n    - null\n    + '{{ 1 }}'"),
        ("prompt.chat_template_kwargs={a: 1}", "  prompt.chat_template_kwargs.a\n    - null\n    + 1"),
        ("model.dtype=bf16", "  model.dtype\n    - 'float32'\n    + 'bfloat16'"),
        ("model.quantization=int8", "  model.quantization\n    - null\n    + 'int8'"),
        ("engine.kv_cache_dtype=int8", "  engine.kv_cache_dtype\n    - 'float32'\n    + 'int8'"),
        ("model.max_model_len=4096", "  model.max_model_len\n    - 2048\n    + 4096"),
        ("output.format=jsonl", "  output.format\n    - 'parquet'\n    + 'jsonl'"),
        ("input.where=n > 1", "  input.where\n    - null\n    + 'n > 1'"),
        ("input.schema={a: double}", "  input.schema.a\n    - null\n    + 'float64'"),
        ("input.id=key", "  input.id\n    - 'auto'\n    + 'key'"),
    ],
)
def test_what_changes_results_is_refused_with_a_diff(
    model: Path, job_file: Write, change: str, shown: str
) -> None:
    file = job_file(SMALLEST)
    old = _prints(model, file).to_dict()
    with pytest.raises(DriftError) as error:
        check_drift(old, _prints(model, file, change), PINNED, "out")
    assert error.value.exit_code == 4
    assert str(error.value) == (
        f"out belongs to a job that differs from this one:\n{shown}\n"
        "Undo the change to continue, choose another output.path to keep both, "
        "or start this folder over with --overwrite." + ACCEPT * (not change.startswith(("output", "input")))
    )


@pytest.mark.parametrize(
    "change",
    [
        "model.dtype=float32",
        "model.quantization=null",
        "engine.kv_cache_dtype=fp32",
        "model.max_model_len=2048",
        "input.limit=5",
        "input.rows=5:10",
        "input.on_truncated=keep",
        "run.grace=1s",
        "output.path=elsewhere",
    ],
)
def test_what_changes_no_result_goes_on(model: Path, job_file: Write, change: str) -> None:
    file = job_file(SMALLEST)
    assert check_drift(_prints(model, file).to_dict(), _prints(model, file, change), PINNED, "out") == []


def test_engine_settings_never_block_but_are_noted(model: Path, job_file: Write) -> None:
    file = job_file(SMALLEST)
    old = _prints(model, file).to_dict()
    notes = check_drift(old, _prints(model, file, "engine.max_num_seqs=4"), PINNED, "out")
    assert notes == ["  engine.max_num_seqs\n    - 'auto'\n    + 4"]


def test_changed_model_and_input_files_are_refused(model: Path, job_file: Write) -> None:
    file = job_file(SMALLEST)
    old = _prints(model, file).to_dict()
    (model / "model.safetensors").write_text("other")
    (model / "README.md").write_text("no matter")
    with pytest.raises(DriftError) as error:
        check_drift(old, _prints(model, file, size=11), PINNED, "out")
    assert "  a.jsonl: size was 10 bytes, is 11\n  weights.model.safetensors\n    - '" in str(error.value)


def test_a_long_text_is_shown_around_the_difference(model: Path, job_file: Write) -> None:
    file = job_file(SMALLEST)
    old = _prints(model, file, "prompt.system=" + "a" * 400 + "X" + "b" * 400).to_dict()
    with pytest.raises(DriftError) as error:
        check_drift(old, _prints(model, file, "prompt.system=" + "a" * 400 + "Y" + "b" * 400), PINNED, "out")
    lines = str(error.value).splitlines()
    assert lines[1] == "  prompt.system"
    assert [len(line) < 120 for line in lines[2:4]] == [True, True]
    assert "aXb" in lines[2]
    assert "aYb" in lines[3]


def test_a_secret_is_compared_but_not_kept(
    model: Path, job_file: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = job_file(SMALLEST + 'prompt: {system: "${env:TOKEN}"}\n')
    monkeypatch.setenv("TOKEN", "hunter2")
    old = _prints(model, file).to_dict()
    assert "hunter2" not in json.dumps(old)
    assert check_drift(old, _prints(model, file), PINNED, "out") == []
    monkeypatch.setenv("TOKEN", "hunter3")
    with pytest.raises(DriftError) as error:
        check_drift(old, _prints(model, file), PINNED, "out")
    assert "hunter" not in str(error.value)


def test_the_digest_ignores_the_order_of_keys() -> None:
    assert digest({"a": 1, "b": "é"}) == digest({"b": "é", "a": 1}) != digest({"a": 1, "b": "e"})


def test_a_file_hashed_before_is_not_read_again(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = model / "model.safetensors"
    first = file_hash.hash_file(weights)
    monkeypatch.setattr(file_hash.hashlib, "file_digest", None)
    assert file_hash.hash_file(weights) == first


@pytest.mark.parametrize("change", ["size", "time", "inode"])
def test_a_changed_file_is_hashed_again(model: Path, change: str) -> None:
    weights = model / "model.safetensors"
    first = file_hash.hash_file(weights)
    before = weights.stat()
    if change == "inode":
        (model / "new").write_text("MODEL.safetensors")
        (model / "new").replace(weights)
    else:
        weights.write_text("longer text than before" if change == "size" else "MODEL.safetensors")
    if change != "time":
        os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert file_hash.hash_file(weights) != first


def test_a_file_changed_just_now_is_not_remembered(model: Path) -> None:
    weights = model / "model.safetensors"
    weights.write_text("new")
    file_hash.hash_file(weights)
    assert not (model.parent / "cache" / "hashes").exists()


def test_a_broken_or_unwritable_cache_only_costs_time(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = model / "model.safetensors"
    first = file_hash.hash_file(weights)
    for entry in (model.parent / "cache" / "hashes").iterdir():
        entry.write_text("[torn")
    assert file_hash.hash_file(weights) == first
    monkeypatch.setenv("BATCHGEN_CACHE", str(weights))
    assert file_hash.hash_file(weights) == first


def test_weights_that_cannot_be_read(model: Path) -> None:
    with pytest.raises(UsageError, match=r"model.path: .*gone cannot be read \(No such file"):
        file_hash.hash_file(model / "gone")
