"""Which rows of the input a run is about: a range of ordinals, and at most so many of those that `where` lets
through. Parts are fixed ranges of ordinals; each knows the stretch of them for which it was decided, so that
a larger selection later finds the parts that must grow, and a smaller one is refused.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

_ROWS = re.compile(r"(\d{1,18})?:(\d{1,18})?")
Span = tuple[int, int]
"""First ordinal and the one after the last."""


@dataclass(frozen=True, slots=True)
class Selection:
    """A selection.

    Args:
        first: ordinal of the first row.
        stop: ordinal after the last; None for the end of the input.
        limit: most rows, counted after `where`; None for all.
    """

    first: int = 0
    stop: int | None = None
    limit: int | None = None

    @classmethod
    def of(cls, rows: str | None, limit: int | None) -> Self:
        """From `input.rows` and `input.limit`. Raises ValueError for what is no range."""
        if rows is None:
            return cls(limit=limit)
        match = _ROWS.fullmatch(rows)
        if match is None or match[0] == ":":
            raise ValueError("not a range of rows")
        first, stop = int(match[1] or 0), None if match[2] is None else int(match[2])
        if stop is not None and stop <= first:
            raise ValueError("an empty range of rows")
        return cls(first, stop, limit)

    @property
    def rows(self) -> str:
        """The range as `input.rows` has it."""
        return f"{self.first}:{'' if self.stop is None else self.stop}"

    def up_to(self, end: int) -> Self:
        """The same of an input that ends after `end` rows."""
        return replace(self, stop=end if self.stop is None else min(self.stop, end))

    def span(self, part: int, part_rows: int) -> Span:
        """The ordinals of a part that are in the range; empty if the second is not above the first."""
        first, stop = part * part_rows, (part + 1) * part_rows
        return max(first, self.first), stop if self.stop is None else min(stop, self.stop)

    def most_rows(self, end: int | None) -> int | None:
        """Rows of the selection where every row is let through.

        Args:
            end: rows of the input; None if unknown.
        """
        stops = [stop for stop in (self.stop, end) if stop is not None]
        in_range = [max(0, stop - self.first) for stop in stops]
        return min([*in_range, *([] if self.limit is None else [self.limit])], default=None)

    def may_hold(self, ordinal: int, *, has_where: bool) -> bool:
        """Whether a row can be in it; a limit is counted only where every row is let through.

        A journal may know more rows than are asked for now, from an attempt with a larger selection.
        """
        most = None if has_where else self.limit
        return (
            self.first <= ordinal
            and (self.stop is None or ordinal < self.stop)
            and (most is None or ordinal < self.first + most)
        )

    def is_complete(self, success: Mapping[str, Any]) -> bool:
        """Whether a folder whose `_SUCCESS` says this holds exactly this selection."""
        rows, first, stop = success["rows"], success["first"], success["stop"]
        if first != self.first or (self.limit is not None and self.limit < rows):
            return False
        if self.limit == rows:
            return self.stop is None or self.stop >= stop
        return self.stop == stop or (
            bool(success["whole_input"]) and (self.stop is None or self.stop >= stop)
        )
