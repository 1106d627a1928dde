"""Puts whole parts together beside the supervisor's loop, oldest first and one at a time."""

from __future__ import annotations

import queue
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from batchgen.data.sink import warm_up
from batchgen.job.assembly import Assembler
from batchgen.job.events import Assembled
from batchgen.job.parts import PartCommit
from batchgen.job.recovery import OpenJob
from batchgen.job.window import OpenPart


class AssemblyThread:
    """Gives an `Assembler` its parts.

    Args:
        job: whose parts they are.
        events: gets an `Assembled` for each part.
    """

    def __init__(self, job: OpenJob, events: queue.SimpleQueue[Any]) -> None:
        self._assembler = Assembler(job)
        self._events = events
        self._begun: set[int] = set()
        self._thread = ThreadPoolExecutor(1, "assembly")
        # While the workers load; else the first part would make memory grow by half while rows run.
        self._thread.submit(warm_up)

    def write(self, parts: Iterable[OpenPart]) -> None:
        """Put parts together, those that are not begun yet."""
        for part in parts:
            if part.part not in self._begun:
                self._begun.add(part.part)
                self._thread.submit(self._write, part)

    def ended(self, part: int) -> None:
        """The `Assembled` of a part has been heard of."""
        self._begun.discard(part)

    def close(self) -> None:
        """Finish the part that is being written and close files; parts that wait stay for a later run."""
        self._thread.shutdown(cancel_futures=True)
        self._assembler.close()

    def _write(self, part: OpenPart) -> None:
        try:
            outcome: PartCommit | BaseException = self._assembler.write(part)
        except BaseException as error:
            outcome = error
        self._events.put(Assembled(part.part, outcome))
