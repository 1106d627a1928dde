"""When generation of a row ends, and what its text and ids are then.

The engine makes one `StopRules` for equal sampling parameters and one `StopChecker` a request, and
appends each sampled token before it schedules the next step.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from batchgen.text.detokenizer import IncrementalDetokenizer
from batchgen.text.tokenizer import Tokenizer
from batchgen.types import FinishReason, SamplingParams


@dataclass(frozen=True, slots=True)
class Finish:
    """The end of a row.

    Args:
        reason: a stop condition or the length limit.
        stop_reason: the stop string or stop token id; None for end of sequence and length.
        text: up to the stop condition.
        token_ids: the fewest whose text covers `text`; neither holds the end-of-sequence or stop token.
    """

    reason: FinishReason
    stop_reason: str | int | None
    text: str
    token_ids: list[int]


class StopRules:
    """The stop conditions of a sampling section, ready to check; shared by all its rows.

    Args:
        sampling: gives stop, stop_token_ids, min_tokens, ignore_eos and max_tokens.
        eos_token_ids: end-of-sequence ids of the model's generation configuration and tokenizer.
        tokenizer: the model's.
    """

    def __init__(self, sampling: SamplingParams, eos_token_ids: Iterable[int], tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.min_tokens = sampling.min_tokens
        self.max_tokens = sampling.max_tokens
        self.eos = frozenset() if sampling.ignore_eos else frozenset(eos_token_ids)
        # Special tokens have no text to find a string in, so one written out stands for its id.
        special = tokenizer.special_tokens
        self.strings = tuple(s for s in dict.fromkeys(sampling.stop) if s not in special)
        self.longest = max(map(len, self.strings), default=0)
        written_out = {special[s]: s for s in sampling.stop if s in special}
        self.ids: dict[int, str | int] = {**written_out, **{i: i for i in sampling.stop_token_ids}}

    @property
    def stop_ids(self) -> frozenset[int]:
        """Every id that ends a row; the sampler bars them before `min_tokens`."""
        return self.eos | frozenset(self.ids)


class _Match(NamedTuple):
    """Smallest is best: the string that completes first, and of those the longest."""

    end: int
    start: int
    string: str


class StopChecker:
    """Watches one row.

    A stop string ends the row at the first token n with `decode(ids[:n])` holding it.

    Args:
        rules: of the row's sampling parameters.
        max_tokens: most tokens to generate, where the context leaves fewer than the rules say.
    """

    def __init__(self, rules: StopRules, max_tokens: int | None = None) -> None:
        self.rules = rules
        self._max_tokens = rules.max_tokens if max_tokens is None else max_tokens
        self._ids: list[int] = []
        self._search = _StringSearch(rules) if rules.strings else None

    @property
    def num_tokens(self) -> int:
        """How many tokens it has taken."""
        return len(self._ids)

    def prime(self, token_ids: Iterable[int]) -> Finish | None:
        """Take what was generated before; the first end in it, if there is one."""
        for token_id in token_ids:
            if (finish := self.append(token_id)) is not None:
                return finish
        return None

    def append(self, token_id: int) -> Finish | None:
        """Take the next sampled token; None while the row goes on.

        Checked in order: end of sequence, stop ids, stop strings, length. Before `min_tokens` only
        length counts.
        """
        self._ids.append(token_id)
        may_stop = len(self._ids) >= self.rules.min_tokens
        if may_stop and token_id in self.rules.eos:
            return self._finish(FinishReason.STOP, None, self._ids[:-1])
        if may_stop and token_id in self.rules.ids:
            return self._finish(FinishReason.STOP, self.rules.ids[token_id], self._ids[:-1])
        if self._search is not None:
            match = self._search.append(token_id, may_stop=may_stop)
            if match is not None:
                return self._cut(match)
        if len(self._ids) >= self._max_tokens:
            return self._finish(FinishReason.LENGTH, None, self._ids)
        return None

    def _finish(self, reason: FinishReason, stop_reason: str | int | None, token_ids: list[int]) -> Finish:
        return Finish(reason, stop_reason, self.rules.tokenizer.decode(token_ids), list(token_ids))

    def _cut(self, match: _Match) -> Finish:
        decode = self.rules.tokenizer.decode
        text = decode(self._ids)[: match.start]
        count = len(self._ids)
        while count and decode(self._ids[: count - 1]).startswith(text):
            count -= 1
        return Finish(FinishReason.STOP, match.string, text, self._ids[:count])


class _StringSearch:
    """Finds stop strings in text that grows, looking only at what is new."""

    def __init__(self, rules: StopRules) -> None:
        self.rules = rules
        self._detokenizer = IncrementalDetokenizer(rules.tokenizer)
        # The end of the settled text, as far back as an unfinished match can reach, and where it begins.
        self._recent = ""
        self._offset = 0
        # Text before this belongs to the first min_tokens.
        self._barred = 0

    def append(self, token_id: int, *, may_stop: bool) -> _Match | None:
        text = self._recent + self._detokenizer.append(token_id)
        settled = len(text)
        text += self._detokenizer.pending
        match = self._find(text) if may_stop else None
        if not may_stop:
            self._barred = max(self._barred, self._offset + len(text.rstrip("\ufffd")))
        keep = max(0, settled - self.rules.longest + 1)
        self._recent, self._offset = text[keep:settled], self._offset + keep
        return match

    def _find(self, text: str) -> _Match | None:
        matches = []
        for string in self.rules.strings:
            start = text.find(string, max(0, self._barred + 1 - len(string) - self._offset))
            if start >= 0:
                matches.append(_Match(self._offset + start + len(string), self._offset + start, string))
        return min(matches, default=None)
