"""A worker in a thread of this process, for tests of which rows run: starts at once, answers at once.

The text of a row is a function of its prompt, so that every correct run gives the same.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchgen.data.prompt_values import unpack_prompt_values
from batchgen.data.row_result import RowResult
from batchgen.job.result_batch import ResultBatch
from batchgen.job.run_options import OnMessage


class Killed(BaseException):
    """Ends a run in the middle, with nothing cleaned up on purpose."""


def text_of(prompt: Any) -> str:
    return f"answer to {prompt}"


class ThreadWorker:
    """Speaks the worker's protocol.

    Args:
        on_message: gets its messages.
        kill_after: rows after which the run is killed.
    """

    pid = 0

    def __init__(self, on_message: OnMessage, kill_after: int | None) -> None:
        self._on_message = on_message
        self._left = kill_after
        self._inbox: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        self.rows: list[int] = []

    def send(self, message: Mapping[str, Any]) -> None:
        if message["type"] == "rows" and self._left is not None:
            self._left -= len(message["rows"])
            if self._left < 0:
                raise Killed
        self._inbox.put(dict(message))

    def poll(self) -> int | None:
        return None if self._thread.is_alive() else 0

    def wait(self, seconds: float) -> int | None:
        self._thread.join(seconds)
        return self.poll()

    def kill(self) -> None:
        self._inbox.put({"type": "stop"})

    def close(self) -> None:
        self.kill()
        self._thread.join()

    def last_lines(self, count: int = 20) -> list[str]:
        return []

    def _run(self) -> None:
        try:
            self._serve()
        except Exception as error:
            fatal = {"type": "fatal", "exit_code": 2, "message": f"the test's worker failed: {error!r}"}
            self._on_message(fatal)
        self._on_message(None)

    def _serve(self) -> None:
        while (message := self._inbox.get())["type"] != "stop":
            match message["type"]:
                case "start":
                    ready = {"type": "ready", "pinned": {"dtype": "float32"}, "facts": {}, "notes": []}
                    self._on_message({**ready, "want_rows": 3})
                case "rows":
                    self.rows += [row[0] for row in message["rows"]]
                    self._on_message(_answers(message["rows"]))
                case "checkpoint":
                    partials = {"type": "partials", "id": message["id"], "rows": [], "sampled": 0}
                    self._on_message(partials)


def _answers(rows: list[list[Any]]) -> dict[str, Any]:
    texts = [text_of(unpack_prompt_values(values)["prompt"]) for _, values, *_ in rows]
    results = [RowResult("ok", text, "stop", usage=(1, 1, 0)) for text in texts]
    return ResultBatch.packed_of([row for row, *_ in rows], results).message()


class ThreadLauncher:
    """Starts such workers; `rows` is what all of them were given."""

    def __init__(self, kill_after: int | None = None) -> None:
        self._kill_after = kill_after
        self._workers: list[ThreadWorker] = []

    def __call__(self, log: Path, on_message: OnMessage) -> ThreadWorker:
        self._workers.append(ThreadWorker(on_message, self._kill_after))
        return self._workers[-1]

    @property
    def rows(self) -> list[int]:
        return [row for worker in self._workers for row in worker.rows]
