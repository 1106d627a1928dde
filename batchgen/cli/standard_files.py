"""The standard files of a command: there, and written without hope. `main` calls it.

Under cron and daemons they may be closed, and where they go a disk may be full; neither is a reason to lose
a job, nor a bug.
"""

from __future__ import annotations

import errno
import os
import sys
from contextlib import suppress

import click

_CANNOT_WRITE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF}


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


def refused_output(error: OSError) -> str | None:
    """A sentence about an error of writing to standard output; None for one that is about a file."""
    if error.errno not in _CANNOT_WRITE or error.filename is not None:
        return None
    return f"standard output cannot be written: {error.strerror}; send it elsewhere"


def say_if_possible(message: str) -> None:
    """One line on standard error, if that can be written."""
    with suppress(OSError):
        click.echo(message, err=True)
