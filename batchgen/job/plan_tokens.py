"""What tokenizing rows says of a job before it runs: lengths, rows that would fail, shared beginnings.

For `plan`, which hands in batches of rows: a sample of them, or all.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from batchgen.core.block_hash import ROOT_HASH, hash_block
from batchgen.job.histogram import Histogram
from batchgen.job.part_summary import ErrorGroup
from batchgen.job.plan_rows import EXAMPLES, Prompt
from batchgen.types import Request, RowError, RowFailure, SamplingParams

BLOCK = 16
MOST_BLOCKS = 1 << 20
"""Blocks that are remembered, some 100 MB; beyond, shared beginnings are found only with those."""
NO_LIMIT = 1 << 62


class Prepared(Protocol):
    """A rendered row; `batchgen.text.prompt.PreparedRow`."""

    @property
    def token_ids(self) -> list[int]: ...
    @property
    def control_tokens(self) -> int: ...


class Renderer(Protocol):
    """`batchgen.text.prompt.PromptRenderer`."""

    def prepare_batch(
        self,
        rows: Sequence[tuple[int, Mapping[str, Any]]],
        max_model_len: int,
        sampling: Sequence[SamplingParams] | None = None,
    ) -> Sequence[Any]: ...
    def user_turns(self, columns: Mapping[str, Any]) -> list[str]: ...
    def prepare_turn(
        self,
        row: int,
        columns: Mapping[str, Any],
        answers: Sequence[str],
        max_model_len: int,
        sampling: SamplingParams,
    ) -> Any: ...


class Requests(Protocol):
    """`batchgen.text.task_request.TaskRequests`."""

    def request(self, row: Any, sampling: SamplingParams) -> Request | RowError: ...


@dataclass(slots=True)
class TokenScan:
    """What was found.

    Args:
        rows: that were rendered, those that cannot be too.
        lengths: tokens that the model reads of those that can be, all windows of a long text together.
        errors: rows that would fail, by class.
        too_long: rows that leave no room to answer, with the first of them: row, tokens.
        control_rows, control_tokens: rows whose own text spells control tokens, and how many.
        runnable: rows that would run.
        prompt_tokens: of those, as they would run.
        output_room: output tokens that `max_tokens` and the context allow them; none where none are sampled.
        scored_tokens: known tokens of those whose logprobs are computed.
        shared_tokens: prompt tokens in blocks that begin as an earlier prompt does.
    """

    rows: int = 0
    lengths: Histogram = field(default_factory=Histogram)
    errors: dict[str, ErrorGroup] = field(default_factory=dict)
    too_long: int = 0
    too_long_examples: list[tuple[int, int]] = field(default_factory=list)
    control_rows: int = 0
    control_tokens: int = 0
    runnable: int = 0
    prompt_tokens: int = 0
    output_room: int = 0
    scored_tokens: int = 0
    shared_tokens: int = 0


class TokenCounter:
    """Tokenizes batches.

    Args:
        renderer: of the job.
        requests: makes what the engine gets of a row, by the job's task.
        sampling_of: from the columns of a row to its sampling; raises RowFailure.
        max_model_len: of the model; None where it is not known.
        cut: whether prompts that are too long are cut to fit; else they do not run.
        dialogues: whether rows have several user turns. Each is a prompt, which is counted as if the answers
            before it were empty; so prompt tokens are the fewest that there can be.
    """

    def __init__(
        self,
        renderer: Renderer,
        requests: Requests,
        sampling_of: Callable[[Mapping[str, Any]], SamplingParams],
        max_model_len: int | None,
        *,
        cut: bool = False,
        dialogues: bool = False,
    ) -> None:
        self._renderer = renderer
        self._requests = requests
        self._sampling_of = sampling_of
        self._max_model_len = NO_LIMIT if max_model_len is None else max_model_len
        self._cut = cut
        self._dialogues = dialogues
        self._blocks: set[bytes] = set()
        self.scan = TokenScan()

    def take(self, batch: list[Prompt]) -> None:
        """Add rows."""
        self.scan.rows += len(batch)
        good: list[tuple[Prompt, SamplingParams]] = []
        for prompt in batch:
            try:
                good.append((prompt, self._sampling_of(prompt[2])))
            except RowFailure as failure:
                self._fail(prompt, failure.error)
        rows = [(prompt[0], prompt[2]) for prompt, _ in good]
        # Whatever the job does with prompts that are too long must not happen here: they are counted.
        prepared = self._renderer.prepare_batch(rows, NO_LIMIT, [sampling for _, sampling in good])
        lengths = []
        for (prompt, sampling), first in zip(good, prepared, strict=True):
            turns = [first, *self._later_turns(prompt, first, sampling)]
            requests = [
                turn if isinstance(turn, RowError) else self._requests.request(turn, sampling)
                for turn in turns
            ]
            failed = next((request for request in requests if isinstance(request, RowError)), None)
            if failed is not None:
                self._fail(prompt, failed)
                continue
            good_requests = [request for request in requests if isinstance(request, Request)]
            lengths.append(sum(len(piece.prompt_token_ids) for piece in _pieces(good_requests[-1])))
            self._count(prompt[0], good_requests)
        self.scan.lengths.add(lengths)

    def _later_turns(self, prompt: Prompt, first: Prepared | RowError, sampling: SamplingParams) -> list[Any]:
        if not self._dialogues or isinstance(first, RowError):
            return []
        row, _, columns = prompt
        return [
            self._renderer.prepare_turn(row, columns, [""] * answered, NO_LIMIT, sampling)
            for answered in range(1, len(self._renderer.user_turns(columns)))
        ]

    def _fail(self, prompt: Prompt, error: RowError) -> None:
        group = self.scan.errors.setdefault(error.error_class.value, ErrorGroup())
        group.add(prompt[0], prompt[1], error.message)

    def _count(self, row: int, turns: Sequence[Request]) -> None:
        scan, longest = self.scan, max(len(turn.prompt_token_ids) for turn in turns)
        # The last turn's prompt holds the text of all.
        scan.control_rows += turns[-1].control_tokens > 0
        scan.control_tokens += turns[-1].control_tokens
        most = self._max_model_len - 1 if turns[0].generates else self._max_model_len
        if longest > most:
            scan.too_long += 1
            if len(scan.too_long_examples) < EXAMPLES:
                scan.too_long_examples.append((row, longest))
            if not self._cut:
                return
        scan.runnable += 1
        for piece in (piece for turn in turns for piece in _pieces(turn)):
            length = min(len(piece.prompt_token_ids), most)
            scan.prompt_tokens += length
            scan.shared_tokens += self._shared(
                piece.prompt_token_ids[:length], min(piece.first_needed, length - 1)
            )
            if piece.scoring is not None:
                scan.scored_tokens += len(piece.scoring.targets)
            if piece.generates:
                sampling = piece.sampling
                scan.output_room += sampling.n * min(sampling.max_tokens, self._max_model_len - length)

    def _shared(self, ids: list[int], needed: int) -> int:
        """Tokens of the longest beginning, in whole blocks, that an earlier prompt has as well.

        The engine computes everything from position `needed` on in any case.
        """
        shared, name = 0, ROOT_HASH
        for start in range(0, len(ids) - BLOCK + 1, BLOCK):
            name = hash_block(name, array("i", ids[start : start + BLOCK]).tobytes())
            if name in self._blocks:
                shared += BLOCK
            elif len(self._blocks) < MOST_BLOCKS:
                self._blocks.add(name)
        return min(shared, max(0, needed // BLOCK * BLOCK))


def _pieces(request: Request) -> Iterator[Request]:
    """A row's request, and those that follow it under its id."""
    yield request
    yield from request.following
