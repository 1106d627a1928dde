"""`_SUCCESS`: the last file that a job writes, when every row of its selection is final."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from batchgen.job.files import OS_FILES, atomic_write
from batchgen.job.folder import JobFolder


def write_success(
    folder: JobFolder,
    *,
    rows: int,
    files: int,
    first: int,
    stop: int,
    whole: bool,
    still_owner: Callable[[], None],
) -> None:
    """Say that the folder is complete.

    Args:
        folder: the output folder.
        rows: in all parts.
        files: parts that have any.
        first, stop: ordinals of the first row of the selection and of the one after the last looked at.
        whole: whether the input ends there.
        still_owner: as for `atomic_write`.

    Raises:
        StorageError: it cannot be written.
        OwnershipError: another process has taken over.
    """
    success = {"rows": rows, "parts": files, "first": first, "stop": stop, "whole_input": whole}
    atomic_write(folder.success, json.dumps(success).encode() + b"\n", OS_FILES, still_owner)


def read_success(folder: JobFolder) -> dict[str, Any] | None:
    """What it says; None where there is none that can be read."""
    try:
        success = json.loads(folder.success.read_bytes())
        # Before a selection could begin or end anywhere, it was all rows up to the last.
        found = {"first": 0, "stop": success["rows"], "whole_input": False, **success}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if all(isinstance(found[name], int) for name in ("rows", "first", "stop")) else None
