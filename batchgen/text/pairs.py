"""A context and its continuation as token ids: what `loglikelihood` scores. Used by the prompt encoder.

Both are tokenized as one text, which is cut where the context alone would end, so that a continuation has the
tokens that a model would have had to write. Spaces at the end of a plain context belong to the continuation,
because tokenizers join them to the word that follows. So does lm-evaluation-harness
(https://github.com/EleutherAI/lm-evaluation-harness), whose scores are to be the same.
"""

from __future__ import annotations

from batchgen.scores import Scoring
from batchgen.text.overflow import cut
from batchgen.text.tokenizer import Tokenizer
from batchgen.types import ErrorClass, RowFailure


def move_spaces(context: str, continuation: str) -> tuple[str, str]:
    """The pair with what is white at the end of the context at the beginning of the continuation."""
    end = len(context.rstrip())
    return context[:end], context[end:] + continuation


def prefix_token(tokenizer: Tokenizer) -> int:
    """What comes before a text without a context: the beginning of sequence, else the end.

    Raises:
        RowFailure: the tokenizer has neither.
    """
    found = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if found is None:
        raise RowFailure(
            ErrorClass.EMPTY_PROMPT,
            "there is no context, and the tokenizer has neither a BOS nor an EOS token to begin with",
        )
    return found


def fit_context(
    context: list[int], continuation: list[int], max_model_len: int, policy: str, bos: int | None
) -> list[int]:
    """The context, cut so that all of the pair but its last token fits the model.

    Args:
        context: ids, at least one.
        continuation: ids, at least one; never cut.
        max_model_len: most tokens that the model reads.
        policy: `truncate_left`, `truncate_right` or `truncate_middle`.
        bos: a token that stays if the context begins with it.

    Raises:
        RowFailure: the continuation alone is too long.
    """
    room = max_model_len + 1 - len(continuation)
    if len(context) <= room:
        return context
    head = context[:1] if context[0] == bos and room > 1 else []
    if room < 1:
        raise RowFailure(
            ErrorClass.CONTEXT_LENGTH,
            f"the continuation alone has {len(continuation)} tokens and the context holds {max_model_len}; "
            "shorten the continuation or raise model.max_model_len",
        )
    rest = context[len(head) :]
    kept: list[int] = cut(rest, len(context) - room, policy)
    return head + kept


def scored_text(ids: list[int], prefix: int) -> list[int]:
    """What of a tokenized text is scored: all but a `prefix` that the tokenizer has put in front of it."""
    return ids[1:] if ids[0] == prefix and len(ids) > 1 else ids


def scored_pair(context: list[int], continuation: list[int]) -> tuple[list[int], Scoring]:
    """What the model reads of a pair, and the tokens that are scored."""
    read = [*context, *continuation[:-1]]
    return read, Scoring(len(context) - 1, tuple(continuation))


def rolling_windows(ids: list[int], prefix: int, max_model_len: int) -> list[tuple[list[int], Scoring]]:
    """A text in windows that fit the model: each of its tokens is scored once.

    The first window begins with `prefix`; each later one begins where its first token has the one before it
    as context, and the last one reaches back so far that it is as long as the model allows.

    Args:
        ids: of the text, at least one.
        prefix: token in front of it, not scored.
        max_model_len: most tokens that the model reads.
    """
    whole = [prefix, *ids]
    windows = []
    for start in range(0, len(ids), max_model_len):
        stop = min(start + max_model_len, len(ids))
        begin = max(0, stop - max_model_len)
        windows.append((whole[begin:stop], Scoring(start - begin, tuple(whole[start + 1 : stop + 1]))))
    return windows
