"""The scheduler's state as one readable text, for the error that says it is stuck."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING

from batchgen.grammar import counted
from batchgen.types import Request

if TYPE_CHECKING:
    from batchgen.core.scheduler import Scheduler

_SHOWN = 8


def describe(scheduler: Scheduler) -> str:
    """Limits, pool, and the first requests of each queue."""
    manager = scheduler.manager
    pool = manager.pool
    return (
        f"{scheduler.config}; pool: {pool.num_used} of {pool.num_usable} blocks of "
        f"{counted(manager.block_size, 'token')} used, {manager.num_reserved} set aside, "
        f"{counted(len(pool.index), 'name')}; "
        f"running {scheduler.num_running}: {_requests(scheduler.running.values())}; "
        f"waiting {scheduler.num_waiting}: {_requests(scheduler.waiting)}"
    )


def _requests(requests: Iterable[Request]) -> str:
    shown = [_request(request) for request in islice(requests, _SHOWN)]
    return "[" + ", ".join(shown) + "]"


def _request(request: Request) -> str:
    return (
        f"{request.request_id} (arrival {request.sequence_number}, {request.num_computed_tokens} of "
        f"{counted(request.num_tokens, 'token')} computed, at most {request.max_total_tokens}, priority "
        f"{request.priority}, preempted {counted(request.num_preemptions, 'time')})"
    )
