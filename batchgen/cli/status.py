"""`batchgen status`: how far a job is and who works on it, from its output folder alone."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import click

from batchgen.cli.options import AS_JSON, FOLDER, human_size, needs_local, print_json
from batchgen.grammar import counted

if TYPE_CHECKING:
    from batchgen.job.status import JobStatus

MESSAGES = 5
WATCH_SECONDS = 2.0
LINE_SECONDS = 30.0


@click.command("status", short_help="How far a job is, who works on it, its last error; from any host.")
@FOLDER
@click.option("--watch", is_flag=True, help="Go on until the job ends; redraws on a terminal.")
@AS_JSON
def command(folder: Path, watch: bool, as_json: bool) -> int:
    """Show how far the job of an output folder is and who works on it, running or dead, from any host.

    With --watch and --json: one object a line every two seconds.
    """
    from batchgen.job.status import read_status

    if watch:
        needs_local("--watch follows a local folder; leave it out and ask again")
    status = read_status(folder)
    if watch:
        _watch(status, _Json() if as_json else _screen_for(sys.stdout))
    elif as_json:
        print_json(status.to_json())
    else:
        click.echo("\n".join(describe(status)))
    return 0


def _watch(
    status: JobStatus,
    screen: _Screen,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Show the status again and again while the job runs; what it ended with is shown last."""
    from batchgen.job.status import glance

    shown_at = -LINE_SECONDS
    while True:
        now = clock()
        ended = status.state != "running"
        if ended or now - shown_at >= screen.every:
            shown_at = now
            screen.show(status)
        if ended:
            return
        sleep(WATCH_SECONDS)
        status = glance(status)


class _Screen:
    """Redraws a terminal in place."""

    every = WATCH_SECONDS

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._lines = 0

    def show(self, status: JobStatus) -> None:
        import shutil

        size = shutil.get_terminal_size()
        # A line that wraps, or scrolls away, could not be drawn over.
        lines = [line[: size.columns - 1] for line in describe(status)][: max(1, size.lines - 1)]
        up = f"\x1b[{self._lines}A\r\x1b[J" if self._lines else ""
        self._stream.write(up + "".join(f"{line}\n" for line in lines))
        self._stream.flush()
        self._lines = len(lines)


class _Log(_Screen):
    """A line now and then, and everything at the end."""

    every = LINE_SECONDS

    def show(self, status: JobStatus) -> None:
        lines = describe(status) if status.state != "running" else [summary(status)]
        self._stream.write("".join(f"{line}\n" for line in lines))
        self._stream.flush()


class _Json(_Screen):
    """An object a line."""

    def __init__(self) -> None:
        super().__init__(sys.stdout)

    def show(self, status: JobStatus) -> None:
        self._stream.write(json.dumps(status.to_json(), allow_nan=False) + "\n")
        self._stream.flush()


def _screen_for(stream: TextIO) -> _Screen:
    return _Screen(stream) if stream.isatty() else _Log(stream)


def summary(status: JobStatus) -> str:
    """One line about a job that runs."""
    from batchgen.api.progress import clock

    return (
        f"{_rows(status)}, {status.rows_per_second:,.2f} rows/s, "
        f"{status.prompt_tokens_per_second:,.0f} tok/s in, {status.output_tokens_per_second:,.0f} out, "
        f"ETA {clock(status.eta_seconds)}"
    )


def describe(status: JobStatus) -> list[str]:
    """Lines about a job in any state; nothing in them can steer a terminal or pass for another line."""
    from batchgen.text.terminal import safe_line

    return [safe_line(line) for line in _lines(status)]


def _lines(status: JobStatus) -> list[str]:
    lines = [
        f"{status.folder}: {status.state}",
        f"rows      {_rows(status)}",
        f"parts     {status.parts:,}, {human_size(status.bytes_in_parts)}; "
        f"journal {human_size(status.bytes_in_journal)}; {human_size(status.bytes_free)} free on the disk",
        f"tokens    {status.tokens_sampled:,} sampled, {status.tokens_lost:,} to be computed again"
        + (f"; {status.reasoning_tokens:,} of the results are reasoning" if status.reasoning_tokens else ""),
        f"attempts  {status.attempts:,}",
    ]
    if status.state == "running":
        lines += _speed(status)
    if status.owner is not None:
        lines.append(f"lease     process {status.owner['pid']} on {status.owner['host']}, {_life(status)}")
    last = status.last_attempt["number"] if status.last_attempt is not None else None
    for worker in status.workers:
        if worker.attempt == last:
            end = worker.end or ("running" if status.state == "running" else "end not seen")
            lines.append(
                f"worker    {worker.number}, process {worker.pid}: {end}, "
                f"{counted(worker.sampled, 'token')} sampled"
            )
    if status.last_error is not None:
        lines.append(f"error     {status.last_error}")
    for message in status.messages[-MESSAGES:]:
        # A message of several lines stays one message: what follows is indented.
        first, *others = message.split("\n")
        lines += [f"note      {first}", *(f"          {line}" for line in others)]
    return lines


def _rows(status: JobStatus) -> str:
    skipped = f", {status.skipped:,} skipped" if status.skipped else ""
    # How many there are is known once the input was read to its end.
    total = "so far" if status.rows_total is None else f"of {status.rows_total:,}"
    return f"{status.rows_done:,} {total}: {status.ok:,} ok, {status.error:,} failed{skipped}"


def _speed(status: JobStatus) -> list[str]:
    from batchgen.api.progress import clock

    progress = status.progress or {}
    hits = "" if status.prefix_hit_share is None else f", {status.prefix_hit_share:.0%} prefix hits"
    return [
        f"rate      {status.rows_per_second:,.2f} rows/s, {status.prompt_tokens_per_second:,.0f} tok/s in, "
        f"{status.output_tokens_per_second:,.0f} out{hits}, ETA {clock(status.eta_seconds)}",
        f"engine    {progress.get('state', 'starting')}: {counted(progress.get('running', 0), 'row')} "
        f"running, {progress.get('waiting', 0):,} waiting, "
        f"{counted(progress.get('preemptions', 0), 'preemption')}",
    ]


def _life(status: JobStatus) -> str:
    owner = status.owner or {}
    if owner["released"]:
        return "released"
    return f"beat {owner['beat']}, alive" if owner["alive"] else f"beat {owner['beat']}, gone"
