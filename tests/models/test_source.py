"""Finding a model: each wrong path gets one clear sentence."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from batchgen.models.gguf import tokenizer_folder
from batchgen.models.loader import load_config, load_model
from batchgen.models.source import ModelSource, find_model, find_tokenizer
from batchgen.text.tokenizer import Tokenizer
from batchgen.types import UsageError

Find = Callable[[str], ModelSource]


def test_a_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^model\.path: .* holds no config\.json"):
        find_model(str(tmp_path))
    assert find_tokenizer(str(tmp_path)).tokenizer_folder() == tmp_path


@pytest.mark.parametrize(("find", "key"), [(find_model, "model.path"), (find_tokenizer, "model.tokenizer")])
def test_what_is_not_there_names_its_key(tmp_path: Path, find: Find, key: str) -> None:
    with pytest.raises(UsageError, match=rf"^{key}: .* is neither a folder, a .gguf file, nor a hub id"):
        find(str(tmp_path / "nothing"))
    with pytest.raises(UsageError, match=rf"^{key}: there is no file .*m.gguf; check the path"):
        find(str(tmp_path / "m.gguf"))
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + b"\0" * 64)
    with pytest.raises(UsageError, match=rf"^{key}: .*m.gguf could not be read as GGUF"):
        find(str(tmp_path / "m.gguf")).tokenizer_folder()


def test_a_folder_has_no_revisions(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UsageError, match=r"^model\.revision: .* is local and has no revisions"):
        find_model(str(tmp_path), "main")


def _safetensors(*, cut: int = 0) -> bytes:
    header = json.dumps({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}).encode()
    whole = len(header).to_bytes(8, "little") + header + b"\0" * 8
    return whole[: len(whole) - cut]


INDEX = json.dumps({"weight_map": {"a": "x-1.safetensors", "b": "x-2.safetensors"}}).encode()
OUTSIDE = b'{"weight_map": {"a": "../b"}}'


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({}, "holds no weights, neither model.safetensors nor"),
        ({"adapter_model.safetensors": b""}, "a whole model and not an adapter"),
        (
            {"model.safetensors": _safetensors(cut=3)},
            r"model.safetensors has \d+ bytes and its header speaks of",
        ),
        ({"model.safetensors": b"<html>"}, "model.safetensors is not a safetensors file; download it again"),
        ({"model.safetensors": b"version https://git-lfs"}, "model.safetensors is not a safetensors file"),
        ({"model.safetensors.index.json": b"[]"}, "model.safetensors.index.json is damaged"),
        (
            {"model.safetensors.index.json": OUTSIDE},
            "model.safetensors.index.json is damaged",
        ),
        ({"model.safetensors.index.json": INDEX, "x-1.safetensors": b""}, "lacks 1 of 2 .* x-2.safetensors"),
        ({"pytorch_model.bin": b""}, r"only as pickles \(pytorch_model.bin\).* set model.allow_pickle: true"),
    ],
)
def test_incomplete_weights_are_seen_before_they_are_loaded(
    tmp_path: Path, files: dict[str, bytes], said: str
) -> None:
    for name, content in {"config.json": b"{}", **files}.items():
        (tmp_path / name).write_bytes(content)
    source = find_model(str(tmp_path))
    for look in (source.check_weights, source.weight_files, source.weights_folder):
        with pytest.raises(UsageError, match=rf"^model\.path: {tmp_path}.* {said}"):
            look()


def test_complete_weights(tmp_path: Path) -> None:
    for name in ("x-1.safetensors", "x-2.safetensors"):
        (tmp_path / name).write_bytes(_safetensors())
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_bytes(INDEX)
    (tmp_path / "pytorch_model.bin").write_bytes(b"not used")
    source = find_model(str(tmp_path))
    source.check_weights()
    names = [file.name for file in source.weight_files()]
    assert names == ["config.json", "x-1.safetensors", "x-2.safetensors"]


def test_pickled_weights_only_where_they_are_allowed(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import load_file
    from tiny_models import save_tiny_llama

    folder = save_tiny_llama(tmp_path / "m")
    expected = load_file(folder / "model.safetensors")
    torch.save(expected, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(UsageError, match="only as pickles"):
        find_model(str(folder)).weights_folder()
    loaded = load_model(find_model(str(folder), allow_pickle=True).weights_folder(), allow_pickle=True)
    for name, tensor in loaded.model.state_dict().items():
        assert torch.equal(tensor, expected[name])


def test_code_that_comes_with_a_model_is_never_run(tmp_path: Path) -> None:
    config = {
        "model_type": "own",
        "auto_map": {"AutoConfig": "code.Config", "AutoModelForCausalLM": "code.Model"},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["code.Own", None]}})
    )
    (tmp_path / "code.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    with pytest.raises(UsageError, match=r"^model\.path: .* needs code of its own, which is never"):
        load_config(tmp_path)
    with pytest.raises(UsageError, match=r"^model\.tokenizer: .* needs code of its own, which is never"):
        Tokenizer.load(str(tmp_path))
    assert not (tmp_path / "ran").exists()


class _Malicious:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("ran",)


def test_a_pickle_that_runs_code_is_refused_even_where_pickles_are_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from tiny_models import save_tiny_llama

    monkeypatch.chdir(tmp_path)
    folder = save_tiny_llama(tmp_path / "m")
    (folder / "model.safetensors").unlink()
    torch.save({"a": _Malicious()}, folder / "pytorch_model.bin")
    with pytest.raises(UsageError, match=r"^model\.path: .* could not be loaded"):
        load_model(folder, allow_pickle=True)
    assert not (tmp_path / "ran").exists()


def test_a_broken_gguf_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATCHGEN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "m.gguf").write_bytes(b"GGUF" + b"\0" * 64)
    with pytest.raises(UsageError, match="could not be read as GGUF"):
        tokenizer_folder(tmp_path / "m.gguf")
    assert [p for p in (tmp_path / "cache").rglob("*") if p.is_dir() and p.name.startswith("tokenizer")] == []


def test_missing_weights_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file
    from tiny_models import save_tiny_llama

    folder = save_tiny_llama(tmp_path / "m")
    weights = load_file(folder / "model.safetensors")
    weights.pop("model.layers.1.mlp.up_proj.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match=r"lacks 1 weight .* model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(folder)
