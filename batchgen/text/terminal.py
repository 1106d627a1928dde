"""Text that may go to a terminal. Every verb prints what comes from rows, models and files through this."""

from __future__ import annotations

from batchgen.text.visible import visible, visible_line


def safe(text: str) -> str:
    """The text with everything escaped that could steer a terminal; line breaks stay."""
    return visible(text)


def safe_line(text: str) -> str:
    """The same on one line, so that nothing in it can pass for a line of ours."""
    return visible_line(text)
