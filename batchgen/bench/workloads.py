"""The rows that are measured: token ids, and how many tokens to generate for each.

`shared-prefix` has 128 chats under one system prompt of 256 tokens, `unique` 128 chats of 64 to 512 tokens
with nothing in common; `single` is one of these alone. `prefill` is 32 prompts of 8,000 tokens with next to
no output, `decode` 128 prompts of 1,024 tokens that go on for 256. The text is that of Python's reference
manual, in tokens of SmolLM2. Some rows hold what transformers generates for them in float32, greedily and
past the end of the sequence.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import resources
from itertools import chain
from pathlib import Path
from typing import Any

STANDARD = ("shared-prefix", "unique", "single")
LONG = ("prompts-500", "prompts-8000", "outputs-128", "outputs-2048")
HEAVY = ("prefill", "decode")
NAMES = (*STANDARD, *LONG, *HEAVY)
WINDOW = 512
_WINDOWS = 8
_SINGLE_PROMPT, _SINGLE_TOKENS = 64, 64
_PROMPTS = 8_000
_SIDE_BY_SIDE, _BEFORE = 8, 64
_ROTATED = {"prefill": (32, _PROMPTS, 4, 0, 1009), "decode": (128, 1024, 256, 503, 283)}
"""Rows, tokens of a prompt and of its output, and where in the text the first begins and by how much the next
is further on: far enough that no two prompts begin alike."""
REFERENCE_SHAPE = {"vocab_size": 49152, "hidden_size": 576, "num_hidden_layers": 30}
"""Of SmolLM2-135M-Instruct, whose outputs the references are."""


@dataclass(frozen=True, slots=True)
class BenchRow:
    """A prompt and its forced output length; `reference` is what float32 gives, where that is known."""

    prompt_ids: list[int]
    max_new_tokens: int
    reference: list[int] | None = None

    def to_json(self) -> dict[str, Any]:
        """What a measured process needs."""
        return {"prompt_ids": self.prompt_ids, "max_new_tokens": self.max_new_tokens}


@dataclass(frozen=True, slots=True)
class Workload:
    """Rows under a name."""

    name: str
    rows: list[BenchRow]


def load_workload(name: str, limit: int | None = None) -> Workload:
    """The rows of a workload, or the first ones of it.

    Args:
        name: of `NAMES`.
        limit: most rows.
    """
    return Workload(name, _rows(name)[:limit])


def warmup_rows() -> list[BenchRow]:
    """Rows that have nothing in common with those that are measured."""
    return list(_read("warmup"))


def windows() -> list[list[int]]:
    """Real text to score: `WINDOW` tokens each."""
    return [list(piece) for piece in _pieces(_text(), WINDOW)][:_WINDOWS]


def write_rows(path: Path, rows: Iterable[BenchRow]) -> Path:
    """For a measured process."""
    path.write_text(json.dumps([row.to_json() for row in rows]))
    return path


def _rows(name: str) -> list[BenchRow]:
    text = _text() if name not in ("shared-prefix", "unique") else []
    match name:
        case "single":
            return [BenchRow(text[:_SINGLE_PROMPT], _SINGLE_TOKENS)]
        case "prompts-500":
            return [BenchRow(piece, 1) for piece in _pieces(text[:_PROMPTS], 500)]
        case "prompts-8000":
            return [BenchRow(text[:_PROMPTS], 1)]
        case "outputs-128" | "outputs-2048":
            prompts = _pieces(text[: _SIDE_BY_SIDE * _BEFORE], _BEFORE)
            return [BenchRow(piece, int(name.removeprefix("outputs-"))) for piece in prompts]
        case "prefill" | "decode":
            count, length, tokens, first, step = _ROTATED[name]
            starts = [(first + i * step) % len(text) for i in range(count)]
            return [BenchRow((text[start:] + text)[:length], tokens) for start in starts]
    return list(_read(name))


def _text() -> list[int]:
    return list(chain.from_iterable(row.prompt_ids for row in _read("unique")))


def _pieces(ids: list[int], length: int) -> list[list[int]]:
    return [ids[i : i + length] for i in range(0, len(ids) - length + 1, length)]


def _read(name: str) -> Iterator[BenchRow]:
    data = resources.files(__package__).joinpath("rows", f"{name}.jsonl.gz").read_bytes()
    for line in gzip.decompress(data).splitlines():
        yield BenchRow(**json.loads(line))
