"""What is done to one row of logits before a token is chosen: named operations in a fixed order.

`operations_of` makes those that a `SamplingParams` asks for, shared by all its rows, in this order: allowed
tokens, bad words, min_tokens, logit_bias, penalties, the caller's own. A row that asks for none has none and
costs nothing. What a row has generated comes with its `TokenHistory`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from batchgen.sampling.bad_words import spellings
from batchgen.sampling.edits import Edits
from batchgen.sampling.history import TokenHistory
from batchgen.text.tokenizer import Tokenizer
from batchgen.types import ErrorClass, LogitsProcessor, RowFailure, SamplingParams


class Operation(Protocol):
    """One operation."""

    def __call__(self, logits: torch.Tensor, history: TokenHistory) -> torch.Tensor:
        """New logits.

        Args:
            logits: `(V,)` float32, the row's own, which may be changed in place.
            history: the row's tokens so far.

        Raises:
            RowFailure: the row cannot go on.
        """
        ...

    def edit(self, edits: Edits, history: TokenHistory) -> None:
        """Say in numbers what is to be done, for logits on a device."""
        ...


class AllowedTokens:
    """Only these token ids may be chosen."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._ids = torch.tensor(token_ids)

    def __call__(self, logits: torch.Tensor, history: TokenHistory) -> torch.Tensor:
        allowed = torch.full_like(logits, -torch.inf)
        allowed[self._ids] = logits[self._ids]
        return allowed

    def edit(self, edits: Edits, history: TokenHistory) -> None:
        """See `Operation`."""
        edits.keep_only(self._ids)


class BadWords:
    """The last token of a sequence is barred where all before it have just been written.

    Prompt and output count alike, as in transformers' `NoBadWordsLogitsProcessor`.

    Args:
        sequences: token ids of each word, never empty.
    """

    def __init__(self, sequences: Collection[tuple[int, ...]]) -> None:
        self._always = torch.tensor([s[0] for s in sequences if len(s) == 1], dtype=torch.int64)
        # By the token that stands before the last, so that a step looks at few of many words.
        self._after: dict[int, list[tuple[int, ...]]] = {}
        for sequence in sequences:
            if len(sequence) > 1:
                self._after.setdefault(sequence[-2], []).append(sequence)

    def __call__(self, logits: torch.Tensor, history: TokenHistory) -> torch.Tensor:
        logits[self._always] = -torch.inf
        for token in self._written(history):
            logits[token] = -torch.inf
        return logits

    def edit(self, edits: Edits, history: TokenHistory) -> None:
        """See `Operation`."""
        edits.bar(self._always)
        edits.bar(torch.tensor(list(self._written(history)), dtype=torch.int64))

    def _written(self, history: TokenHistory) -> Iterator[int]:
        """Last tokens of sequences of which all others have just been written."""
        last = history.tail(1)
        for sequence in self._after.get(last[0], ()) if last else ():
            if tuple(history.tail(len(sequence) - 1)) == sequence[:-1]:
                yield sequence[-1]


@dataclass(frozen=True, slots=True)
class MinTokens:
    """Nothing that ends the row may be chosen before it has `least` tokens."""

    least: int
    stop_ids: torch.Tensor

    def __call__(self, logits: torch.Tensor, history: TokenHistory) -> torch.Tensor:
        if len(history.output) < self.least:
            logits[self.stop_ids] = -torch.inf
        return logits

    def edit(self, edits: Edits, history: TokenHistory) -> None:
        """See `Operation`."""
        if len(history.output) < self.least:
            edits.bar(self.stop_ids)


class LogitBias:
    """A number added to the logits of some token ids."""

    def __init__(self, bias: Mapping[int, float]) -> None:
        self._ids = torch.tensor(list(bias))
        self._bias = torch.tensor(list(bias.values()), dtype=torch.float32)

    def __call__(self, logits: torch.Tensor, history: TokenHistory) -> torch.Tensor:
        logits[self._ids] += self._bias
        return logits

    def edit(self, edits: Edits, history: TokenHistory) -> None:
        """See `Operation`."""
        edits.add(self._ids, self._bias)


@dataclass(frozen=True, slots=True)
class Penalties:
    """Make tokens less likely that occurred before.

    Repetition first (https://arxiv.org/abs/1909.05858): logits of tokens in prompt or output are divided by
    it where positive, else multiplied. Then frequency times how often a token was generated is subtracted,
    and presence where it was at all (https://platform.openai.com/docs/api-reference/chat/create); for these
    two the prompt does not count.
    """

    repetition: float
    frequency: float
    presence: float

    def __call__(self, logits: torch.Tensor, history: TokenHistory) -> torch.Tensor:
        seen = history.counts(with_prompt=self.repetition != 1)
        found = logits[seen.ids]
        if self.repetition != 1:
            found = torch.where(found > 0, found / self.repetition, found * self.repetition)
        if self.frequency or self.presence:
            found = found - self.frequency * seen.counts - self.presence * (seen.counts > 0)
        logits[seen.ids] = found
        return logits

    def edit(self, edits: Edits, history: TokenHistory) -> None:
        """See `Operation`."""
        seen = history.counts(with_prompt=self.repetition != 1)
        edits.penalise(seen.ids, seen.counts, self.repetition, self.frequency, self.presence)


@dataclass(frozen=True, slots=True)
class Custom:
    """A function of the caller's.

    Args:
        process: see `SamplingParams.logits_processors`.
        index: among them.
    """

    process: LogitsProcessor
    index: int

    def __call__(self, logits: torch.Tensor, history: TokenHistory) -> torch.Tensor:
        try:
            result = self.process(history.tokens(), logits)
        except Exception as error:
            raise self._failure(f"raised {type(error).__name__}: {error}") from error
        if not isinstance(result, torch.Tensor) or result.shape != logits.shape:
            shape = tuple(result.shape) if isinstance(result, torch.Tensor) else type(result).__name__
            raise self._failure(f"returned {shape}; return a tensor of shape {tuple(logits.shape)}")
        if not (result < torch.inf).all():
            raise self._failure("returned NaN or infinity; return numbers, or -inf for what is not allowed")
        return result.float()

    def edit(self, edits: Edits, history: TokenHistory) -> None:
        """There are no numbers: what the function does is known when it is called."""
        raise TypeError("a function of the caller's is called on the host")

    def _failure(self, what: str) -> RowFailure:
        name = getattr(self.process, "__name__", type(self.process).__name__)
        return RowFailure(ErrorClass.INVALID_PARAM, f"logits_processors[{self.index}] ({name}) {what}")


def operations_of(
    sampling: SamplingParams, stop_ids: Collection[int], tokenizer: Tokenizer, vocab_size: int
) -> tuple[Operation, ...]:
    """The operations that `sampling` asks for, in order.

    Args:
        sampling: of one row or many.
        stop_ids: every id that ends a row.
        tokenizer: spells bad words.
        vocab_size: of the logits; what lies beyond cannot be chosen anyway.
    """
    operations: list[Operation] = []
    if sampling.allowed_token_ids:
        operations.append(AllowedTokens(sampling.allowed_token_ids))
    if sampling.bad_words:
        operations.append(
            BadWords([s for s in spellings(sampling.bad_words, tokenizer) if max(s) < vocab_size])
        )
    barred = sorted(token for token in stop_ids if token < vocab_size)
    if sampling.min_tokens and barred:
        operations.append(MinTokens(sampling.min_tokens, torch.tensor(barred)))
    if sampling.logit_bias:
        operations.append(LogitBias(sampling.logit_bias))
    penalties = Penalties(sampling.repetition_penalty, sampling.frequency_penalty, sampling.presence_penalty)
    if penalties != Penalties(1.0, 0.0, 0.0):
        operations.append(penalties)
    operations += [Custom(process, index) for index, process in enumerate(sampling.logits_processors)]
    return tuple(operations)
