"""Tokenizers from the cache: the same as transformers loads, and only while nothing has changed."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizers import byte_fallback

from batchgen.text import stored_tokenizer, tokenizer
from batchgen.text.tokenizer import Tokenizer

TEXTS = ("hello", " a  b\n\n", "é中🙂", "<s>x</s>", "")
CHATML = "{% for m in messages %}{{ m.content }}{% endfor %}"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("BATCHGEN_CACHE", str(tmp_path / "cache"))
    place = tmp_path / "model"
    hf = byte_fallback().hf
    hf.chat_template = {"default": CHATML, "tool_use": "tools", "loud": "LOUD"}
    hf.save_pretrained(place)
    return place


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths that transformers was asked to load."""
    paths: list[str] = []
    load = tokenizer._load_by_transformers

    def noted(path: str) -> Any:
        paths.append(path)
        return load(path)

    monkeypatch.setattr(tokenizer, "_load_by_transformers", noted)
    return paths


def told(t: Tokenizer) -> list[Any]:
    return [
        t.eos_token_id,
        t.bos_token_id,
        t.chat_template,
        t.chat_source(),
        t.chat_source(with_tools=True),
        t.chat_source("loud"),
        t.template_variables,
        t.special_tokens,
        t.prefix_ids,
        t.suffix_ids,
        t.vocab_size,
        t.byte_tokens,
        t.fingerprint(),
        t.backend.to_str(),
        t.encode_batch(TEXTS),
        [t.decode(ids) for ids in t.encode_batch(TEXTS)],
    ]


def test_the_second_load_is_equal_and_without_transformers(folder: Path, loads: list[str]) -> None:
    first, second = Tokenizer.load(str(folder)), Tokenizer.load(str(folder))
    assert loads == [str(folder)]
    assert told(second) == told(first)
    assert second.hf("hello").input_ids == first.hf("hello").input_ids
    assert len(loads) == 2


@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "new.json"]
)
def test_every_changed_file_is_seen(folder: Path, loads: list[str], name: str) -> None:
    Tokenizer.load(str(folder))
    file = folder / name
    file.write_text(file.read_text() + "\n" if file.exists() else "{}")
    Tokenizer.load(str(folder))
    assert len(loads) == 2


@pytest.mark.parametrize("library", ["transformers", "tokenizers", "huggingface_hub"])
def test_another_version_of_a_library_loads_anew(
    folder: Path, loads: list[str], library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    Tokenizer.load(str(folder))
    version = stored_tokenizer.importlib.metadata.version
    monkeypatch.setattr(
        stored_tokenizer.importlib.metadata, "version", lambda n: "9" if n == library else version(n)
    )
    Tokenizer.load(str(folder))
    assert len(loads) == 2


@pytest.mark.parametrize("damage", ["flipped", "cut", "empty", "other"])
def test_a_damaged_entry_is_not_used(folder: Path, loads: list[str], damage: str, tmp_path: Path) -> None:
    expected = told(Tokenizer.load(str(folder)))
    [entry] = (tmp_path / "cache" / stored_tokenizer.KIND).iterdir()
    content = bytearray(entry.read_bytes())
    content[len(content) // 2] ^= 1
    entry.write_bytes(
        {"flipped": bytes(content), "cut": content[:-9], "empty": b"", "other": json.dumps({}).encode()}[
            damage
        ]
    )
    assert told(Tokenizer.load(str(folder))) == expected
    assert len(loads) == 2
    Tokenizer.load(str(folder))
    assert len(loads) == 2, "it was not kept again"


def test_a_cache_that_cannot_be_written_only_costs_time(
    folder: Path, loads: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BATCHGEN_CACHE", str(tmp_path / "file"))
    assert told(Tokenizer.load(str(folder))) == told(Tokenizer.load(str(folder)))
    assert len(loads) == 2


def test_only_so_many_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from batchgen import cache

    monkeypatch.setenv("BATCHGEN_CACHE", str(tmp_path))
    monkeypatch.setattr(cache, "MOST_ENTRIES", 3)
    for i in range(6):
        cache.keep("things", str(i), b"x")
    assert len(list((tmp_path / "things").iterdir())) == 3
    assert cache.recall("things", "5") == b"x"


def test_loading_from_the_cache_imports_no_transformers(folder: Path, tmp_path: Path) -> None:
    import subprocess

    Tokenizer.load(str(folder))
    code = (
        "import sys; from batchgen.text.tokenizer import Tokenizer; "
        f"Tokenizer.load({str(folder)!r}); print([m for m in ('torch', 'transformers') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
