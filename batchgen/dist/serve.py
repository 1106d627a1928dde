"""The loop of an engine worker: take rows, step the engine, send what finished.

`batchgen.dist.worker` calls `serve` with what builds the engine. Nothing here imports torch. A worker holds
no state that matters: whatever it loses, the supervisor sends again.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol

from batchgen.core.stats import SchedulerStats
from batchgen.data.row_result import RowResult
from batchgen.dist.channel import Channel, ChannelClosed, die_with_parent
from batchgen.dist.duplicates import DedupingCore
from batchgen.dist.included import Included
from batchgen.dist.intake import Closed, Intake
from batchgen.dist.row_clock import RowClock
from batchgen.job.collector import rare_collections
from batchgen.job.counters import CounterWriter
from batchgen.job.result_batch import ResultBatch
from batchgen.sampling.overrides import RowSampling
from batchgen.text.prompt import PromptRenderer
from batchgen.text.task_request import TaskRequests
from batchgen.types import BatchgenError, EngineError, Output, Request, RowError, Sample, Status

PROGRESS_SECONDS = 1.0
IDLE_SECONDS = 0.2
LOOKAHEAD = 4
logger = logging.getLogger("batchgen.worker")


class Queues(Protocol):
    """How full the engine is; `batchgen.core.scheduler.Scheduler` is one."""

    stats: SchedulerStats

    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...


class Totals(Protocol):
    """Tokens since the engine started; `batchgen.engine.core.EngineCounters` is one."""

    computed: int
    sampled: int


class Core(Protocol):
    """What the loop asks of an engine; `batchgen.engine.core.EngineCore` is one."""

    max_model_len: int
    on_step: Callable[[list[int]], None] | None
    """Called with the rows of a step before it is computed."""

    @property
    def counters(self) -> Totals: ...
    @property
    def scheduler(self) -> Queues: ...
    @property
    def num_unfinished(self) -> int: ...
    def add(self, request: Request) -> Output | None: ...
    def step(self) -> list[Output]: ...
    def partials(self) -> list[tuple[int, int, int, list[int]]]: ...
    def fail(self, row: int, error: RowError) -> Output: ...
    def drop_unstarted(self) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class ReadyEngine:
    """An engine that has loaded its model, and what belongs to it.

    Args:
        core: takes requests and steps.
        renderer: from columns to token ids.
        requests: from token ids to what the engine is asked for.
        sampling: from columns to how a row is decoded.
        max_num_seqs: most requests that run at once.
        pinned: numeric choices that a resumed job must repeat.
        facts: the machine and the libraries.
        notes: sentences for the user.
    """

    core: Core
    renderer: PromptRenderer
    requests: TaskRequests
    sampling: RowSampling
    max_num_seqs: int
    pinned: Mapping[str, Any]
    facts: Mapping[str, Any]
    notes: list[str] = field(default_factory=list)


Build = Callable[[Mapping[str, Any]], ReadyEngine]
"""From the `config` of the start message to an engine. Raises BatchgenError: the job cannot run here."""


class WorkerLoop:
    """One engine behind one channel.

    Args:
        channel: to the supervisor.
        config: the `start` message's configuration.
        build: makes the engine of it.
    """

    def __init__(self, channel: Channel, config: Mapping[str, Any], build: Build) -> None:
        self._channel = channel
        self._counters = CounterWriter(config["counters"])
        self._engine = build(config)
        self._core: Core = self._engine.core
        if config.get("dedupe"):
            # A canary must show that the engine works, not that it has worked before.
            self._core = DedupingCore(self._core, lambda row: row == self._intake.canary)
        self._max_seqs = self._engine.max_num_seqs
        self._core.on_step = self._begin_step
        timeout = config.get("row_timeout")
        self._clock = None if timeout is None else RowClock(timeout, self._core.fail)
        self._canary_tokens = 0
        self._draining = False
        self._stopping = False
        self._last_progress = 0.0
        tokenizer = self._engine.renderer.tokenizer
        self._included = Included(
            config.get("include", ()),
            tokenizer.token_bytes,
            self._engine.requests.task,
            lists=config.get("samples", False),
        )
        self._lists: bool = config.get("samples", False)
        self._intake = Intake(
            channel,
            self._engine.renderer,
            self._engine.requests,
            self._engine.sampling,
            self._core.max_model_len,
            config.get("order", "prefix"),
            self._included,
        )

    def run(self) -> None:
        """Announce readiness, then work until told to stop.

        Raises:
            ChannelClosed: the supervisor is gone.
            EngineError: the engine cannot go on.
        """
        self._send_ready()
        while not self._stopping:
            self._handle_control()
            self._admit()
            outputs = self._without_canary(self._step())
            self._count()
            # Ahead of the last results, after which the supervisor may have heard enough.
            self._send_progress(now=bool(outputs) and not self._core.num_unfinished)
            self._end_turns(outputs)
            if not self._core.num_unfinished:
                self._intake.wait(IDLE_SECONDS)
        self._send_partials(None)
        self._core.close()

    def _begin_step(self, rows: list[int]) -> None:
        self._counters.begin_step(rows)
        if self._clock is not None:
            self._clock.begin(rows)

    def _step(self) -> list[Output]:
        outputs = self._core.step()
        return outputs if self._clock is None else [*outputs, *self._clock.end(outputs)]

    def _forget(self, outputs: Iterable[Output]) -> None:
        if self._clock is not None:
            self._clock.forget(outputs)

    def _without_canary(self, outputs: list[Output]) -> list[Output]:
        """Answer a canary, if its output is here; what it sampled is no row's."""
        canary = self._intake.canary
        if canary is None:
            return outputs
        others = [output for output in outputs if output.request_id != canary]
        if len(others) < len(outputs):
            self._intake.canary = None
            self._forget(output for output in outputs if output.request_id == canary)
            self._canary_tokens += sum(o.completion_tokens for o in outputs if o.request_id == canary)
            self._channel.send({"type": "canary"})
        return others

    def _send_ready(self) -> None:
        engine = self._engine
        self._channel.send(
            {
                "type": "ready",
                "pinned": engine.pinned,
                "facts": engine.facts,
                "notes": engine.notes,
                "want_rows": LOOKAHEAD * self._max_seqs,
            }
        )

    def _handle_control(self) -> None:
        for message in self._intake.control():
            if isinstance(message, Closed):
                if isinstance(message.error, Exception):
                    raise message.error
                if message.error is not None:
                    raise EngineError(
                        f"what tokenizes prompts broke ({message.error!r}); the engine is started anew, and "
                        "a row that breaks it each time becomes an error row"
                    ) from message.error
                raise ChannelClosed("the supervisor closed the channel")
            self._obey(message)

    def _obey(self, message: Mapping[str, Any]) -> None:
        kind = message["type"]
        if kind == "checkpoint":
            self._send_partials(message["id"])
        elif kind == "drain":
            self._draining = True
            self._intake.discard()
            self._core.drop_unstarted()
        elif kind == "stop":
            self._stopping = True
        else:
            raise ValueError(f"unknown message {kind!r} from the supervisor")

    def _admit(self) -> None:
        """Keep enough requests in the engine that it never runs dry, and no more."""
        if self._draining:
            self._intake.discard()
            return
        room = 2 * self._max_seqs - self._core.num_unfinished
        rejected = []
        for item in self._intake.take(max(room, 0)):
            output = item if isinstance(item, Output) else self._core.add(item)
            if output is not None:
                rejected.append(output)
        self._end_turns(self._without_canary(rejected))

    def _end_turns(self, outputs: list[Output]) -> None:
        """Send what finished; a dialogue goes on until its last turn has ended."""
        dialogues = self._intake.dialogues
        if not dialogues:
            self._send_results(outputs)
            return
        finished = []
        for output in outputs:
            dialogue = dialogues.get(output.request_id)
            whole = output if dialogue is None else dialogue.end(output)
            if whole is not None:
                dialogues.pop(output.request_id, None)
                finished.append(whole)
            elif dialogue is not None:
                self._intake.next_turn(dialogue)
        self._send_results(finished)

    def _send_results(self, outputs: list[Output]) -> None:
        if outputs:
            self._forget(outputs)
            batch = ResultBatch.packed_of(
                [output.request_id for output in outputs],
                [self._result(output) for output in outputs],
                [_stats(output) for output in outputs],
            )
            self._channel.send(batch.message())

    def _result(self, output: Output) -> RowResult:
        """What goes to the journal: a function of the row, never of scheduling."""
        error = output.error
        return RowResult(
            Status.OK if error is None else error.status,
            *_answer(output, lists=self._lists),
            error,
            self._included.usage(output),
            self._included.of(output),
        )

    def _send_partials(self, checkpoint: int | None) -> None:
        dialogues = self._intake.dialogues
        rows = [list(p) for p in self._core.partials() if p[0] not in dialogues]
        rows += [list(news) for d in list(dialogues.values()) if (news := d.news()) is not None]
        sampled = self._core.counters.sampled - self._canary_tokens
        self._channel.send({"type": "partials", "id": checkpoint, "rows": rows, "sampled": sampled})

    def _count(self) -> None:
        counters = self._core.counters
        self._counters.update(sampled=counters.sampled - self._canary_tokens, computed=counters.computed)

    def _send_progress(self, *, now: bool) -> None:
        clock = time.monotonic()
        if not now and clock - self._last_progress < PROGRESS_SECONDS:
            return
        self._last_progress = clock
        core, stats = self._core, self._core.scheduler.stats
        self._channel.send(
            {
                "type": "progress",
                "running": core.scheduler.num_running,
                "waiting": core.scheduler.num_waiting,
                "prompt_tokens": stats.prompt_tokens,
                "cached_tokens": stats.cached_tokens,
                "output_tokens": core.counters.sampled,
                "preemptions": stats.preemptions,
                "pool_used": stats.pool_used,
                "pool_total": stats.pool_total,
                "pool_waste": stats.waste,
            }
        )


def _answer(output: Output, *, lists: bool) -> tuple[Any, Any, Any]:
    """Text, finish reason and stop reason of a row: of a dialogue its texts, of several samples lists of all.

    None where there is an error, or a task that gives no answer.
    """
    samples = output.samples
    if output.error is not None or not samples:
        return None, None, None
    if lists:
        texts = [sample.text for sample in output.turns or samples]
        return texts, [sample.finish_reason for sample in samples], list(map(_stop_reason, samples))
    text = [turn.text for turn in output.turns] if output.turns else samples[0].text
    return text, samples[0].finish_reason, _stop_reason(samples[0])


def _stop_reason(sample: Sample) -> str | None:
    return None if sample.stop_reason is None else str(sample.stop_reason)


def _stats(output: Output) -> tuple[int, ...]:
    """In the order of `result_batch.STATS`."""
    return (
        output.cached_tokens,
        output.preemptions,
        round(1000 * output.queue_seconds),
        round(1000 * output.prefill_seconds),
        round(1000 * output.decode_seconds),
        output.control_tokens,
    )


def serve(build: Build) -> NoReturn:
    """Be the worker process of the supervisor that started this one; `--fd N` is its channel."""
    code = _serve(build)
    sys.stdout.flush()
    sys.stderr.flush()
    # Skip the interpreter's teardown: the intake thread may be blocked in a read, and torch's
    # thread pools need not be joined by a process that has nothing left to say.
    os._exit(code)


def _serve(build: Build) -> int:
    die_with_parent()
    # A signal to the whole job (systemd, Slurm) is the supervisor's to answer: it drains us.
    for asked in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(asked, signal.SIG_IGN)
    parser = argparse.ArgumentParser(prog="batchgen.dist.worker")
    parser.add_argument("--fd", type=int, required=True)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    try:
        channel = Channel.from_fd(parser.parse_args().fd)
    except ChannelClosed:
        return 0
    try:
        loop = WorkerLoop(channel, channel.receive()["config"], build)
        with rare_collections():
            loop.run()
    except ChannelClosed:
        return 0
    except BatchgenError as error:
        return _fatal(channel, error.exit_code, str(error))
    except Exception as error:
        logger.exception("the engine failed")
        return _fatal(channel, 7, f"{type(error).__name__}: {error}")
    return 0


def _fatal(channel: Channel, exit_code: int, message: str) -> int:
    try:
        channel.send({"type": "fatal", "exit_code": exit_code, "message": message})
    except ChannelClosed:
        logger.error("the supervisor is gone: %s", message)
    return exit_code
