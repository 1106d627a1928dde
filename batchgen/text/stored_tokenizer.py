"""Tokenizers as they were once transformers had loaded them, kept in the cache.

transformers takes two seconds to load one: most of it goes to code that has nothing to do with tokenizers.
`Tokenizer.load` calls this. What is kept is the state of the `tokenizers` library, which does all the work
either way, and what batchgen asks of the tokenizer's files beside that; it is used only while these files and
the libraries are the same, byte for byte.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from batchgen.cache import keep, key_of, recall

FORMAT = "1"
KIND = "tokenizers"
_LARGEST = 64 * 1024 * 1024
_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth", ".onnx", ".h5", ".msgpack")


@dataclass(frozen=True, slots=True)
class StoredFacts:
    """What a tokenizer's files say, beside what the `tokenizers` library does.

    Args:
        eos_token_id, bos_token_id: None where there is none.
        chat_template: the template, or several by name.
        special_tokens_map: special tokens by the names of their kinds.
    """

    eos_token_id: int | None
    bos_token_id: int | None
    chat_template: str | dict[str, str] | None
    special_tokens_map: dict[str, str]


def facts_of(hf: Any) -> StoredFacts:
    """Of a tokenizer of transformers."""
    template = hf.chat_template
    return StoredFacts(
        hf.eos_token_id,
        hf.bos_token_id,
        dict(template) if isinstance(template, Mapping) else template,
        dict(hf.special_tokens_map),
    )


def stored_key(folder: Path) -> str | None:
    """Everything that decides what transformers makes of a folder; None where that cannot be known."""
    names = ("transformers", "tokenizers", "huggingface_hub")
    parts: list[str | bytes] = [FORMAT, *map(importlib.metadata.version, names)]
    try:
        found = [*folder.iterdir(), *folder.glob("additional_chat_templates/*")]
        files = sorted(file for file in found if file.is_file())
        for file in files:
            if file.suffix in _WEIGHTS:
                continue
            if file.stat().st_size > _LARGEST:
                return None
            parts += [file.relative_to(folder).as_posix(), file.read_bytes()]
    except OSError:
        return None
    return key_of(parts)


def load_stored(key: str) -> tuple[Any, StoredFacts] | None:
    """A tokenizer of the `tokenizers` library and the facts beside it; None if none was kept."""
    content = recall(KIND, key)
    if content is None:
        return None
    import tokenizers

    with suppress(ValueError, KeyError, TypeError):
        facts, _, backend = content.partition(b"\0")
        return tokenizers.Tokenizer.from_str(backend.decode()), StoredFacts(**json.loads(facts))
    return None


def keep_tokenizer(key: str, backend: Any, facts: StoredFacts) -> None:
    """Remember a tokenizer, if what comes back is the same."""
    import tokenizers

    state = backend.to_str()
    if tokenizers.Tokenizer.from_str(state).to_str() == state:
        keep(KIND, key, json.dumps(asdict(facts)).encode() + b"\0" + state.encode())
