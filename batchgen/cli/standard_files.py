"""The standard files of a command: there, and written without hope. `main` calls it.

Under cron and daemons they may be closed, and where they go a disk may be full; neither is a reason to lose
a job, nor a bug.
"""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

STANDARD_OUTPUT = "standard output"


class _StandardOutput(io.FileIO):
    """The file of standard output, whose errors name it as those of other files do."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self._refused = False

    def write(self, data: ReadableBuffer, /) -> int:
        if self._refused:
            # What buffers still hold would be tried, and complained of, once more at exit.
            return memoryview(data).nbytes
        try:
            return super().write(data)
        except OSError as error:
            self._refused = True
            error.filename = STANDARD_OUTPUT
            raise


def open_standard_files() -> None:
    """Open those of the files 0 to 2 that are closed, to nowhere.

    Else a file of the job gets the number 1 or 2, and what libraries print or workers say lands in it.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    if isinstance(sys.__stdout__, io.TextIOWrapper) and sys.stdout is sys.__stdout__:
        sys.stdout = _named(sys.__stdout__)


def _named(stream: io.TextIOWrapper) -> io.TextIOWrapper:
    """The same stream, with errors that name it."""
    stream.flush()
    return io.TextIOWrapper(
        io.BufferedWriter(_StandardOutput(stream.fileno())),
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
    )


def refused_output(error: OSError) -> str | None:
    """A sentence about an error of writing to standard output; None for one that is about another file."""
    if error.filename != STANDARD_OUTPUT:
        return None
    return f"{STANDARD_OUTPUT} cannot be written: {error.strerror}; send it elsewhere"


def say_if_possible(message: str) -> None:
    """One line on standard error, if that can be written."""
    with suppress(OSError):
        click.echo(message, err=True)
