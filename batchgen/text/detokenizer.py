"""Text of a growing list of token ids, a token at a time.

Used by the stop checker, and only where a job has stop strings; without them a row is decoded once at
its end by `Tokenizer.decode`. At every moment `settled + pending` equals that decode of the ids so far.
"""

from __future__ import annotations

import codecs

from batchgen.text.tokenizer import Tokenizer

# A character of UTF-8 has at most four bytes and a token at least one, so four tokens after a border
# settle what stands before it.
_LONGEST_CHARACTER = 4
_LONG_WINDOW = 32


class IncrementalDetokenizer:
    """Decodes ids as they come.

    Args:
        tokenizer: the model's.

    Attributes:
        pending: text of the last tokens, which a later token may still change: an unfinished
            character reads U+FFFD, and so does a whole run of byte tokens that is no UTF-8.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._byte_of = tokenizer.byte_tokens
        self._ids: list[int] = []
        # Decoding begins one settled stretch early, since the first token of a text loses its space.
        self._context = 0
        self._settled = 0
        self._context_text = ""
        self._run: _ByteRun | None = None
        self.pending = ""

    def append(self, token_id: int) -> str:
        """Take the next id; returns the text that is settled by it."""
        if token_id in self._tokenizer.special_ids or self._tokenizer.token(token_id) is None:
            return ""
        self._ids.append(token_id)
        byte = self._byte_of.get(token_id)
        if byte is not None:
            self.pending = self._in_run(byte)
            return ""
        self._run = None
        self.pending = self._window(len(self._ids))
        if not self._byte_of and self.pending.endswith("\ufffd"):
            return self._settle_part() if len(self._ids) - self._settled > _LONG_WINDOW else ""
        # A stretch without text is no context: decoding would take what follows for the beginning.
        return self._settle(len(self._ids)) if self.pending else ""

    def _in_run(self, byte: int) -> str:
        if self._run is None:
            self._run = _ByteRun(
                plain=self._settled == len(self._ids) - 1 and (self._settled > 0 or byte != 0x20)
            )
        text = self._run.append(byte)
        return text if self._run.plain else self._window(len(self._ids))

    def _window(self, end: int) -> str:
        """Text of the ids from the settled border to `end`."""
        return self._tokenizer.decode(self._ids[self._context : end])[len(self._context_text) :]

    def _settle(self, border: int) -> str:
        text = self._window(border)
        self._context, self._settled = self._settled, border
        self._context_text = self._tokenizer.decode(self._ids[self._context : border])
        self.pending = self.pending[len(text) :]
        return text

    def _settle_part(self) -> str:
        """Settle what no later token can change in a long stretch of bytes that are no UTF-8."""
        latest = len(self._ids) - _LONGEST_CHARACTER
        for border in range(latest, latest - _LONGEST_CHARACTER, -1):
            after = self._tokenizer.decode(self._ids[border:])
            if self._window(border) + after == self.pending:
                return self._settle(border)
        return ""


class _ByteRun:
    """Consecutive byte tokens, decoded in time that does not grow with their number.

    Args:
        plain: whether `append` gives what the decoder gives: not where it strips a leading space.
    """

    def __init__(self, *, plain: bool) -> None:
        self.plain = plain
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._text = ""
        self._length = 0
        self._broken = False

    def append(self, byte: int) -> str:
        """Text of the run so far: one U+FFFD a byte unless the whole is UTF-8, as the decoder has it."""
        self._length += 1
        try:
            self._text += "" if self._broken else self._decoder.decode(bytes([byte]))
        except UnicodeDecodeError:
            self._broken = True
        unfinished = self._broken or self._decoder.getstate()[0]
        return "\ufffd" * self._length if unfinished else self._text
