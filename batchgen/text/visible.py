"""Text from rows, models and files, made fit to be looked at. Terminal and report show nothing else.

What could steer a terminal, hide or reorder text becomes a visible escape: control characters, ANSI
sequences, bidirectional marks, lone surrogates. Markup is not its business; the report escapes that too.
"""

from __future__ import annotations

import unicodedata


def visible(text: str) -> str:
    """The text with everything escaped that is neither printable nor a line break or tab."""
    if text.isprintable():
        return text
    return "".join(c if _harmless(c) else c.encode("unicode_escape").decode("ascii") for c in text)


def visible_line(text: str, most: int | None = None) -> str:
    """The text on one line: line breaks and tabs are escaped too.

    Args:
        text: any.
        most: characters that are kept; what is cut is an ellipsis.
    """
    if most is not None and len(text) > most:
        text = text[: most - 1] + "…"
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")


def _harmless(character: str) -> bool:
    return character in "\n\t" or character.isprintable() or unicodedata.category(character) == "Zs"
