"""How a model may spell a word that it must not write."""

from __future__ import annotations

from collections.abc import Iterable

from batchgen.text.tokenizer import Tokenizer

_BORDER = "\n"


def spellings(words: Iterable[str], tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """Token ids of each word at the beginning of a text, after a line break and after a space.

    The first and the last are what vLLM bars; a tokenizer that puts a space before every text spells the word
    inside a text in the second way only. Other splits into tokens, and other capitals, are other words.

    Args:
        words: each not empty; space before it is ignored.
        tokenizer: the model's.

    Returns:
        Each sequence once; none that ends with another, which bars it already.
    """
    found: dict[tuple[int, ...], None] = {}
    border = tokenizer.encode_batch([_BORDER])[0]
    for word in words:
        # A word of nothing but space is meant as it is written.
        word = word.lstrip() or word
        plain, inside, spaced = map(tuple, tokenizer.encode_batch([word, _BORDER + word, f" {word}"]))
        found[plain] = found[spaced] = None
        if list(inside[: len(border)]) == border:
            found[inside[len(border) :]] = None
    found.pop((), None)
    return [s for s in found if not any(s[start:] in found for start in range(1, len(s)))]
