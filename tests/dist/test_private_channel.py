"""Nobody else can reach what passes between supervisor and worker."""

from __future__ import annotations

import os
import socket

from batchgen.dist.channel import Channel


def test_the_sockets_have_no_name_and_no_port() -> None:
    """An unnamed pair is reachable by inheritance alone."""
    channel, fd = Channel.pair()
    try:
        with socket.socket(fileno=os.dup(fd)) as theirs:
            assert theirs.family == socket.AF_UNIX
            assert theirs.getsockname() == theirs.getpeername() == ""
        assert not os.get_inheritable(fd)
    finally:
        os.close(fd)
        channel.close()
