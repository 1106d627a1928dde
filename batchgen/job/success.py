"""`_SUCCESS`: the last file that a job writes, when every row of its selection is final."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from batchgen.grammar import agreeing, counted
from batchgen.job.files import OS_FILES, atomic_write
from batchgen.job.folder import JobFolder
from batchgen.types import StorageError


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


def rows_lost(folder: JobFolder, rows_in_parts: int) -> int:
    """How many rows of a complete folder are in no part any more, because files are gone or damaged.

    Args:
        folder: the output folder.
        rows_in_parts: what was found there before this is called.
    """
    success = read_success(folder)
    return 0 if success is None else max(0, success["rows"] - rows_in_parts)


def lost_sentence(folder: JobFolder, rows: int) -> str:
    """What to do about rows that are lost."""
    return (
        f"{folder.data}: {counted(rows, 'row')} of this complete job {agreeing(rows, 'is', 'are')} gone, "
        "because files of parts are missing or "
        "damaged; `batchgen verify` names them, and running the job again computes their rows anew"
    )


def refuse_lost(folder: JobFolder, rows_in_parts: int) -> None:
    """Let nobody take what is left of a complete folder for all of it. Raises StorageError."""
    if lost := rows_lost(folder, rows_in_parts):
        raise StorageError(lost_sentence(folder, lost))
