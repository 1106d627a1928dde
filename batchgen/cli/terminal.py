"""Text that may go to a terminal. Every verb prints what comes from rows, models and files through this."""

from __future__ import annotations

import unicodedata


def safe(text: str) -> str:
    """The text with everything escaped that could steer a terminal: control characters, ANSI, bidi marks."""
    if text.isprintable():
        return text
    return "".join(c if _harmless(c) else c.encode("unicode_escape").decode("ascii") for c in text)


def _harmless(character: str) -> bool:
    return character in "\n\t" or character.isprintable() or unicodedata.category(character) == "Zs"
