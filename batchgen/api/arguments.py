"""Arguments of the Python interface, held to what they mean before anything is done with them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from batchgen.data.urls import is_url
from batchgen.job.faults import show_value
from batchgen.types import UsageError

_LONGEST_NAME = 255
"""Bytes of a file's name on the file systems of Linux (NAME_MAX)."""


def path_text(argument: str, value: Any) -> str:
    """A path, or what may stand in place of one such as a hub id, as text.

    Args:
        argument: how messages name it.
        value: text or `os.PathLike`.

    Raises:
        UsageError: it is neither, or no path at all.
    """
    if not isinstance(value, str | os.PathLike):
        raise UsageError(f"{argument}: {show_value(value)} is not a path; give text or a pathlib.Path")
    text = os.fsdecode(value)
    if not text or "\0" in text:
        raise UsageError(f"{argument}: {show_value(text)} is a name that no file can have; give another")
    return text


def local_path(argument: str, value: Any) -> Path:
    """A path of this machine, `~` expanded. Arguments and errors as of `path_text`."""
    return Path(os.path.expanduser(path_text(argument, value)))


def own_folder(argument: str, value: Any) -> Path:
    """A folder of this machine that a call may make, absolute. Errors as of `local_path`, and of a URL."""
    folder = local_path(argument, value)
    if isinstance(value, str) and is_url(value):
        raise UsageError(f"{argument}: {show_value(value)} is not a folder of this machine; give one")
    return folder.absolute()


def new_columns(output_column: Any, error_column: Any) -> tuple[str, str]:
    """The names of the two columns that `map` adds.

    Args:
        output_column: as given to `map`.
        error_column: as given to `map`; None: the other with `_error` behind it.

    Raises:
        UsageError: one is no name, or both are the same.
    """
    output = _column("output_column", output_column)
    error = f"{output}_error" if error_column is None else _column("error_column", error_column)
    if output == error:
        raise UsageError(
            f"map: error_column: {show_value(error)} is the output_column too; give another name"
        )
    return output, error


def _column(argument: str, name: Any) -> str:
    if isinstance(name, str) and name:
        return name
    raise UsageError(
        f"map: {argument}: {show_value(name)} is not the name of a column; give text with letters"
    )


def split_folder(output: Path, split: Any) -> Path:
    """The folder of one split, directly in `output`.

    Raises:
        UsageError: the split's name is not that of a folder, such as one that leads elsewhere.
    """
    if (
        isinstance(split, str)
        and split not in ("", ".", "..")
        and not set(split) & set("/\\")
        and split.isprintable()
        and len(os.fsencode(split)) <= _LONGEST_NAME
    ):
        return output / split
    raise UsageError(
        f"map: the split {show_value(split)} has a name that no folder in output can have; rename the split"
    )
