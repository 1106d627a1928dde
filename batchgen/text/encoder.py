"""Rendered prompts to token ids: one batched call, escaped control tokens, at most one BOS.

Used by the prompt renderer, which makes the drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from batchgen.text.content import Content
from batchgen.text.control_tokens import ControlTokens, marked
from batchgen.text.tokenizer import Tokenizer
from batchgen.types import ErrorClass, RowError, UsageError


@dataclass(slots=True)
class Draft:
    """A row on its way from text to ids.

    Args:
        text: the rendered prompt; None where the row brought ids.
        token_ids: filled by the encoder, or brought by the row.
        marker: set if control tokens in the text that came from the row are marked with it.
        control_tokens: how many control tokens the row's own text spells.
        truncated_tokens: how many were cut to make the prompt fit.
        content: what the text was made of.
        continuation: the text that is scored after the prompt, marked as the prompt is.
        continuation_ids: filled by the encoder, or brought by the row.
        error: set if the tokenizer refused the text.
    """

    text: str | None = None
    token_ids: list[int] | None = None
    marker: str | None = None
    control_tokens: int = 0
    truncated_tokens: int = 0
    content: Content | None = None
    continuation: str | None = None
    continuation_ids: list[int] | None = None
    error: RowError | None = None

    @property
    def shown_text(self) -> str | None:
        """The prompt as a person reads it."""
        return self.text.replace(self.marker, "") if self.text and self.marker else self.text


class PromptEncoder:
    """Tokenizes drafts.

    Args:
        tokenizer: the model's.
        control: its control tokens.
        plain_text: whether prompts are plain text, which gets the tokenizer's own BOS; a chat
            template writes one itself, or means to have none.
        whole: whether a plain text is all there is, so that it gets what the tokenizer puts at the end, too.
    """

    def __init__(
        self, tokenizer: Tokenizer, control: ControlTokens, *, plain_text: bool, whole: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._control = control
        self._plain_text = plain_text
        self._prefix = list(tokenizer.prefix_ids) if plain_text else []
        self._suffix = list(tokenizer.suffix_ids) if plain_text and whole else []

    def encode(self, drafts: Sequence[Draft]) -> None:
        """Fill in the ids of every draft with a text, and of its continuation, or its error."""
        self._encode_texts(drafts)
        pairs = [draft for draft in drafts if draft.continuation is not None and draft.error is None]
        wholes = [self._whole(draft) for draft in pairs]
        self._encode_texts(wholes)
        for draft, whole in zip(pairs, wholes, strict=True):
            draft.error = whole.error
            known = len(draft.token_ids or ()) if draft.text else len(self._prefix)
            draft.continuation_ids = (whole.token_ids or [])[known:]
            # The tokenizer's own BOS alone is no context; what stands for one is found by the renderer.
            draft.token_ids = draft.token_ids if draft.text else []

    def _whole(self, draft: Draft) -> Draft:
        """Context and continuation as one text."""
        context, continuation = draft.text or "", draft.continuation or ""
        return Draft(context + continuation, marker=draft.marker)

    def _encode_texts(self, drafts: Sequence[Draft]) -> None:
        with_text = [draft for draft in drafts if draft.text is not None]
        self._fill([draft for draft in with_text if draft.marker is None], self._encode_plain)
        self._fill([draft for draft in with_text if draft.marker is not None], self._encode_marked)

    def _fill(self, drafts: Sequence[Draft], encode: Callable[[Sequence[Draft]], list[list[int]]]) -> None:
        if not drafts:
            return
        try:
            for draft, ids in zip(drafts, encode(drafts), strict=True):
                draft.token_ids = self._with_bos(ids)
        except Exception as error:
            if len(drafts) == 1:
                drafts[0].error = _refusal(error)
                return
            for draft in drafts:
                self._fill([draft], encode)

    def _encode_plain(self, drafts: Sequence[Draft]) -> list[list[int]]:
        return self._tokenizer.encode_batch([draft.text or "" for draft in drafts])

    def _encode_marked(self, drafts: Sequence[Draft]) -> list[list[int]]:
        pairs = [(draft.text or "", draft.marker or "") for draft in drafts]
        return self._control.encode_marked([(self._with_own_bos(*pair), pair[1]) for pair in pairs])

    def _with_own_bos(self, text: str, marker: str) -> str:
        """Where we would add a BOS anyway, one that the text begins with is that one, not content."""
        spelling = self._tokenizer.token(self._prefix[0]) if self._prefix else None
        if spelling is None or not text.startswith(marked(spelling, marker)):
            return text
        return spelling + text.removeprefix(marked(spelling, marker))

    def _with_bos(self, ids: list[int]) -> list[int]:
        return (ids if ids[:1] == self._prefix[:1] else self._prefix + ids) + self._suffix


def _refusal(error: Exception) -> RowError:
    if isinstance(error, UsageError):
        return RowError(ErrorClass.INVALID_PARAM, str(error))
    return RowError(
        ErrorClass.INTERNAL,
        f"the tokenizer refused the prompt: {type(error).__name__}: {error}; correct the row, or give "
        "another tokenizer in model.tokenizer",
    )
