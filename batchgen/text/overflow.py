"""Prompts that leave no room to answer: shorten what the row brought until they do.

`prompt.overflow: truncate_…` shortens the row's own text before the templates see it, never the tokens
after. So BOS, the job's words and the template's head and tail stay whole, and the prompt is, token for
token, the one that a row with the shorter text would have had. Called by the prompt renderer.

The longest text goes first: of a conversation the user's turns, then the others; of a job's templates
the columns that they read. Only if nothing of it is left, the next one is shortened too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from batchgen.text.content import Content
from batchgen.text.tokenizer import Tokenizer
from batchgen.types import RowFailure, SamplingParams

Place = tuple[str | int, ...]
_Tried = TypeVar("_Tried")


def least_room(sampling: SamplingParams) -> int:
    """Fewest tokens that a prompt must leave for its answer: `min_tokens`, and one in any case."""
    return max(1, sampling.min_tokens)


def kept_room(sampling: SamplingParams, max_model_len: int) -> int:
    """Tokens that a shortened prompt leaves for its answer: `max_tokens`, but at most half of the context."""
    return max(least_room(sampling), min(sampling.max_tokens, max_model_len // 2))


def cut(items: Any, count: int, policy: str) -> Any:
    """A text or list with `count` items cut out at the beginning, the end or the middle.

    Args:
        items: a string or a list.
        count: at most as many as there are.
        policy: `truncate_left`, `truncate_right` or `truncate_middle`.
    """
    left = len(items) - count
    start = {"truncate_left": 0, "truncate_right": left, "truncate_middle": left - left // 2}[policy]
    return items[:start] + items[start + count :]


class Shortener:
    """Makes contents shorter.

    Args:
        tokenizer: the model's.
        policy: `truncate_left`, `truncate_right` or `truncate_middle`.
    """

    def __init__(self, tokenizer: Tokenizer, policy: str) -> None:
        self._tokenizer = tokenizer
        self._policy = policy

    def shorten(
        self, content: Content, excess: int, attempt: Callable[[Content], tuple[_Tried, int]]
    ) -> _Tried | None:
        """The longest prompt that cutting the content gives and that fits, or nearly so.

        Args:
            content: of the row.
            excess: tokens that its prompt has too many.
            attempt: makes a prompt of a content, and says by how many tokens it is too long.

        Returns:
            What `attempt` returned for a content that fits; None if all of it must go.
        """
        for place, text in self._by_length(content):
            pieces = self._pieces(text)
            gone = 0
            while gone < len(pieces):
                gone = min(len(pieces), gone + excess)
                content = _with_text(content, place, "".join(cut(pieces, gone, self._policy)))
                try:
                    tried, excess = attempt(content)
                except RowFailure:
                    if gone < len(pieces):
                        raise
                    # Nothing is left of this text, and without it there is no prompt.
                    return None
                if excess <= 0:
                    return tried
        return None

    def _pieces(self, text: str) -> list[str]:
        """The text by its tokens; of a character that takes several, all but one are empty."""
        encoding = self._tokenizer.backend.encode(text, add_special_tokens=False)
        borders = [start for start, _ in encoding.offsets[1:]]
        return [text[a:b] for a, b in zip([0, *borders], [*borders, len(text)], strict=True)]

    def _by_length(self, content: Content) -> Iterator[tuple[Place, str]]:
        places = list(_texts(content))
        counts = map(len, self._tokenizer.encode_batch([text for _, _, text in places]))
        numbered = zip(counts, range(len(places)), places, strict=True)
        # The user's turns first, of those the longest, of equal ones the last.
        ordered = sorted(numbered, key=lambda item: (not item[2][0], -item[0], -item[1]))
        return ((place, text) for _, _, (_, place, text) in ordered if text)


def _texts(content: Content) -> Iterator[tuple[bool, Place, str]]:
    """Every text that may be cut: whether it goes first, where it is, what it is."""
    if isinstance(content.main, str):
        yield True, ("main",), content.main
    elif content.main is not None:
        for number, message in enumerate(content.main):
            text = message.get("content")
            if isinstance(text, str) and message["role"] != "system":
                yield message["role"] == "user", ("main", number, "content"), text
    else:
        for place, text in _strings(content.values, ("values",)):
            yield True, place, text


def _strings(value: Any, place: Place) -> Iterator[tuple[Place, str]]:
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(item, (*place, key))
    elif isinstance(value, list | tuple):
        for number, item in enumerate(value):
            yield from _strings(item, (*place, number))


def _with_text(content: Content, place: Place, text: str) -> Content:
    field = str(place[0])
    return replace(content, **{field: _put(getattr(content, field), place[1:], text)})


def _put(value: Any, place: Place, text: str) -> Any:
    """A copy of the value with the text at a place in it."""
    if not place:
        return text
    key, rest = place[0], place[1:]
    if isinstance(value, Mapping):
        return {**value, key: _put(value[key], rest, text)}
    return [_put(item, rest, text) if number == key else item for number, item in enumerate(value)]
