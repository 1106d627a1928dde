"""A worker for the tests of the job: speaks the protocol, needs no model, and dies on demand.

The tokens of a row are a hash of (seed, row, index), so every correct run gives the same text, and partial
output that does not belong to the row is noticed.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import queue
import signal
import sys
import threading
import time
from typing import Any

from batchgen.dist.channel import Channel, ChannelClosed, die_with_parent
from batchgen.job.counters import CounterWriter


def token(seed: int, row: int, index: int) -> int:
    data = hashlib.blake2b(f"{seed}/{row}/{index}".encode(), digest_size=4).digest()
    return int.from_bytes(data, "little") % 50_000


def length(seed: int, row: int, most: int) -> int:
    return 1 + token(seed, row, -1) % most


def tokens(seed: int, row: int, most: int) -> list[int]:
    return [token(seed, row, i) for i in range(length(seed, row, most))]


def text(ids: list[int], prompt: str) -> str:
    return f"{prompt}: " + " ".join(map(str, ids))


class Row:
    def __init__(self, row: int, values: dict[str, Any], partial: list[int], config: dict[str, Any]) -> None:
        self.row = row
        self.prompt = str(values["prompt"])
        self.wanted = tokens(config["seed"], row, config["max_tokens"])
        self.ids = list(partial)
        self.reported = len(partial)
        if self.ids != self.wanted[: len(self.ids)]:
            raise ValueError(f"row {row} came with partial output that is not its own: {partial}")


class FakeWorker:
    def __init__(self, channel: Channel, config: dict[str, Any]) -> None:
        self.channel = channel
        self.config = config
        self.counters = CounterWriter(config["counters"])
        self.inbox: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self.waiting: list[Row] = []
        self.running: list[Row] = []
        self.sampled = 0
        self.stopping = False
        self.draining = False

    def run(self) -> None:
        time.sleep(self.config.get("load_seconds", 0))
        pinned = self.config.get("pinned") or {"dtype": "float32", "max_model_len": 64}
        self.channel.send(
            {
                "type": "ready",
                "pinned": {**pinned, **self.config.get("change_pinned", {})},
                "facts": {"fake": 1},
                "notes": self.config.get("notes", []),
                "want_rows": self.config["want_rows"],
            }
        )
        threading.Thread(target=self.receive, daemon=True).start()
        while not self.stopping:
            self.obey()
            self.step()
        self.send_partials(None)

    def receive(self) -> None:
        try:
            while True:
                self.inbox.put(self.channel.receive())
        except ChannelClosed:
            self.inbox.put(None)

    def obey(self) -> None:
        idle = not self.running and not self.waiting
        while True:
            try:
                message = self.inbox.get(timeout=0.02) if idle else self.inbox.get_nowait()
            except queue.Empty:
                return
            idle = False
            if message is None:
                raise ChannelClosed
            self.obey_one(message)

    def obey_one(self, message: dict[str, Any]) -> None:
        match message["type"]:
            case "rows":
                if not self.draining:
                    self.waiting += [Row(*row, self.config) for row in message["rows"]]
            case "checkpoint":
                self.send_partials(message["id"])
            case "drain":
                self.draining = True
                self.waiting.clear()
            case "stop":
                self.stopping = True

    def step(self) -> None:
        room = self.config["max_running"] - len(self.running)
        self.running += self.waiting[:room]
        del self.waiting[:room]
        results = []
        for row in list(self.running):
            if len(row.ids) < len(row.wanted):
                row.ids.append(row.wanted[len(row.ids)])
                self.sampled += 1
            if len(row.ids) == len(row.wanted):
                self.running.remove(row)
                stats = {"cached_tokens": self.sampled % 7, "queue_ms": 2, "run_ms": 10 * len(row.wanted)}
                results.append([row.row, self.result(row), stats])
        if self.running or results:
            time.sleep(self.config["step_seconds"])
        self.counters.update(sampled=self.sampled, computed=self.sampled)
        self.die_on_demand(results)
        if results:
            self.channel.send({"type": "results", "rows": results})
        self.send_progress()

    def result(self, row: Row) -> dict[str, Any]:
        failed = row.row in self.config.get("error_rows", [])
        return {
            "status": "error" if failed else "ok",
            "text": None if failed else text(row.ids, row.prompt),
            "finish_reason": None if failed else "stop",
            "stop_reason": None,
            "error": ["context_length", f"row {row.row} is too long"] if failed else None,
            "usage": [len(row.prompt), len(row.ids), 0],
        }

    def die_on_demand(self, results: list[Any]) -> None:
        if self.sampled >= self.config.get("kill_after_tokens", 1 << 60):
            os.kill(os.getpid(), signal.SIGKILL)
        if any(row.row in self.config.get("poison_rows", []) for row in self.running):
            print("the fake engine chokes", file=sys.stderr, flush=True)
            os._exit(11)
        if self.sampled >= self.config.get("fatal_after_tokens", 1 << 60):
            self.channel.send({"type": "fatal", **self.config["fatal"]})
            os._exit(self.config["fatal"]["exit_code"])

    def send_partials(self, checkpoint: int | None) -> None:
        rows = []
        for row in self.running:
            if len(row.ids) > row.reported:
                rows.append([row.row, row.reported, row.ids[row.reported :]])
                row.reported = len(row.ids)
        self.channel.send({"type": "partials", "id": checkpoint, "rows": rows, "sampled": self.sampled})

    def send_progress(self) -> None:
        self.channel.send(
            {
                "type": "progress",
                "running": len(self.running),
                "waiting": len(self.waiting),
                "prompt_tokens": 0,
                "cached_tokens": 0,
                "output_tokens": self.sampled,
                "preemptions": 0,
                "pool_used": 0,
                "pool_waste": 0,
            }
        )


def main() -> int:
    die_with_parent()
    parser = argparse.ArgumentParser()
    parser.add_argument("--fd", type=int, required=True)
    channel = Channel.from_fd(parser.parse_args().fd)
    try:
        FakeWorker(channel, channel.receive()["config"]).run()
    except ChannelClosed:
        return 0
    except ValueError as error:
        channel.send({"type": "fatal", "exit_code": 7, "message": str(error)})
        return 7
    return 0


if __name__ == "__main__":
    os._exit(main())
