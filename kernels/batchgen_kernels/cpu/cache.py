"""Where compiled kernels are kept between processes. Read by `kernel.py` when it is imported."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import numba

_config: Any = numba.config


def cache_directory() -> Path | None:
    """A writable folder of these very kernel sources, or None where there is none.

    NUMBA_CACHE_DIR, then BATCHGEN_CACHE, then the user's cache folder. Numba notices a change of the
    file that holds a compiled function but not of one that it imports; the digest in the path does.
    """
    if os.environ.get("NUMBA_CACHE_DIR"):
        root = Path(os.environ["NUMBA_CACHE_DIR"])
    elif os.environ.get("BATCHGEN_CACHE"):
        root = Path(os.environ["BATCHGEN_CACHE"]) / "numba"
    else:
        home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
        root = Path(home) / "batchgen" / "numba"
    folder = root / _source_digest()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder if os.access(folder, os.W_OK | os.X_OK) else None


@contextmanager
def numba_cache() -> Iterator[bool]:
    """Point numba's cache at `cache_directory` for the functions decorated inside; False if there is none.

    Of processes that start together one compiles, while the others wait and load what it has made.
    """
    folder, before = cache_directory(), _config.CACHE_DIR
    if folder is None:
        yield False
        return
    with ExitStack() as held:
        # Where there can be no lock, each process compiles for itself.
        with suppress(OSError):
            fcntl.flock(held.enter_context(open(folder / "lock", "a")), fcntl.LOCK_EX)
        _config.CACHE_DIR = str(folder)
        try:
            yield True
        finally:
            _config.CACHE_DIR = before


def _source_digest() -> str:
    digest = hashlib.blake2b(digest_size=8)
    for path in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()
