"""The scheduler's state as one readable text, for the error that says it is stuck."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from typing import TYPE_CHECKING

from batchgen.types import Request

if TYPE_CHECKING:
    from batchgen.core.scheduler import Scheduler

_SHOWN = 8


def describe(scheduler: Scheduler) -> str:
    """Limits, pool, and the first requests of each queue."""
    manager = scheduler.manager
    pool = manager.pool
    return (
        f"{scheduler.config}; pool: {pool.num_used} of {pool.num_usable} blocks of {manager.block_size} "
        f"tokens used, {manager.num_reserved} set aside, {len(pool.index)} names; "
        f"running {scheduler.num_running}: {_requests(scheduler.running.values())}; "
        f"waiting {scheduler.num_waiting}: {_requests(scheduler.waiting)}"
    )


def _requests(requests: Iterable[Request]) -> str:
    shown = [_request(request) for request in islice(requests, _SHOWN)]
    return "[" + ", ".join(shown) + "]"


def _request(request: Request) -> str:
    return (
        f"{request.request_id} (arrival {request.sequence_number}, {request.num_computed_tokens} of "
        f"{request.num_tokens} tokens computed, at most {request.max_total_tokens}, priority "
        f"{request.priority}, preempted {request.num_preemptions} times)"
    )
