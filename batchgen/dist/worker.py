"""The engine worker process: `python -m batchgen.dist.worker --fd N`.

The supervisor starts one per device and talks to it over an inherited socket. The worker loads the
model, then loops: take rows, step the engine, send what finished. It holds no state that matters:
whatever it loses, the supervisor sends again.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import time
from collections.abc import Mapping
from typing import Any

import transformers

from batchgen.dist.channel import Channel, ChannelClosed, die_with_parent
from batchgen.dist.intake import Closed, Intake
from batchgen.engine.build import Engine, build_engine, load_tokenizer
from batchgen.engine.config import EngineConfig
from batchgen.job.counters import CounterWriter
from batchgen.sampling.resolve import generation_defaults, resolve_sampling, unused_defaults
from batchgen.text.prompt import PromptRenderer, PromptSpec
from batchgen.types import BatchgenError, EngineError, Output, RowError

PROGRESS_SECONDS = 1.0
IDLE_SECONDS = 0.2
LOOKAHEAD = 4
logger = logging.getLogger("batchgen.worker")


class Worker:
    """One engine behind one channel.

    Args:
        channel: to the supervisor.
        config: the `start` message's configuration.
    """

    def __init__(self, channel: Channel, config: Mapping[str, Any]) -> None:
        self._channel = channel
        self._counters = CounterWriter(config["counters"])
        pinned = dict(config.get("pinned") or {})
        engine_config = _engine_config(config, pinned)
        tokenizer = load_tokenizer(engine_config)
        renderer = PromptRenderer(PromptSpec.from_dict(config["prompt"]), tokenizer)
        renderer.probe()
        self._engine = build_engine(engine_config, tokenizer)
        defaults = pinned.get("generation_defaults")
        if defaults is None:
            defaults = self._generation_defaults(config)
        sampling = resolve_sampling(config["sampling"], defaults)
        self._notes = [*renderer.notes, *self._ignored_defaults(config)]
        self._pinned = {**self._engine.pinned, "generation_defaults": defaults}
        self._max_seqs = self._engine.config.max_num_seqs or 1
        self._draining = False
        self._stopping = False
        self._last_progress = 0.0
        self._intake = Intake(
            channel, renderer, sampling, self._engine.core.max_model_len, config.get("order", "prefix")
        )

    def _generation_defaults(self, config: Mapping[str, Any]) -> dict[str, Any]:
        if config.get("generation_defaults", "model") == "none":
            return {}
        return generation_defaults(self._engine.loaded.generation_config.to_dict())

    def _ignored_defaults(self, config: Mapping[str, Any]) -> list[str]:
        if config.get("generation_defaults", "model") == "none":
            return []
        unused = unused_defaults(self._engine.loaded.generation_config.to_dict())
        return [
            f"the model's generation configuration sets {key}, which batchgen does not apply yet; "
            "set model.generation_defaults: none to say that this is meant"
            for key in unused
        ]

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
            outputs = self._engine.core.step()
            self._count()
            # Ahead of the last results, after which the supervisor may have heard enough.
            self._send_progress(now=bool(outputs) and not self._engine.core.num_unfinished)
            self._send_results(outputs)
            if not self._engine.core.num_unfinished:
                self._intake.wait(IDLE_SECONDS)
        self._send_partials(None)
        self._engine.core.close()

    def _send_ready(self) -> None:
        engine: Engine = self._engine
        self._channel.send(
            {
                "type": "ready",
                "pinned": self._pinned,
                "facts": engine.facts,
                "notes": [*engine.notes, *self._notes],
                "want_rows": LOOKAHEAD * self._max_seqs,
            }
        )

    def _handle_control(self) -> None:
        for message in self._intake.control():
            if isinstance(message, Closed):
                if isinstance(message.error, Exception):
                    raise message.error
                if message.error is not None:
                    raise EngineError(f"reading rows failed: {message.error!r}") from message.error
                raise ChannelClosed("the supervisor closed the channel")
            self._obey(message)

    def _obey(self, message: Mapping[str, Any]) -> None:
        kind = message["type"]
        if kind == "checkpoint":
            self._send_partials(message["id"])
        elif kind == "drain":
            self._draining = True
            self._intake.discard()
            self._engine.core.drop_unstarted()
        elif kind == "stop":
            self._stopping = True
        else:
            raise ValueError(f"unknown message {kind!r} from the supervisor")

    def _admit(self) -> None:
        """Keep enough requests in the engine that it never runs dry, and no more."""
        if self._draining:
            self._intake.discard()
            return
        room = 2 * self._max_seqs - self._engine.core.num_unfinished
        rejected = []
        for item in self._intake.take(max(room, 0)):
            output = item if isinstance(item, Output) else self._engine.core.add(item)
            if output is not None:
                rejected.append(output)
        self._send_results(rejected)

    def _send_results(self, outputs: list[Output]) -> None:
        if outputs:
            rows = [[o.request_id, _result(o), _stats(o)] for o in outputs]
            self._channel.send({"type": "results", "rows": rows})

    def _send_partials(self, checkpoint: int | None) -> None:
        rows = [list(p) for p in self._engine.core.partials()]
        sampled = self._engine.core.counters.sampled
        self._channel.send({"type": "partials", "id": checkpoint, "rows": rows, "sampled": sampled})

    def _count(self) -> None:
        counters = self._engine.core.counters
        self._counters.update(sampled=counters.sampled, computed=counters.computed)

    def _send_progress(self, *, now: bool) -> None:
        clock = time.monotonic()
        if not now and clock - self._last_progress < PROGRESS_SECONDS:
            return
        self._last_progress = clock
        core, stats = self._engine.core, self._engine.core.scheduler.stats
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


def _engine_config(config: Mapping[str, Any], pinned: Mapping[str, Any]) -> EngineConfig:
    settings = dict(config["engine"])
    for name in ("dtype", "max_model_len"):
        if pinned.get(name) is not None:
            settings[name] = pinned[name]
    return EngineConfig(model=config["model"], tokenizer=config.get("tokenizer"), **settings)


def _result(output: Output) -> dict[str, Any]:
    """What goes to the journal: a function of the row, never of scheduling."""
    error: RowError | None = output.error
    return {
        "status": "ok" if error is None else "error",
        "text": output.text if error is None else None,
        "finish_reason": output.finish_reason.value if output.finish_reason else None,
        "stop_reason": None if output.stop_reason is None else str(output.stop_reason),
        "error": None if error is None else [error.error_class.value, error.message],
        "usage": [output.prompt_tokens, output.completion_tokens, output.truncated_tokens],
    }


def _stats(output: Output) -> dict[str, Any]:
    return {
        "cached_tokens": output.cached_tokens,
        "preemptions": output.preemptions,
        "queue_ms": round(1000 * output.queue_seconds),
        "run_ms": round(1000 * output.run_seconds),
        "control_tokens": output.control_tokens,
    }


def main() -> int:
    """Serve the supervisor on the inherited file descriptor; returns the exit code."""
    die_with_parent()
    # A signal to the whole job (systemd, Slurm) is the supervisor's to answer: it drains us.
    for asked in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(asked, signal.SIG_IGN)
    parser = argparse.ArgumentParser(prog="batchgen.dist.worker")
    parser.add_argument("--fd", type=int, required=True)
    channel = Channel.from_fd(parser.parse_args().fd)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        start = channel.receive()
        Worker(channel, start["config"]).run()
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


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Skip the interpreter's teardown: the intake thread may be blocked in a read, and torch's
    # thread pools need not be joined by a process that has nothing left to say.
    os._exit(code)
