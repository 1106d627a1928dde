"""Notes each error that the product makes: where in its source, and what it says."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
from raise_sites import RaiseSite, raise_sites, site_at

from batchgen.types import BatchgenError, RowFailure


class Noted(NamedTuple):
    """The name of a place, what was said there, and `exit 2` or the class of a row's error."""

    name: str
    sentence: str
    kind: str


@contextmanager
def recording(found: list[Noted]) -> Iterator[None]:
    """While the context lasts, append a note of every error made."""
    sites = raise_sites()
    with pytest.MonkeyPatch.context() as patch:
        for kind in (BatchgenError, RowFailure):
            patch.setattr(kind, "__init__", _noting(kind.__init__, sites, found))
        yield


def _noting(original: Any, sites: list[RaiseSite], found: list[Noted]) -> Any:
    def init(self: Exception, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        frame = sys._getframe(1)
        while frame.f_code.co_name == "__init__" and frame.f_locals.get("self") is self and frame.f_back:
            frame = frame.f_back
        site = site_at(sites, frame.f_code.co_filename, frame.f_lineno)
        if site is not None:
            found.append(Noted(site.name, str(self), _kind(self)))

    return init


def _kind(error: Exception) -> str:
    if isinstance(error, RowFailure):
        return f"row, {error.error.error_class}"
    return f"exit {error.exit_code}" if isinstance(error, BatchgenError) else ""
