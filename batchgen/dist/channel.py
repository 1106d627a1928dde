"""Messages between the supervisor and one worker: msgpack maps over an inherited socket pair.

Both sides of `dist/` use it. No pickle: a message can carry data, never code.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
from collections.abc import Mapping
from multiprocessing.connection import Connection
from socket import AF_UNIX, SHUT_RDWR, SOCK_STREAM, socket, socketpair
from typing import Any

import msgpack

_PR_SET_PDEATHSIG = 1


class ChannelClosed(Exception):
    """The other side is gone."""


class Channel:
    """One end. Sending is safe from several threads; receiving belongs to one.

    Args:
        connection: a stream with message framing.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()

    @classmethod
    def pair(cls) -> tuple[Channel, int]:
        """A channel, and the descriptor of its other end for a child to inherit; the caller closes it."""
        ours, theirs = socketpair(AF_UNIX, SOCK_STREAM)
        return cls(Connection(ours.detach())), theirs.detach()

    @classmethod
    def from_fd(cls, fd: int) -> Channel:
        """The end that a worker inherited. Its own children must not.

        Raises:
            ChannelClosed: the supervisor is gone already, so `die_with_parent` came too late to notice.
        """
        os.set_inheritable(fd, False)
        poll = select.poll()
        poll.register(fd, 0)
        if any(events & select.POLLHUP for _, events in poll.poll(0)):
            raise ChannelClosed("the supervisor ended before this worker began")
        return cls(Connection(fd))

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one message; blocks while the other side does not read.

        Raises:
            ChannelClosed: the other side is gone.
        """
        self.send_bytes(pack(message))

    def send_bytes(self, data: bytes) -> None:
        """Send a message that `pack` has made. Raises ChannelClosed."""
        try:
            with self._sending:
                self._connection.send_bytes(data)
        except (OSError, ValueError) as error:
            raise ChannelClosed(str(error)) from error

    def receive(self) -> dict[str, Any]:
        """Wait for one message.

        Raises:
            ChannelClosed: the other side is gone.
        """
        try:
            data = self._connection.recv_bytes()
        except (EOFError, OSError) as error:
            raise ChannelClosed(str(error) or "end of stream") from error
        message: dict[str, Any] = msgpack.unpackb(data, strict_map_key=False, unicode_errors="surrogatepass")
        return message

    def close(self) -> None:
        """End the stream in both directions, for a thread that waits in `receive` too."""
        with contextlib.suppress(OSError), socket(fileno=os.dup(self._connection.fileno())) as ending:
            ending.shutdown(SHUT_RDWR)


def pack(message: Mapping[str, Any]) -> bytes:
    """The bytes of a message. Lone surrogates pass; what msgpack does not know goes as its text."""
    data: bytes = msgpack.packb(message, default=str, unicode_errors="surrogatepass")
    return data


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the supervisor ends, even in the middle of native code.

    The end of the stream says the same, but only to a process that gets round to reading it. Called first
    thing by a worker, before `Channel.from_fd`, which notices a supervisor that ended even earlier. Linux
    only; elsewhere the end of the stream must do.
    """
    if sys.platform != "linux":
        return
    parent = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(0)
