"""A folder made by `datasets.Dataset.save_to_disk`, as the files to read. For `find_files`."""

from __future__ import annotations

import json
import os
from typing import Any

from batchgen.types import InputError, UsageError

STATE = "state.json"
SPLITS = "dataset_dict.json"


def saved_files(folder: str) -> list[str]:
    """The Arrow files of a saved dataset, in its own order.

    Raises:
        UsageError: the folder is no saved dataset, or one of several splits.
        InputError: what describes it is damaged.
    """
    if os.path.isfile(os.path.join(folder, SPLITS)):
        splits = _read(folder, SPLITS)["splits"]
        if len(splits) != 1:
            names = " or ".join(os.path.join(folder, str(split)) for split in splits)
            raise UsageError(f"input.path: {folder} holds the splits of a dataset; name one: {names}")
        return saved_files(os.path.join(folder, str(splits[0])))
    if not os.path.isfile(os.path.join(folder, STATE)):
        raise UsageError(
            f"input.path: {folder} is a folder; name files or a pattern such as {folder}/*.jsonl"
        )
    state = _read(folder, STATE)
    if state.get("_indices_data_files"):
        raise UsageError(
            f"input.path: {folder} keeps its rows in another order than its files; "
            "save it again with flatten_indices().save_to_disk(...)"
        )
    return [os.path.join(folder, str(entry["filename"])) for entry in state["_data_files"]]


def _read(folder: str, name: str) -> dict[str, Any]:
    path = os.path.join(folder, name)
    wanted = "splits" if name == SPLITS else "_data_files"
    try:
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
        if not isinstance(found[wanted], list):
            raise TypeError
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise InputError(f"{path}: does not describe a saved dataset; save it again") from e
    return dict(found)
