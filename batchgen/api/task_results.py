"""What `LLM` returns for tasks other than generating: a result an item, in it the error if there is one."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from batchgen.data.task_columns import bits_per_byte, perplexity
from batchgen.scores import TokenScores
from batchgen.types import Output, RowError


@dataclass(frozen=True, slots=True)
class TaskResult:
    """What every result has.

    Args:
        output: as it came from the engine: counts of tokens, times, and the error if there is one.
    """

    output: Output

    @property
    def ok(self) -> bool:
        """Whether there is a result."""
        return self.output.error is None

    @property
    def error(self) -> RowError | None:
        """Why there is none."""
        return self.output.error

    @property
    def _scores(self) -> TokenScores:
        return self.output.scores or TokenScores()


@dataclass(frozen=True, slots=True)
class Loglikelihood(TaskResult):
    """How likely a continuation is; unpacks as `(loglikelihood, is_greedy)`."""

    @property
    def loglikelihood(self) -> float:
        """Sum of the continuation's logprobs (natural logarithm); NaN where there is an error."""
        return self._scores.loglikelihood if self.ok else math.nan

    @property
    def is_greedy(self) -> bool:
        """Whether greedy decoding would have written every token of the continuation."""
        return self.ok and self._scores.is_greedy

    @property
    def num_tokens(self) -> int:
        """Tokens of the continuation."""
        return len(self._scores)

    @property
    def token_logprobs(self) -> list[float]:
        """Of each token of the continuation."""
        return self._scores.logprobs.tolist()

    def __iter__(self) -> Iterator[float | bool]:
        yield self.loglikelihood
        yield self.is_greedy


@dataclass(frozen=True, slots=True)
class Perplexity(TaskResult):
    """How likely a whole text is.

    Args:
        num_bytes: of the text in UTF-8; None where it came as token ids.
        num_words: parts of it between white space; None where it came as token ids.
    """

    num_bytes: int | None = None
    num_words: int | None = None

    @property
    def loglikelihood(self) -> float:
        """Sum of the logprobs of all tokens (natural logarithm); NaN where there is an error."""
        return self._scores.loglikelihood if self.ok else math.nan

    @property
    def num_tokens(self) -> int:
        """Tokens of the text, each scored once."""
        return len(self._scores)

    @property
    def perplexity(self) -> float:
        """exp(-loglikelihood / num_tokens); NaN where there is an error."""
        return perplexity(self.loglikelihood, self.num_tokens)

    @property
    def bits_per_byte(self) -> float:
        """-log2 of the text's probability, by byte; NaN with an error, or of a text that came as ids."""
        return bits_per_byte(self.loglikelihood, self.num_bytes)


@dataclass(frozen=True, slots=True)
class Embedding(TaskResult):
    """A text as a vector."""

    @property
    def embedding(self) -> npt.NDArray[np.float32] | None:
        """`(hidden,)` float32; None where there is an error."""
        found = self.output.embedding
        return None if found is None else np.frombuffer(found, np.float32)


@dataclass(frozen=True, slots=True)
class Classified(TaskResult):
    """The class of a text."""

    @property
    def label(self) -> str | None:
        """The likeliest label; None where there is an error."""
        found = self.output.classification
        return None if found is None else found.label

    @property
    def score(self) -> float:
        """Its probability, or the value of a regression head; NaN where there is an error."""
        found = self.output.classification
        return math.nan if found is None else found.score

    @property
    def scores(self) -> dict[str, float]:
        """Of each label; empty where there is an error."""
        found = self.output.classification
        return {} if found is None else dict(found.scores)
