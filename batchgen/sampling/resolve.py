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
from batchgen.types import SamplingParams, UsageError

NEUTRAL: dict[str, Any] = {"temperature": 0.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0}


def generation_defaults(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """What a model's `generation_config.json` says about the keys a job may leave null.

    Only a configuration that asks for sampling (`do_sample`) sets any: without it the file means
    greedy decoding, whatever else it mentions.
    """
    if not generation_config.get("do_sample"):
        return {}
    given = {key: generation_config.get(key) for key in NEUTRAL}
    given["temperature"] = 1.0 if given["temperature"] is None else given["temperature"]
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
        "repetition_penalty": 1.0,
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
    values["stop"] = tuple(values.get("stop", ()))
    values["stop_token_ids"] = tuple(values.get("stop_token_ids", ()))
    try:
        return SamplingParams(**values)
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error
