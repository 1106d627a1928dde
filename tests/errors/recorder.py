"""Notes each error that the product makes: where in its source, and what it says."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from raise_sites import RaiseSite, raise_sites, site_at

from batchgen.types import BatchgenError, RowFailure


@contextmanager
def recording(found: list[tuple[str, str]]) -> Iterator[None]:
    """While the context lasts, append name of the place and sentence of every error made."""
    sites = raise_sites()
    with pytest.MonkeyPatch.context() as patch:
        for kind in (BatchgenError, RowFailure):
            patch.setattr(kind, "__init__", _noting(kind.__init__, sites, found))
        yield


def _noting(original: Any, sites: list[RaiseSite], found: list[tuple[str, str]]) -> Any:
    def init(self: Exception, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        frame = sys._getframe(1)
        while frame.f_code.co_name == "__init__" and frame.f_locals.get("self") is self and frame.f_back:
            frame = frame.f_back
        site = site_at(sites, frame.f_code.co_filename, frame.f_lineno)
        if site is not None:
            found.append((site.name, str(self)))

    return init
