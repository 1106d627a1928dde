"""Writes the folders in `tests/job/data`: one for each format, as the version that introduced it left it.

`python tests/job/old_folders.py 1` makes the folder of format 1 anew. Until a first release has been made,
whoever changes what lies in a folder may do that; afterwards a folder once written stays, and a change adds
to `batchgen.job.manifest.UPGRADES` and writes a folder of the next format.
"""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import sys
from pathlib import Path

from job_driver import Settings, run_here
from job_inputs import write_jsonl

from batchgen.job import lease
from batchgen.types import InputError

DATA = Path(__file__).with_name("data")
NAME = "in.jsonl"


def settings_of(folder: Path) -> Settings:
    """The job of the folder, wherever it was copied to."""
    return Settings(output=str(folder / "out"), input=str(folder / NAME))


def be_nobody() -> None:
    """Nothing of the machine that writes the folder is to be in it."""
    socket.gethostname = lambda: "somewhere"
    getpass.getuser = lambda: "someone"
    lease._boot_id = lambda: "a boot of long ago"  # type: ignore[assignment]
    lease._pid_namespace = lambda: "pid:[1]"  # type: ignore[assignment]


def write(folder: Path) -> None:
    """A job with finished parts, a retry behind it, rows in the journal and others begun."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    write_jsonl(folder / NAME, 40)
    os.utime(folder / NAME, (1_700_000_000, 1_700_000_000))
    be_nobody()
    os.chdir(folder)
    settings = settings_of(Path())
    settings.limit, settings.worker = 20, {"faults": [{"do": "timeout", "rows": [3]}]}
    run_here(settings)
    settings.worker, settings.retry = {}, {"where": None, "temperature": None}
    run_here(settings)
    settings.retry, settings.limit = None, None
    fault = {"do": "fatal", "after_tokens": 60, "exit_code": 3, "message": "the card fell out"}
    settings.worker = {"faults": [fault]}
    try:
        run_here(settings)
    except InputError:
        for report in Path("out").glob("report.*"):
            report.unlink()
        return
    raise SystemExit("the job was to end half-way")


if __name__ == "__main__":
    write(DATA / f"format-{sys.argv[1]}")
