"""The tokens of a request so far, as the operations on its logits need them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

_FIRST_CAPACITY = 64


class TokenCounts:
    """Distinct tokens of a sequence that grows, and how often each was generated.

    Args:
        prompt: tokens that are known from the start; they count as generated 0 times.
    """

    def __init__(self, prompt: Iterable[int]) -> None:
        distinct = list(dict.fromkeys(prompt))
        self._place = {token: place for place, token in enumerate(distinct)}
        self._ids = np.zeros(max(_FIRST_CAPACITY, 2 * len(distinct)), dtype=np.int64)
        self._ids[: len(distinct)] = distinct
        self._counts = np.zeros(len(self._ids), dtype=np.float32)
        self._taken = 0

    def catch_up(self, output: Sequence[int]) -> None:
        """Take the generated tokens that are new since the last call.

        Args:
            output: all that were generated; begins with those of the last call.
        """
        for token in output[self._taken :]:
            place = self._place.setdefault(token, len(self._place))
            if place == len(self._ids):
                self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
                self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
            self._ids[place] = token
            self._counts[place] += 1
        self._taken = len(output)

    @property
    def ids(self) -> torch.Tensor:
        """`(N,)` int64, each token once."""
        return torch.from_numpy(self._ids[: len(self._place)])

    @property
    def counts(self) -> torch.Tensor:
        """`(N,)` float32, how often each of `ids` was generated."""
        return torch.from_numpy(self._counts[: len(self._place)])


@dataclass(slots=True)
class TokenHistory:
    """Prompt and output of one request; lives as long as the request does.

    Nothing in it is lost or wrong when the request is preempted, resumed from tokens that an earlier attempt
    sampled, or when a step is taken back: counts follow the output, whatever happened in between.

    Args:
        prompt: token ids.
        output: token ids; the request's own list, which grows.
    """

    prompt: list[int]
    output: list[int]
    _counts: TokenCounts | None = field(default=None, repr=False)

    def counts(self, *, with_prompt: bool) -> TokenCounts:
        """Of the output, and of the prompt too where it is asked for; always the same for one request."""
        if self._counts is None:
            self._counts = TokenCounts(self.prompt if with_prompt else ())
        self._counts.catch_up(self.output)
        return self._counts

    def tail(self, length: int) -> list[int]:
        """The last `length` tokens of prompt and output; fewer where there are not so many."""
        missing = length - len(self.output)
        if missing <= 0:
            return self.output[len(self.output) - length :]
        return self.prompt[max(0, len(self.prompt) - missing) :] + self.output

    def tokens(self) -> list[int]:
        """All tokens of prompt and output, a new list."""
        return self.prompt + self.output
