"""What a model thinks of known tokens and of whole texts: the nouns of `logprobs` and of the tasks.

Standard library only. `Request` says in these words what is wanted, `Output` what was found.
"""

from __future__ import annotations

import enum
import math
from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field


class Pooling(enum.StrEnum):
    """How a prompt's hidden states, after the final norm, become one vector: the last one, or their mean."""

    LAST = "last"
    MEAN = "mean"


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token as the model saw it at one position.

    Args:
        token_id: which.
        logprob: natural logarithm of its probability under the model's own logits, before any processing.
        rank: 1 for the likeliest token; of equally likely ones the lower id comes first.
        top: the likeliest tokens at its place, likeliest first, if they were asked for; theirs is empty.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Scoring:
    """Which known tokens of a request are scored: the logits after position `first + i` score `targets[i]`.

    Args:
        first: position of the first logits that are read.
        targets: never empty; the last one may be the token behind the prompt.
        top_k: how many of the likeliest tokens are kept beside each target.
    """

    first: int
    targets: tuple[int, ...]
    top_k: int = 0

    @property
    def stop(self) -> int:
        """One more than the last position of which logits are read."""
        return self.first + len(self.targets)


@dataclass(slots=True)
class TokenScores:
    """What the model thought of consecutive known tokens, as `TokenLogprob` says, in little memory.

    Args:
        token_ids: of each token.
        logprobs: of each token.
        ranks: of each token.
        top: at each token the likeliest ones, likeliest first, if they were asked for.
    """

    token_ids: array[int] = field(default_factory=lambda: array("q"))
    logprobs: array[float] = field(default_factory=lambda: array("d"))
    ranks: array[int] = field(default_factory=lambda: array("q"))
    top: list[tuple[TokenLogprob, ...]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.logprobs)

    def extend(self, other: TokenScores) -> None:
        """Append the scores of the tokens that follow."""
        self.token_ids.extend(other.token_ids)
        self.logprobs.extend(other.logprobs)
        self.ranks.extend(other.ranks)
        self.top.extend(other.top)

    @classmethod
    def joined(cls, parts: Iterable[TokenScores]) -> TokenScores:
        """Of stretches of tokens that follow one another."""
        whole = cls()
        for part in parts:
            whole.extend(part)
        return whole

    def part(self, which: slice, top_k: int) -> TokenScores:
        """Of some of the tokens, with at most `top_k` of the likeliest at each."""
        top = [likeliest[:top_k] for likeliest in self.top[which]] if top_k else []
        return TokenScores(self.token_ids[which], self.logprobs[which], self.ranks[which], top)

    def tokens(self) -> list[TokenLogprob]:
        """Each token with its scores."""
        top = self.top or [()] * len(self)
        return list(map(TokenLogprob, self.token_ids, self.logprobs, self.ranks, top))

    @property
    def loglikelihood(self) -> float:
        """Sum of the logprobs, rounded once."""
        return math.fsum(self.logprobs)

    @property
    def is_greedy(self) -> bool:
        """Whether every token is the likeliest at its place."""
        return all(rank == 1 for rank in self.ranks)


@dataclass(frozen=True, slots=True)
class Classification:
    """What a sequence-classification head says of a text.

    Args:
        scores: probability of each label, by softmax over all labels or, where several may hold at once, by
            a sigmoid of each; of a regression head the value itself. In the order of the label ids.
    """

    scores: tuple[tuple[str, float], ...]

    @property
    def label(self) -> str:
        """The likeliest one; of equally likely ones the first."""
        return max(self.scores, key=lambda item: item[1])[0]

    @property
    def score(self) -> float:
        """That of `label`."""
        return max(score for _, score in self.scores)
