"""From a job's `sampling` section to `SamplingParams`.

A key left null takes the model's generation configuration where the job allows it, else the neutral
value. Resolved once, at the first attempt, and pinned, so that a later change of the model's files
cannot change a half-finished job.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchgen.json_problem import json_problem
from batchgen.types import Reasoning, SamplingParams, UsageError

NEUTRAL: dict[str, Any] = {
    "temperature": 0.0,
    "top_p": 1.0,
    "top_k": 0,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
}
_GREEDY_TOO = ("repetition_penalty",)
_TUPLES = ("stop", "stop_token_ids", "bad_words", "allowed_token_ids")


def generation_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """What a model's `generation_config.json` says about the keys a job may leave null.

    A configuration that does not ask for sampling (`do_sample`) means greedy decoding, whatever else it
    mentions; transformers then applies only the penalty of repetition.
    """
    sampled = bool(generation_config.get("do_sample"))
    given = {key: generation_config.get(key) for key in (NEUTRAL if sampled else _GREEDY_TOO)}
    if sampled and given["temperature"] is None:
        given["temperature"] = 1.0
    return {key: value for key, value in given.items() if value is not None}


def read_generation_config(folder: Path) -> dict[str, Any]:
    """A model folder's `generation_config.json`; empty where there is none.

    Raises:
        UsageError: it is not JSON.
    """
    file = folder / "generation_config.json"
    try:
        config = json.loads(file.read_bytes()) if file.is_file() else {}
        if isinstance(config, dict):
            return config
        reason = "it holds no object"
    except (OSError, ValueError) as error:
        reason = json_problem(error) if isinstance(error, ValueError) else str(error)
    raise UsageError(
        f"model.path: {file} cannot be read ({reason}); "
        "download it again, or set model.generation_defaults: none"
    )


def unused_defaults(generation_config: Mapping[str, Any]) -> list[str]:
    """Keys of a model's generation configuration that ask for something batchgen does not do yet."""
    harmless: dict[str, Any] = {
        "no_repeat_ngram_size": 0,
        "typical_p": 1.0,
        "epsilon_cutoff": 0.0,
        "eta_cutoff": 0.0,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
        "bad_words_ids": None,
        "forced_eos_token_id": None,
        "exponential_decay_length_penalty": None,
        "num_beams": 1,
    }
    return [key for key, off in harmless.items() if generation_config.get(key) not in (None, off, [])]


def resolve_sampling(section: Mapping[str, Any], defaults: Mapping[str, Any]) -> SamplingParams:
    """Fill the nulls of a `sampling` section.

    Args:
        section: the job's keys; null where the user left them.
        defaults: from `generation_defaults`, or empty.

    Raises:
        UsageError: a value that is not allowed; names the field.
    """
    values = {key: value for key, value in section.items() if value is not None}
    for key, neutral in NEUTRAL.items():
        values.setdefault(key, defaults.get(key, neutral))
    for key in _TUPLES:
        values[key] = tuple(values.get(key, ()))
    if (marks := values.get("reasoning")) is not None:
        values["reasoning"] = Reasoning(marks["start"], marks["end"])
    # Keys of JSON and YAML are strings.
    values["logit_bias"] = {int(token): bias for token, bias in values.get("logit_bias", {}).items()}
    try:
        return SamplingParams(**values)
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error


def beyond_vocabulary(sampling: SamplingParams, vocab_size: int) -> str | None:
    """What is wrong with token ids that the model does not know; None where it knows all.

    Ids that end a row are not looked at: one that never comes ends none.
    """
    for name, ids in (
        ("logit_bias", sampling.logit_bias),
        ("allowed_token_ids", sampling.allowed_token_ids),
    ):
        highest = max(ids, default=0)
        if highest >= vocab_size:
            return f"{name}: token id {highest} is not allowed; the model knows ids up to {vocab_size - 1}"
    return None
