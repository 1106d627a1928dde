"""Where batchgen keeps what can be made again: converted models, hashes of weight files, compiled kernels.

Called by whatever caches. Standard library only, so that every process may import it. A cache that cannot be
read or written only costs time.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

MOST_ENTRIES = 256
"""Of each kind of small things that are remembered; the longest unused go first."""


def cache_dir() -> Path:
    """The cache folder, made if missing.

    `$BATCHGEN_CACHE`, else `batchgen` in `$XDG_CACHE_HOME` or in `~/.cache`.

    Raises:
        OSError: the folder cannot be made.
    """
    given = os.environ.get("BATCHGEN_CACHE")
    if given:
        folder = Path(given).expanduser()
    else:
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "batchgen"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def key_of(parts: Iterable[str | bytes]) -> str:
    """A name that stands for all of them, in this order: 40 hexadecimal digits."""
    digest = hashlib.sha256()
    for part in parts:
        content = part.encode(errors="surrogateescape") if isinstance(part, str) else part
        digest.update(len(content).to_bytes(8, "little") + content)
    return digest.hexdigest()[:40]


def recall(kind: str, key: str) -> bytes | None:
    """What was kept under `key`; None if nothing was, or it was removed or damaged."""
    try:
        entry = cache_dir() / kind / key
        content = entry.read_bytes()
        checked, content = content[:32], content[32:]
        if hashlib.sha256(key.encode() + content).digest() != checked:
            return None
        with suppress(OSError):
            os.utime(entry)
        return content
    except OSError:
        return None


def keep(kind: str, key: str, content: bytes) -> None:
    """Remember `content` under `key`, and forget what nobody has asked for in the longest time."""
    with suppress(OSError):
        folder = cache_dir() / kind
        folder.mkdir(exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=folder)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(key.encode() + content).digest() + content)
            os.replace(temporary, folder / key)
        except BaseException:
            os.unlink(temporary)
            raise
        entries = sorted(folder.iterdir(), key=_last_use, reverse=True)
        for entry in entries[MOST_ENTRIES:]:
            entry.unlink(missing_ok=True)


def _last_use(entry: Path) -> float:
    try:
        return entry.stat().st_mtime
    except OSError:
        return 0.0
