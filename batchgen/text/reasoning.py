"""An answer in two: what the model reasoned, and what it says. `EngineCore` splits each finished sample."""

from __future__ import annotations

from collections.abc import Sequence

from batchgen.text.tokenizer import Tokenizer
from batchgen.types import Reasoning


class ReasoningSplitter:
    """Splits texts at the marks of one model.

    A text reasons if it begins with `start`, or if its prompt ends within an open mark, as chat templates
    leave it that write the mark themselves. The reasoning ends at the first `end`; without one, all of the
    text is reasoning. A mark further on in the answer is text like any other.

    Args:
        marks: as the model writes them.
        tokenizer: the model's.
    """

    def __init__(self, marks: Reasoning, tokenizer: Tokenizer) -> None:
        self._marks = marks
        self._tokenizer = tokenizer
        # Special tokens are left out of decoded text, and are found by their ids.
        special = tokenizer.special_tokens
        self._special = {special[mark]: mark for mark in (marks.start, marks.end) if mark in special}

    def opened_by(self, prompt_token_ids: Sequence[int]) -> bool:
        """Whether the prompt leaves the mark open: what stands before its last special token has no say."""
        first = len(prompt_token_ids)
        others = self._tokenizer.special_ids - self._special.keys()
        while first and prompt_token_ids[first - 1] not in others:
            first -= 1
        tail = self._tokenizer.decode_all(prompt_token_ids[first:])
        return tail.rfind(self._marks.start) > tail.rfind(self._marks.end)

    def split(
        self, prompt_token_ids: Sequence[int], token_ids: Sequence[int], text: str
    ) -> tuple[str | None, str]:
        """Reasoning and answer, without the marks and the space around them.

        Args:
            prompt_token_ids: what the model was given.
            token_ids: the fewest whose text covers `text`.
            text: without special tokens.

        Returns:
            None and the text as it is, where it does not reason.
        """
        text = self._with_marks(token_ids, text)
        begins = text.lstrip().startswith(self._marks.start)
        if not begins and not self.opened_by(prompt_token_ids):
            return None, text
        inside = text.lstrip().removeprefix(self._marks.start)
        reasoning, _, answer = inside.partition(self._marks.end)
        return reasoning.strip(), answer.lstrip()

    def num_tokens(self, token_ids: Sequence[int]) -> int:
        """How many tokens of an answer that reasons are no part of what it says: up to the end mark, with it.

        All of them where the reasoning does not end.
        """
        end, low, high = self._marks.end, 1, len(token_ids)
        if end not in self._marked_text(token_ids):
            return high
        # The text of a beginning of the tokens has the mark from the token on that completes it.
        while low < high:
            middle = (low + high) // 2
            if end in self._marked_text(token_ids[:middle]):
                high = middle
            else:
                low = middle + 1
        return low

    def _marked_text(self, token_ids: Sequence[int]) -> str:
        return self._with_marks(token_ids, self._tokenizer.decode(token_ids))

    def _with_marks(self, token_ids: Sequence[int], text: str) -> str:
        if not self._special:
            return text
        decode = self._tokenizer.decode
        pieces, first = [], 0
        for place, token_id in enumerate(token_ids):
            if token_id in self._special:
                pieces += [decode(token_ids[first:place]), self._special[token_id]]
                first = place + 1
        pieces.append(decode(token_ids[first:]))
        # A stop string may have cut the text within the last token.
        behind = len(decode(token_ids)) - len(text)
        whole = "".join(pieces)
        return whole[: len(whole) - behind]
