"""Keep control tokens that a row's own text spells out from becoming control tokens.

A model's turn markers are ordinary characters in a text, so a web page that quotes `<|im_end|>`
would end the user's turn. `ControlTokens` finds such spellings in what comes from a row, marks them
while templates put the prompt together, and encodes the result so that only what the job and the
chat template wrote becomes a control id. Used by the prompt renderer.

How: a marked spelling carries an invisible marker inside, so it survives templates as text and
matches no token. Then every spelling *without* a marker was written by a template and is renamed to
something no text contains; the markers go; and a copy of the tokenizer that knows the control
tokens only by these names encodes the text in one piece. So the rest of the text is tokenized as if
the spelling were any other characters, with the tokenizer's own treatment of spaces at the borders.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any

from batchgen.text.tokenizer import Tokenizer, encode_groups
from batchgen.types import ErrorClass, RowFailure, UsageError

# Noncharacters first (no text should hold one; two more delimit `_names`), then a private plane.
_MARKERS = (range(0xFDD2, 0xFDF0), range(0xF0000, 0xFFFFE))


class ControlTokens:
    """The special tokens of one tokenizer, found in text and told apart by who wrote them."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # One character has no inside for a marker, so a token of one is left as it is.
        spellings = [s for s in tokenizer.special_tokens if len(s) > 1]
        self._pattern = _any_of(spellings)
        self._any_special = _any_of(tokenizer.special_tokens)
        self._beginnings = frozenset(s[:n] for s in spellings for n in range(1, len(s)))
        self._endings = frozenset(s[-n:] for s in spellings for n in range(1, len(s)))
        self._longest = max(map(len, spellings), default=0)
        # Most texts begin and end with none of these characters, which settles it.
        self._last_of_beginnings = frozenset(s[-1] for s in self._beginnings)
        self._first_of_endings = frozenset(s[0] for s in self._endings)

    def find(self, value: Any) -> list[str]:
        """Every control token spelled in the strings of a value, nested ones included."""
        return [spelling for text in strings_in(value) for spelling in self._pattern.findall(text)]

    def touches(self, value: Any) -> bool:
        """Whether a string of the value spells a control token, or could at a border with other text."""
        return any(self._risky(text) for text in strings_in(value))

    def _risky(self, text: str) -> bool:
        return bool(self._pattern.search(text)) or self._opens(text) or self._closes(text)

    def _opens(self, text: str) -> bool:
        if text[-1:] not in self._last_of_beginnings:
            return False
        return any(text[-n:] in self._beginnings for n in range(1, self._longest))

    def _closes(self, text: str) -> bool:
        if text[:1] not in self._first_of_endings:
            return False
        return any(text[:n] in self._endings for n in range(1, self._longest))

    def marker_for(self, value: Any) -> str:
        """A character that no string of the value holds."""
        used = {character for text in strings_in(value) for character in text}
        for codes in _MARKERS:
            for code in codes:
                if chr(code) not in used:
                    return chr(code)
        raise RowFailure(
            ErrorClass.INVALID_PARAM,
            "the row spells a control token and holds every private-use character, so the token cannot be "
            "escaped; remove one, or set prompt.special_tokens_in_content: allow",
        )

    def mark(self, value: Any, marker: str) -> Any:
        """A copy of the value with a marker inside every control token that its strings spell."""
        if isinstance(value, str):
            return self._mark_text(value, marker)
        if isinstance(value, dict):
            return {self.mark(key, marker): self.mark(item, marker) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(item, marker) for item in value]
        return value

    def _mark_text(self, text: str, marker: str) -> str:
        opens, closes = self._opens(text), self._closes(text)
        # Again until none is left: marking one of two overlapping spellings leaves the other.
        while self._pattern.search(text):
            text = self._pattern.sub(lambda match: marked(match[0], marker), text)
        return (marker if closes else "") + text + (marker if opens else "")

    def encode_marked(self, texts: Sequence[tuple[str, str]]) -> list[list[int]]:
        """Ids of (text, its marker) pairs: marked spellings as plain text, all others as control ids."""
        names = self._names
        renamed = [
            _without(self._any_special.sub(lambda match: names[match[0]], text), marker)
            for text, marker in texts
        ]
        return encode_groups(self._renamed_backend, renamed)

    @cached_property
    def _names(self) -> dict[str, str]:
        # Random, so that no row can spell one.
        nonce = secrets.token_hex(8)
        return {
            s: f"\ufdd0{nonce}.{token_id}\ufdd1" for s, token_id in self._tokenizer.special_tokens.items()
        }

    @cached_property
    def _renamed_backend(self) -> Any:
        backend = self._tokenizer.backend
        settings = json.loads(backend.to_str())
        _rename(settings, self._names)
        copy = type(backend).from_str(json.dumps(settings))
        for spelling, token_id in self._tokenizer.special_tokens.items():
            if copy.token_to_id(self._names[spelling]) != token_id:
                raise UsageError(
                    f"prompt.special_tokens_in_content: this tokenizer cannot escape {spelling!r}; "
                    "use error or allow"
                )
        return copy


def marked(spelling: str, marker: str) -> str:
    """A spelling with the marker inside."""
    return spelling[0] + marker + spelling[1:]


def _without(text: str, marker: str) -> str:
    """Without the marker, also where a template wrote it in JSON's ASCII."""
    return text.replace(marker, "").replace(json.dumps(marker)[1:-1], "")


def strings_in(value: Any) -> list[str]:
    """All strings in a value, keys of dicts included."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for pair in value.items() for item in pair for text in strings_in(item)]
    if isinstance(value, list | tuple):
        return [text for item in value for text in strings_in(item)]
    return []


def _any_of(spellings: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(spellings, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or "(?!)")


def _rename(settings: dict[str, Any], names: dict[str, str]) -> None:
    """Rename tokens in a serialised tokenizer; ids stay, since they follow the order."""
    settings["post_processor"] = None
    for token in settings["added_tokens"]:
        if token["special"]:
            token.update(content=names[token["content"]], normalized=False)
    model = settings["model"]
    # In the model's vocabulary too: a unigram model would pick `</s>` as a piece of plain text.
    if isinstance(model["vocab"], dict):
        model["vocab"] = {names.get(piece, piece): token_id for piece, token_id in model["vocab"].items()}
    else:
        model["vocab"] = [[names.get(piece, piece), score] for piece, score in model["vocab"]]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
