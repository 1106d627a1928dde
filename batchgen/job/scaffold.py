"""The text of a first job file, from what the input's first rows look like. Called by `batchgen init`."""

from __future__ import annotations

import json
import keyword
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

FOUND_BY_NAME = ("messages", "prompt")
TOKENS = "prompt_token_ids"
LIKELY_TEXTS = ("question", "instruction", "input", "text", "body", "content", "query", "problem", "document")
LIKELY_IDS = ("key", "uuid", "uid", "task_id", "custom_id", "name")
MOST_TEXTS = 3
_TAKEN = {"true", "false", "none", "range", "dict", "lipsum", "cycler", "joiner", "namespace", "self", "loop"}
"""Names that mean something else in a Jinja template."""


@dataclass(frozen=True, slots=True)
class Proposal:
    """What the input suggests.

    Args:
        mode: `chat`, `completion` or `tokens`.
        messages: column with conversations that is not found by its name.
        user: template of the prompt, where no column is found by its name.
        id: column with distinct ids that is not found by its name.
        columns: of the input.
    """

    mode: str = "chat"
    messages: str | None = None
    user: str | None = None
    id: str | None = None
    columns: tuple[str, ...] = ()


def propose_prompt(rows: Sequence[Mapping[str, Any]], *, chat: bool) -> Proposal:
    """Look at rows.

    Args:
        rows: values by column, of the first rows that can be read.
        chat: whether the model has a chat template.
    """
    columns = tuple(dict.fromkeys(name for row in rows for name in row))
    mode = "chat" if chat else "completion"
    usable = FOUND_BY_NAME if chat else ("prompt",)
    found: dict[str, Any] = {}
    if not any(name in columns for name in usable):
        conversation = next((name for name in columns if chat and _is_conversation(rows, name)), None)
        if conversation is not None:
            found["messages"] = conversation
        elif TOKENS in columns:
            mode = "tokens"
        else:
            found["user"] = _template(rows, columns)
    return Proposal(mode=mode, id=_id_column(rows, columns), columns=columns, **found)


def _is_conversation(rows: Sequence[Mapping[str, Any]], name: str) -> bool:
    values = [row[name] for row in rows if row.get(name) is not None]
    return bool(values) and all(map(_is_messages, values))


def _is_messages(value: Any) -> bool:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return False
    return isinstance(value, list) and bool(value) and all(isinstance(m, dict) and "role" in m for m in value)


def _template(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str | None:
    """The columns whose names promise a text, else the one with the longest texts; None if there is none."""
    texts = {name: length for name in columns if (length := _mean_length(rows, name)) and _is_variable(name)}
    chosen = [name for name in columns if name.lower() in LIKELY_TEXTS and name in texts][:MOST_TEXTS]
    if not chosen and texts:
        chosen = [max(texts, key=lambda name: texts[name])]
    return "\n".join(f"{{{{ {name} }}}}" for name in chosen) or None


def _mean_length(rows: Sequence[Mapping[str, Any]], name: str) -> float:
    """Of a column of strings; 0 where a row has none, so that no row would lack a prompt."""
    values = [row.get(name) for row in rows]
    if not values or not all(isinstance(value, str) and value for value in values):
        return 0.0
    return sum(len(str(value)) for value in values) / len(values)


def _is_variable(name: str) -> bool:
    """Whether a Jinja template can name the column."""
    word = re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)
    return word is not None and not keyword.iskeyword(name) and name not in _TAKEN


def _id_column(rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> str | None:
    if "id" in columns:
        return None
    for name in columns:
        if name.lower() in LIKELY_IDS or name.lower().endswith("_id"):
            values = [row.get(name) for row in rows]
            if all(isinstance(v, str | int) for v in values) and len(set(map(str, values))) == len(values):
                return name
    return None


def job_text(*, model: str, input: str, output: str, proposal: Proposal) -> str:
    """The job file."""
    names = ", ".join(map(quoted, proposal.columns))
    lines = [
        "# A job for batchgen. Check it: batchgen validate FILE. Run it, or continue it: batchgen run FILE.",
        "version: 1",
        "",
        f"model: {quoted(model)}  # hub id, folder or .gguf file",
        "",
        *([f"# Columns of the input: {names}"] if names else []),
        "input:",
        f"  path: {quoted(input)}  # file, glob pattern, URL, or a list of them",
        f"  id: {quoted(proposal.id or 'auto')}  # column that names a row; auto: `id`, else file:row",
        "  limit: null  # only the first N rows, to try things out",
        "",
        "prompt:",
        *_prompt_lines(proposal),
        "",
        "sampling:  # null takes the model's own default",
        "  temperature: null  # 0 is greedy: the likeliest token each time",
        "  top_p: null",
        "  max_tokens: 256  # of each answer",
        "  seed: 0  # same seed, same answers",
        "",
        f"output:\n  path: {quoted(output)}  # results in data/ under it",
        "  format: parquet  # parquet, jsonl or openai_batch",
    ]
    return "\n".join(lines) + "\n"


def _prompt_lines(proposal: Proposal) -> list[str]:
    lines = [f"  mode: {proposal.mode}  # chat (by the model's chat template), completion or tokens"]
    named = next((name for name in (*FOUND_BY_NAME, TOKENS) if name in proposal.columns), None)
    if proposal.messages is not None:
        lines.append(f"  messages: {quoted(proposal.messages)}  # column with the conversation")
    elif proposal.user is not None:
        lines.append(f"  user: {quoted(proposal.user)}  # a column in double braces is a row's value")
    elif named is not None:
        lines.append(f"  # The column {named} is found by its name.")
    if proposal.mode == "chat":
        lines.append("  system: null  # instructions that come first in each conversation")
    return lines


def quoted(text: str) -> str:
    """A YAML scalar that is this string whatever it looks like."""
    plain = re.fullmatch(r"[A-Za-z./][A-Za-z0-9_./-]*", text)
    if plain and text.lower() not in ("true", "false", "null"):
        return text
    return str(yaml.safe_dump(text, default_style='"', width=1_000_000)).rstrip("\n")
