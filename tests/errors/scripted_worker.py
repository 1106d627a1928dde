"""A worker in a thread of this process that does what a story says: answers, fails, dies, says odd things."""

from __future__ import annotations

import traceback
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from thread_worker import ThreadWorker

from batchgen.data.row_result import RowResult
from batchgen.job.result_batch import ResultBatch
from batchgen.job.run_options import OnMessage
from batchgen.types import ErrorClass, RowError

KILLED = -9


@dataclass(frozen=True, kw_only=True)
class Script:
    """What workers do.

    Args:
        fails: rows that become error rows, with class and message.
        kills: rows that end the process they come to.
        stalls: rows that are never answered.
        fatal: exit code and message of an error that ends each worker before it is ready.
        dies: each ends before it is ready.
        says: a message that each sends once it is ready.
        pinned: the choices that it reports.
        cannot_start: what starting one raises.
    """

    fails: Mapping[int, tuple[str, str]] = field(default_factory=dict)
    kills: Collection[int] = ()
    stalls: Collection[int] = ()
    fatal: tuple[int, str] | None = None
    dies: bool = False
    says: Mapping[str, Any] | None = None
    pinned: Mapping[str, Any] = field(default_factory=lambda: {"dtype": "float32"})
    cannot_start: OSError | None = None

    def __call__(self, log: Path, on_message: OnMessage) -> ScriptedWorker:
        """Start one."""
        if self.cannot_start is not None:
            raise self.cannot_start
        return ScriptedWorker(self, on_message)


class ScriptedWorker(ThreadWorker):
    """Speaks the worker's protocol; `last_lines` is what it is as if it had printed."""

    def __init__(self, script: Script, on_message: OnMessage) -> None:
        self._script = script
        self._code = 0
        super().__init__(on_message, None)

    def poll(self) -> int | None:
        return None if self._thread.is_alive() else self._code

    def last_lines(self, count: int = 20) -> list[str]:
        return ["out of memory"] if self._code else []

    def _run(self) -> None:
        try:
            while (message := self._inbox.get())["type"] != "stop":
                if not self._handle(message):
                    self._code = KILLED
                    break
        except Exception:
            # Told as a process would, so that nobody waits for an answer.
            self._code = 1
            traceback.print_exc()
        self._on_message(None)

    def _handle(self, message: Mapping[str, Any]) -> bool:
        """Answer one message; False for a worker that dies of it."""
        match message["type"]:
            case "start":
                return self._start()
            case "rows":
                rows = [row for row in message["rows"] if row[0] not in self._script.stalls]
                if any(row[0] in self._script.kills for row in rows):
                    return False
                self._on_message(self._answers(rows))
            case "canary":
                self._on_message({"type": "canary"})
            case "checkpoint":
                partials = {"type": "partials", "id": message["id"], "rows": [], "sampled": 0}
                self._on_message(partials)
        return True

    def _start(self) -> bool:
        script = self._script
        if script.fatal is not None:
            code, text = script.fatal
            self._on_message({"type": "fatal", "exit_code": code, "message": text})
        if script.dies or script.fatal is not None:
            return False
        ready = {"type": "ready", "pinned": dict(script.pinned), "facts": {}, "notes": []}
        self._on_message({**ready, "want_rows": 8})
        if script.says is not None:
            self._on_message(dict(script.says))
        return True

    def _answers(self, rows: list[list[Any]]) -> dict[str, Any]:
        numbers = [number for number, *_ in rows]
        return ResultBatch.packed_of(numbers, list(map(self._answer, numbers))).message()

    def _answer(self, number: int) -> RowResult:
        failed = self._script.fails.get(number)
        if failed is None:
            return RowResult("ok", f"answer {number}", "stop", usage=(1, 1, 0))
        return RowResult.from_error(RowError(ErrorClass(failed[0]), failed[1]))
