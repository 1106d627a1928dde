"""The worker's reading side: receive rows, render and tokenize them ahead of the engine.

Two threads run beside the engine loop: one receives, so that control messages are heard at once, one
tokenizes, which releases the interpreter lock. The engine loop takes what is ready and never blocks on
text.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from batchgen.data.prompt_values import unpack_prompt_values
from batchgen.dist.channel import Channel, ChannelClosed
from batchgen.dist.dialogue import Dialogue
from batchgen.dist.included import Included
from batchgen.sampling.overrides import RowSampling
from batchgen.text.prompt import PreparedRow, PromptRenderer
from batchgen.text.task_request import TaskRequests
from batchgen.types import Output, Request, RowError, RowFailure, SamplingParams

GROUP = 32


@dataclass(frozen=True, slots=True)
class Closed:
    """The supervisor is gone or the channel broke."""

    error: BaseException | None = None


class Intake:
    """Turns messages into ready requests and control messages.

    Args:
        channel: to the supervisor.
        renderer: from columns to token ids.
        requests: from token ids to what the engine is asked for.
        sampling: from columns to how a row is decoded.
        max_model_len: longest prompt plus output, in tokens.
        order: `prefix` puts rows with common beginnings next to each other, `length` puts the longest
            prompts first, `input` keeps the order of arrival.
        included: told of each row that will run.

    Attributes:
        dialogues: rows of several turns that have no result yet; the engine loop removes them.
    """

    def __init__(
        self,
        channel: Channel,
        renderer: PromptRenderer,
        requests: TaskRequests,
        sampling: RowSampling,
        max_model_len: int,
        order: str,
        included: Included,
    ) -> None:
        self._channel = channel
        self._renderer = renderer
        self._requests = requests
        self._sampling = sampling
        self._max_model_len = max_model_len
        self._order = order
        self._included = included
        self._ready: queue.SimpleQueue[Request | Output] = queue.SimpleQueue()
        self._turns: queue.SimpleQueue[Request | Output] = queue.SimpleQueue()
        self._control: queue.SimpleQueue[Mapping[str, Any] | Closed] = queue.SimpleQueue()
        # The row of which one token is to be computed to show that the engine works; set and reset outside.
        self.canary: int | None = None
        self._raw: queue.SimpleQueue[list[Any] | Dialogue] = queue.SimpleQueue()
        self.dialogues: dict[int, Dialogue] = {}
        self._wake = threading.Event()
        for work in (self._receive, self._prepare_all):
            threading.Thread(target=work, name=f"intake{work.__name__}", daemon=True).start()

    def control(self) -> Iterator[Mapping[str, Any] | Closed]:
        """Control messages that have arrived, oldest first."""
        yield from _drain(self._control, None)

    def take(self, limit: int) -> Iterator[Request | Output]:
        """At most `limit` requests, or error outputs of rows that could not be rendered.

        Further turns of dialogues come first and without limit, while the cache still has what they continue.
        """
        yield from _drain(self._turns, None)
        yield from _drain(self._ready, limit)

    def next_turn(self, dialogue: Dialogue) -> None:
        """Render the turn that comes now."""
        self._raw.put(dialogue)

    def wait(self, seconds: float) -> None:
        """Sleep until something arrives, at most `seconds`."""
        self._wake.wait(seconds)
        self._wake.clear()

    def discard(self) -> None:
        """Drop the rows that were not taken."""
        for waiting in (self._raw, self._turns, self._ready):
            for _ in _drain(waiting, None):
                pass

    def _receive(self) -> None:
        try:
            while True:
                message = self._channel.receive()
                if message["type"] == "rows":
                    self._raw.put(message["rows"])
                elif message["type"] == "canary":
                    self.canary = message["row"]
                    self._raw.put([[message["row"], message["values"], [], 0]])
                else:
                    self._control.put(message)
                    self._wake.set()
        except ChannelClosed:
            self._end(None)
        except BaseException as error:
            self._end(error)

    def _prepare_all(self) -> None:
        try:
            while True:
                self._prepare(self._raw.get())
                self._wake.set()
        except BaseException as error:
            # A panic of the tokenizer's Rust code is a BaseException; unheard it would hang the job.
            self._end(error)

    def _end(self, error: BaseException | None) -> None:
        self._control.put(Closed(error))
        self._wake.set()

    def _prepare(self, rows: list[Any] | Dialogue) -> None:
        if isinstance(rows, Dialogue):
            self._turns.put(self._prepare_turn(rows))
            return
        prepared: list[Request | Output] = []
        for i in range(0, len(rows), GROUP):
            group = [
                (row, unpack_prompt_values(values), partial or [[]], priority)
                for row, values, partial, priority in rows[i : i + GROUP]
            ]
            prepared += self._prepare_group(group)
        for item in sorted(prepared, key=self._sort_key):
            self._ready.put(item)

    def _prepare_group(self, group: list[Any]) -> list[Request | Output]:
        sampled = [self._sampled(columns) for _, columns, *_ in group]
        good = [
            (row, how) for row, how in zip(group, sampled, strict=True) if isinstance(how, SamplingParams)
        ]
        prompts = self._renderer.prepare_batch(
            [(row[0], row[1]) for row, _ in good], self._max_model_len, [how for _, how in good]
        )
        refused = [
            Output(row[0], error=how)
            for row, how in zip(group, sampled, strict=True)
            if isinstance(how, RowError)
        ]
        return refused + [
            self._request(row, prompt, how) for (row, how), prompt in zip(good, prompts, strict=True)
        ]

    def _prepare_turn(self, dialogue: Dialogue) -> Request | Output:
        prompt = self._renderer.prepare_turn(
            dialogue.row, dialogue.columns, dialogue.answers, self._max_model_len, dialogue.sampling
        )
        if isinstance(prompt, RowError):
            return Output(dialogue.row, error=prompt)
        self._included.prepared(prompt, dialogue.sampling.seed)
        return dialogue.begin(prompt)

    def _sampled(self, columns: Mapping[str, Any]) -> SamplingParams | RowError:
        try:
            return self._sampling.of_row(columns)
        except RowFailure as failure:
            return failure.error

    def _request(
        self, item: Any, prompt: PreparedRow | RowError, sampling: SamplingParams
    ) -> Request | Output:
        row, columns, (first, *others), priority = item
        if isinstance(prompt, RowError):
            return Output(row, error=prompt)
        if row == self.canary:
            sampling = replace(sampling, max_tokens=1, min_tokens=0, n=1)
        else:
            self._included.prepared(prompt, sampling.seed)
            if self._renderer.spec.turns is not None:
                turns = len(self._renderer.user_turns(columns))
                dialogue = Dialogue(row, columns, sampling, turns, first, priority)
                self.dialogues[row] = dialogue
                return dialogue.begin(prompt)
        request = self._requests.request(prompt, sampling, first, priority)
        if isinstance(request, RowError):
            return Output(row, error=request)
        request.fork_token_ids = others
        return request

    def _sort_key(self, item: Request | Output) -> Any:
        if isinstance(item, Output):
            return (-(2**63), [])
        if self._order == "prefix":
            return (-item.priority, item.prompt_token_ids)
        if self._order == "length":
            return (-item.priority, [-len(item.prompt_token_ids)])
        return (-item.priority, [])


def _drain(source: queue.SimpleQueue[Any], limit: int | None) -> Iterator[Any]:
    taken = 0
    while limit is None or taken < limit:
        try:
            yield source.get_nowait()
        except queue.Empty:
            return
        taken += 1
