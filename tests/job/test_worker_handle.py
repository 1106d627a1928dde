"""The transport to a worker process, and that no worker outlives its supervisor."""

from __future__ import annotations

import datetime
import os
import queue
import subprocess
import sys
import threading
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

import psutil
import pytest
from waiting import PATIENCE

from batchgen.dist.channel import Channel, ChannelClosed
from batchgen.dist.handle import WorkerHandle, launch_worker
from batchgen.job.counters import CommitMark, CounterWriter, create_counters, read_counters
from batchgen.types import StorageError

ECHO = """
import sys
from batchgen.dist.channel import Channel, ChannelClosed, die_with_parent
die_with_parent()
channel = Channel.from_fd(int(sys.argv[-1]))
print("out and", file=sys.stdout, flush=True)
print("err", file=sys.stderr, flush=True)
try:
    while True:
        channel.send({"type": "echo", "content": channel.receive()})
except ChannelClosed:
    pass
"""

BUSY = """
import sys, time
from batchgen.dist.channel import Channel, die_with_parent
die_with_parent()
channel = Channel.from_fd(int(sys.argv[-1]))
time.sleep(600)
"""

PARENT = """
import sys, time
from pathlib import Path
from batchgen.dist.handle import launch_worker
command = (sys.executable, "-c", sys.argv[2])
handle = launch_worker(Path(sys.argv[1]), lambda message: None, command)
print(handle.pid, flush=True)
time.sleep(600)
"""


def start(tmp_path: Path, program: str = ECHO) -> tuple[WorkerHandle, queue.SimpleQueue[Any]]:
    received: queue.SimpleQueue[Any] = queue.SimpleQueue()
    handle = launch_worker(tmp_path / "log", received.put, (sys.executable, "-c", program))
    return handle, received


def test_messages_go_both_ways_whatever_they_hold(tmp_path: Path) -> None:
    handle, received = start(tmp_path)
    message = {
        "type": "rows",
        "rows": [[2**63, {"prompt": "lone \ud83d and null \0"}, [1, 2]]],
        "bytes": b"\xff",
        "nested": {"a": [None, True, 1.5]},
    }
    handle.send(message)
    assert received.get(timeout=PATIENCE) == {"type": "echo", "content": message}
    handle.send({"when": datetime.date(2024, 1, 2), "exact": Decimal("1.10")})
    assert received.get(timeout=PATIENCE)["content"] == {"when": "2024-01-02", "exact": "1.10"}
    handle.close()
    assert received.get(timeout=PATIENCE) is None
    assert handle.wait(PATIENCE) == 0
    assert sorted(handle.last_lines()) == ["err", "out and"]
    assert len(handle.last_lines(1)) == 1


def test_sending_never_blocks_on_a_worker_that_does_not_read(tmp_path: Path) -> None:
    handle, received = start(tmp_path, "import time; time.sleep(600)")
    for _ in range(20):
        handle.send({"type": "rows", "rows": ["x" * 1_000_000]})
    handle.kill()
    assert received.get(timeout=PATIENCE) is None
    assert handle.poll() == -9


def test_a_worker_that_ends_closes_the_channel(tmp_path: Path) -> None:
    handle, received = start(tmp_path, "import sys; sys.exit(3)")
    assert received.get(timeout=PATIENCE) is None
    assert handle.wait(PATIENCE) == 3
    handle.send({"type": "stop"})
    handle.close()


@pytest.mark.parametrize("after", [0.0, 0.3])
def test_a_busy_worker_dies_with_its_supervisor(tmp_path: Path, after: float) -> None:
    """It never reads its channel; the kernel ends it, or it finds nobody there."""
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path / "log"), BUSY], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    worker = psutil.Process(int(parent.stdout.readline()))
    time.sleep(after)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    psutil.wait_procs([worker], timeout=PATIENCE)
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE


def test_closing_wakes_a_thread_that_waits() -> None:
    channel, fd = Channel.pair()
    ended = threading.Event()

    def wait() -> None:
        with pytest.raises(ChannelClosed):
            channel.receive()
        ended.set()

    thread = threading.Thread(target=wait)
    thread.start()
    channel.close()
    assert ended.wait(PATIENCE)
    thread.join()
    with pytest.raises(ChannelClosed):
        channel.send({})
    os.close(fd)


def test_a_log_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot be written"):
        launch_worker(tmp_path / "gone" / "log", print)


def test_counters_of_both_sides_meet_in_one_file(tmp_path: Path) -> None:
    path = tmp_path / "counters"
    assert read_counters(path) is None
    create_counters(path)
    writer, mark = CounterWriter(str(path)), CommitMark(path)
    writer.update(sampled=70, computed=300)
    mark.update(50)
    found = read_counters(path)
    assert found is not None
    assert (found.pid, found.sampled, found.computed, found.committed) == (os.getpid(), 70, 300, 50)
    assert found.at_risk == 20
    assert mark.sampled == 70
    writer.close()
    mark.close()
    path.write_bytes(b"\0" * 200)
    assert read_counters(path) is None
