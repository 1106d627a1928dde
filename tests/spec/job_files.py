"""Job files that several tests begin with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

Write = Callable[[str], Path]
SMALLEST = "model: org/name\ninput: prompts.jsonl\noutput: out/\n"
