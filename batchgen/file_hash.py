"""SHA-256 of large files, remembered between starts. Called by the fingerprints for weights.

A file is taken to be the same while its path, size, modification time and inode are. A file changed less
than two seconds before it was hashed is not remembered, because one more change could carry the same time.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from batchgen.cache import cache_dir
from batchgen.types import UsageError

SETTLED_SECONDS = 2.0
THREADS = 4


def hash_files(files: Sequence[Path]) -> dict[str, str]:
    """SHA-256 by file name, in hexadecimal.

    Raises:
        UsageError: a file cannot be read.
    """
    with ThreadPoolExecutor(THREADS) as pool:
        return dict(zip((file.name for file in files), pool.map(hash_file, files), strict=True))


def hash_file(file: Path) -> str:
    """SHA-256 of one file, from the cache if it was hashed before and has not changed."""
    try:
        file = file.resolve()
        before = _identity(file)
        known = _recall(before)
        if known is not None:
            return known
        with file.open("rb") as handle:
            digest = hashlib.file_digest(handle, "sha256").hexdigest()
        if _identity(file) == before and time.time_ns() - int(before[2]) > SETTLED_SECONDS * 1e9:
            _remember(before, digest)
        return digest
    except OSError as error:
        raise UsageError(f"model.path: {file} cannot be read ({error.strerror}); check it") from error


def _identity(file: Path) -> list[str]:
    stat = file.stat()
    return [str(file), str(stat.st_size), str(stat.st_mtime_ns), str(stat.st_ino)]


def _entry(identity: list[str]) -> Path:
    name = hashlib.sha256("\0".join(identity).encode(errors="surrogateescape")).hexdigest()
    return cache_dir() / "hashes" / name[:40]


def _recall(identity: list[str]) -> str | None:
    try:
        entry = json.loads(_entry(identity).read_text())
        digest = entry["sha256"] if entry["file"] == identity else None
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return digest if isinstance(digest, str) else None


def _remember(identity: list[str], digest: str) -> None:
    """A cache that cannot be written only costs time."""
    try:
        entry = _entry(identity)
        entry.parent.mkdir(exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=entry.parent)
        with os.fdopen(handle, "w") as file:
            json.dump({"file": identity, "sha256": digest}, file)
        os.replace(temporary, entry)
    except OSError:
        return
