"""Starts a worker process and carries messages to and from it. The supervisor holds one handle a worker.

Nothing here blocks the supervisor's loop: a thread writes what is to be sent, another reads and hands each
message to a callback.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from batchgen.dist.channel import Channel, ChannelClosed, pack
from batchgen.job.files import storage

WORKER_COMMAND = (sys.executable, "-m", "batchgen.dist.worker")
KILL_SECONDS = 5.0
# How long OpenMP threads spin for more work before they sleep. By default they spin so long that matrix
# products slow down several times where anything else wants a core, the supervisor included; sleeping at
# once costs a quarter on an idle machine. Measured at 3000: 4 to 8 % there, and no loss on a busy one.
SPINS = "3000"
_TAIL_BYTES = 64 * 1024


class WorkerHandle:
    """A running worker.

    Args:
        process: the child.
        channel: to it.
        log: what it writes to standard output and error.
        on_message: called from a thread with each message, then once with None when the channel closes.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        channel: Channel,
        log: Path,
        on_message: Callable[[dict[str, Any] | None], None],
    ) -> None:
        self._process = process
        self._channel = channel
        self._log = log
        self._on_message = on_message
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        for target in (self._write, self._read):
            threading.Thread(target=target, name=target.__name__, daemon=True).start()

    @property
    def pid(self) -> int:
        """Of the worker process."""
        return self._process.pid

    def send(self, message: Mapping[str, Any]) -> None:
        """Queue a message; never blocks. What a dead worker does not receive is lost."""
        self._outbox.put(pack(message))

    def poll(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        return self._process.poll()

    def wait(self, seconds: float) -> int | None:
        """Exit code once it has ended; None after `seconds`."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self._process.wait(seconds)
        return None

    def kill(self) -> None:
        """End the worker and everything in its process group, and reap it."""
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
            # A process in uninterruptible sleep dies when the kernel lets it; nobody waits for that.
            self.wait(KILL_SECONDS)
        self.close()

    def close(self) -> None:
        """Close the channel and end the threads; a worker that still runs sees the end of the stream."""
        self._outbox.put(None)
        self._channel.close()

    def last_lines(self, count: int = 20) -> list[str]:
        """The end of the log."""
        try:
            with self._log.open("rb") as file:
                file.seek(max(0, self._log.stat().st_size - _TAIL_BYTES))
                return file.read().decode(errors="replace").splitlines()[-count:]
        except OSError:
            return []

    def _write(self) -> None:
        with contextlib.suppress(ChannelClosed):
            while (data := self._outbox.get()) is not None:
                self._channel.send_bytes(data)

    def _read(self) -> None:
        try:
            while True:
                self._on_message(self._channel.receive())
        except ChannelClosed:
            pass
        finally:
            self._on_message(None)


def launch_worker(
    log: Path,
    on_message: Callable[[dict[str, Any] | None], None],
    command: Sequence[str] = WORKER_COMMAND,
) -> WorkerHandle:
    """Start a worker process with one end of a new channel.

    Args:
        log: its standard output and error are appended here.
        on_message: as in `WorkerHandle`.
        command: to which `--fd N` is added.

    Raises:
        StorageError: the log cannot be written.
        OSError: the process cannot be started.
    """
    channel, fd = Channel.pair()
    try:
        with storage(log):
            output = log.open("ab")
        with output:
            process = subprocess.Popen(
                [*command, "--fd", str(fd)],
                env=worker_environment(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(fd,),
                # Ctrl-C in a terminal goes to the whole foreground group; only the supervisor decides.
                process_group=0,
            )
    except BaseException:
        channel.close()
        raise
    finally:
        os.close(fd)
    return WorkerHandle(process, channel, log, on_message)


def worker_environment() -> dict[str, str]:
    """Ours for the worker; what the user has set about waiting threads stays."""
    chosen = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys()
    return dict(os.environ) if chosen else {**os.environ, "GOMP_SPINCOUNT": SPINS}
