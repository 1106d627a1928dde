"""From a prepared row to the engine's request, by task. Used by the worker's intake and by `LLM`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from batchgen.scores import Pooling, Scoring
from batchgen.text.pairs import prefix_token, rolling_windows, scored_pair, scored_text
from batchgen.text.prompt import PreparedRow
from batchgen.text.tokenizer import Tokenizer
from batchgen.types import Request, RowError, RowFailure, SamplingParams, Task


@dataclass(frozen=True, slots=True)
class TaskRequests:
    """Makes the requests of one job or call.

    Args:
        task: what is done with each row.
        tokenizer: the model's.
        max_model_len: longest sequence, in tokens.
        pooling: for `embed`.
        normalize: whether embeddings get length 1.
    """

    task: Task
    tokenizer: Tokenizer
    max_model_len: int
    pooling: Pooling = Pooling.LAST
    normalize: bool = False

    def request(
        self, row: PreparedRow, sampling: SamplingParams, output: Sequence[int] = (), priority: int = 0
    ) -> Request | RowError:
        """The request of a row; of a text in several windows the first, with the others behind it.

        Args:
            row: its prompt.
            sampling: how it is answered, if it is.
            output: what an earlier attempt has sampled.
            priority: higher runs first.
        """
        request = Request(
            row.row,
            row.token_ids,
            sampling,
            list(output),
            priority,
            control_tokens=row.control_tokens,
            truncated_tokens=row.truncated_tokens,
            task=self.task,
        )
        match self.task:
            case Task.GENERATE:
                request.scoring = _prompt_scoring(row.token_ids, sampling)
            case Task.LOGLIKELIHOOD:
                read, scoring = scored_pair(row.token_ids, row.continuation_ids or [])
                request.prompt_token_ids, request.scoring = read, scoring
            case Task.PERPLEXITY:
                return self._windows(request)
            case Task.EMBED:
                request.pooling, request.normalize = self.pooling, self.normalize
            case Task.CLASSIFY:
                request.pooling = Pooling.LAST
        return request

    def _windows(self, base: Request) -> Request | RowError:
        try:
            prefix = prefix_token(self.tokenizer)
        except RowFailure as failure:
            return failure.error
        text = scored_text(base.prompt_token_ids, prefix)
        first, *others = [
            replace(base, prompt_token_ids=read, scoring=scoring)
            for read, scoring in rolling_windows(text, prefix, self.max_model_len)
        ]
        return replace(first, following=tuple(others))


def _prompt_scoring(ids: list[int], sampling: SamplingParams) -> Scoring | None:
    if sampling.prompt_logprobs is None or len(ids) < 2:
        return None
    return Scoring(0, tuple(ids[1:]), sampling.prompt_logprobs)


def count_bytes(text: str) -> int:
    """Bytes of a text in UTF-8."""
    return len(text.encode(errors="surrogatepass"))


def count_words(text: str) -> int:
    """Parts of a text between white space, as lm-evaluation-harness counts them."""
    return len(re.split(r"\s+", text))
