"""What a program gives in place of a job file or of `--set`, as values that a job file can hold."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from typing import Any

from batchgen.job.faults import show_value
from batchgen.job.load import Override
from batchgen.job.yaml_loader import split_key
from batchgen.types import UsageError


def plain_values(values: Mapping[str, Any], at: str = "") -> dict[str, Any]:
    """The same keys with values that JSON knows: a path becomes its text, a whole number as key too.

    Args:
        values: the keys of a job file or of a part of it.
        at: how messages name the part; each message begins with it and the key.

    Raises:
        UsageError: a value or a key that no job file can hold.
    """
    try:
        return {_key(key, at): _plain(value, f"{at}.{key}" if at else key) for key, value in values.items()}
    except RecursionError:
        raise UsageError(
            f"{at or 'the job'} is nested too deep for a job file, or holds itself; make it flatter"
        ) from None


def overrides_of(values: Mapping[str, Any] | None) -> list[Override]:
    """The settings of a dict from dotted keys to values.

    Raises:
        UsageError: it is no such dict, or holds what no job file can hold.
    """
    if values is None:
        return []
    if not isinstance(values, Mapping):
        raise UsageError(
            f"overrides: {show_value(values)} is not a dict; use one from dotted keys to values, such as "
            '{"input.limit": 10}'
        )
    for key in values:
        if not isinstance(key, str) or not split_key(key):
            raise UsageError(
                f"overrides: {show_value(key)} is not a key; use a dotted one, such as 'input.limit'"
            )
    return [
        Override(key, json.dumps(plain_values({key: value}, "override")[key]), f"override {key}")
        for key, value in values.items()
    ]


def _plain(value: Any, at: str) -> Any:
    if isinstance(value, os.PathLike):
        return os.fsdecode(value)
    if isinstance(value, Mapping):
        return {_key(key, at): _plain(inner, f"{at}.{key}") for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, f"{at}[{n}]") for n, inner in enumerate(value)]
    if value is None or isinstance(value, str | int | float):
        return value
    raise UsageError(
        f"{at}: {show_value(value)} is of type {type(value).__name__}, which a job file cannot hold; use "
        "text, numbers, lists, dicts or paths"
    )


def _key(key: Any, at: str) -> str:
    if isinstance(key, str):
        return key
    if isinstance(key, int) and not isinstance(key, bool):
        return str(key)
    raise UsageError(f"{at or 'the job'}: {show_value(key)} is a key and not text; use text for keys")
