"""`run.metrics`: what a running job tells Prometheus, over HTTP on an address of this machine.

`run` starts it before any weights load and hands it each snapshot of progress. Source of the format:
https://prometheus.io/docs/instrumenting/exposition_formats/, written by `prometheus_client`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import batchgen
from batchgen.job.progress import TOKEN_COUNTERS, Progress
from batchgen.job.units import split_address
from batchgen.types import UsageError

if TYPE_CHECKING:
    from prometheus_client import Metric


class JobMetrics:
    """The latest snapshot as metrics; a collector of `prometheus_client`.

    Args:
        name: of the job.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._latest = Progress()

    def update(self, snapshot: Progress) -> None:
        """Take a copy of the snapshot; no counter goes down, though those of a worker that ended may lag."""
        before = self._latest
        highest = {name: max(getattr(snapshot, name), getattr(before, name)) for name in TOKEN_COUNTERS}
        self._latest = replace(snapshot, **highest)

    def collect(self) -> Iterator[Metric]:
        """What a scrape gets."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily

        now = self._latest
        about = InfoMetricFamily("batchgen", "The job and the program that runs it")
        about.add_metric([], {"job_name": self._name, "version": batchgen.__version__, "state": now.state})
        yield about
        rows = CounterMetricFamily(
            "batchgen_rows", "Rows with a result, those of earlier attempts too", labels=["status"]
        )
        for status in ("ok", "error", "skipped"):
            rows.add_metric([status], getattr(now, status))
        yield rows
        for name, text, amount in (
            (
                "prompt_tokens",
                "Prompt tokens of this attempt, cached ones too",
                now.prompt_tokens,
            ),
            ("cached_tokens", "Prompt tokens of this attempt from the prefix cache", now.cached_tokens),
            ("output_tokens", "Output tokens sampled in this attempt", now.output_tokens),
            (
                "reasoning_tokens",
                "Reasoning tokens of rows with a result, those of earlier attempts too",
                now.reasoning_tokens,
            ),
            ("preemptions", "Times that a running row lost its cache in this attempt", now.preemptions),
        ):
            yield CounterMetricFamily(f"batchgen_{name}", text, value=amount)
        for name, text, level in (
            ("rows_selected", "Rows of the selection", now.rows_total),
            ("rows_running", "Rows in the batch", now.running),
            ("rows_waiting", "Rows in the engine that wait for room", now.waiting),
            ("parts_committed", "Parts that are final", now.parts_done),
            ("cache_blocks_used", "Cache blocks in use", now.pool_used),
            ("cache_blocks", "Cache blocks", now.pool_total),
            ("workers", "Worker processes", now.workers),
            ("prefix_hit_ratio", "Share of prompt tokens from the prefix cache", _share(now)),
            ("rows_per_second", "Mean of this attempt", now.per_second(now.rows_done - now.rows_before)),
            ("prompt_tokens_per_second", "Mean of this attempt", now.per_second(now.prompt_tokens)),
            ("output_tokens_per_second", "Mean of this attempt", now.per_second(now.output_tokens)),
            ("working_seconds", "Since a worker was ready first", now.working_seconds),
            ("eta_seconds", "Until the last row, by tokens", now.eta_seconds),
        ):
            # What is not known is left out.
            if level is not None:
                yield GaugeMetricFamily(f"batchgen_{name}", text, value=level)


def _share(now: Progress) -> float | None:
    return now.cached_tokens / now.prompt_tokens if now.prompt_tokens else None


@contextlib.contextmanager
def serve_metrics(
    address: str | None, name: str, say: Callable[[str], None]
) -> Iterator[Callable[[Progress], None]]:
    """Answer scrapes while the body runs; yields what takes snapshots.

    Args:
        address: `host:port`, port 0 for any that is free; None serves nothing.
        name: of the job.
        say: told where to scrape.

    Raises:
        UsageError: the address cannot be listened on.
    """
    if address is None:
        yield lambda snapshot: None
        return
    from prometheus_client import CollectorRegistry, start_http_server

    metrics, registry = JobMetrics(name), CollectorRegistry()
    registry.register(metrics)
    host, port = split_address(address)
    try:
        server, thread = start_http_server(port, host, registry)
    except OSError as error:
        raise UsageError(
            f"run.metrics: {address} cannot be listened on ({error.strerror or error}); "
            "give another port, or 0 for any that is free"
        ) from error
    shown = f"[{host}]" if ":" in host else host
    say(f"metrics: http://{shown}:{server.server_port}/metrics")
    try:
        yield metrics.update
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
