"""Finding a model: each wrong path gets one clear sentence."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchgen.models.gguf import tokenizer_folder
from batchgen.models.loader import load_model
from batchgen.models.source import find_model
from batchgen.types import UsageError


def test_a_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"holds no config\.json"):
        find_model(str(tmp_path))


def test_a_missing_gguf(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no file"):
        find_model(str(tmp_path / "m.gguf"))


def test_neither_folder_nor_id(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="neither a model folder"):
        find_model(str(tmp_path / "nothing"))


def test_a_hub_id_that_cannot_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UsageError, match="could not be had from the hub"):
        find_model("nobody/no-such-model")


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
    with pytest.raises(UsageError, match=r"lacks 1 weights .* model\.layers\.1\.mlp\.up_proj\.weight"):
        load_model(folder)
