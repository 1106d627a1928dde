"""Finds the requests that make a step raise, so that one of them does not end the engine.

After a step that raised, its requests run again in groups apart from all others: a group that raises is
halved, and a request that raises alone becomes an error row. A group passes when each of its requests has
sampled a token. `EngineCore` drives it. If no request of the step passes, the engine is broken and not a row,
and the error ends the engine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence

import torch

from batchgen.core.scheduler import Scheduler
from batchgen.models.memory_errors import out_of_memory
from batchgen.types import EngineError, ErrorClass, Request, RowError

_SHOWN = 300


class StepFailed(Exception):
    """A step raised, and was taken back.

    Args:
        requests: ids of those that were in it.
        error: what was raised.
    """

    def __init__(self, requests: Sequence[int], error: Exception) -> None:
        super().__init__(str(error))
        self.requests = list(requests)
        self.error = error


class Isolation:
    """The groups that wait, and what is known of them.

    Args:
        scheduler: holds back the requests that are not to run.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._groups: deque[list[int]] = deque()
        self._lengths: dict[int, int] = {}
        self._rows: dict[int, int] = {}
        self._guilty: dict[int, Exception] = {}
        self._passed = False
        self.active = False

    def prepare(self) -> None:
        """Let only the current group run in the next step; all run once no group is left."""
        live = self._scheduler.requests
        while self._groups and not any(request_id in live for request_id in self._groups[0]):
            self._groups.popleft()
        group = set(self._groups[0]) if self._groups else live.keys()
        for request_id in list(self._scheduler.requests):
            if request_id in group:
                self._scheduler.release(request_id)
            else:
                self._scheduler.hold(request_id)

    def failed(self, failure: StepFailed, requests: Mapping[int, Request]) -> None:
        """Part the requests of a step that raised."""
        ids = failure.requests
        rest: list[int] = []
        if self.active:
            group = self._groups.popleft()
            rest = [request_id for request_id in group if request_id not in ids]
        alone = self.active and len(ids) == 1
        if not self.active:
            self.active, self._passed = True, False
            self._lengths = {i: len(requests[i].output_token_ids) for i in ids}
            self._rows = {i: requests[i].row for i in ids}
        if alone:
            self._guilty[ids[0]] = failure.error
            halves: list[list[int]] = []
        else:
            middle = (len(ids) + 1) // 2
            halves = [ids[:middle], ids[middle:]]
        self._groups.extendleft(reversed([part for part in (*halves, rest) if part]))

    def succeeded(self, requests: Mapping[int, Request]) -> None:
        """A step of the current group did not raise; go on to the next if each of its requests got on."""
        if self._groups and all(
            i not in requests or len(requests[i].output_token_ids) > self._lengths[i] for i in self._groups[0]
        ):
            self._passed = True
            self._groups.popleft()

    def settle(self, *, has_worked: bool) -> dict[int, RowError]:
        """The errors of rows with a request that raises alone, once no group waits; all others run again.

        Args:
            has_worked: whether the engine has ever completed a step.

        Raises:
            Exception: the last error, where it looks like the engine's fault.
        """
        if self._groups:
            return {}
        for request_id in list(self._scheduler.requests):
            self._scheduler.release(request_id)
        self.active = False
        guilty, self._guilty = self._guilty, {}
        suspects = len(set(self._rows.values()))
        if guilty and not self._passed and (suspects > 1 or not has_worked):
            raise next(iter(guilty.values()))
        return {self._rows[request_id]: error_of_row(error) for request_id, error in guilty.items()}


def is_of_a_row(error: Exception) -> bool:
    """Whether an error may come from one request, and leaves the engine as it was."""
    return not isinstance(error, EngineError | torch.AcceleratorError)


def error_of_row(error: Exception) -> RowError:
    """The error of a request that raised alone."""
    if out_of_memory(error):
        return RowError(
            ErrorClass.ENGINE_OOM,
            "memory does not suffice for this row alone; give the engine more, or shorten the row",
        )
    said = " ".join(str(error).split())[:_SHOWN]
    return RowError(
        ErrorClass.INTERNAL, f"the engine failed on this row alone: {type(error).__name__}: {said}"
    )
