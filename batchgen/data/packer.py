"""A msgpack packer that stays: making one takes longer than packing a row."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import msgpack


class RowPacker(threading.local):
    """One for each thread, because a packer holds a buffer. Lone surrogates pass.

    Args:
        default: makes what msgpack can pack of what it cannot; None where that is an error.
    """

    def __init__(self, default: Callable[[Any], Any] | None = None) -> None:
        self.pack: Callable[[Any], bytes] = msgpack.Packer(
            default=default, unicode_errors="surrogatepass"
        ).pack
