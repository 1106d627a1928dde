"""An output folder in an object store, seen as names and bytes. `mirror.py` and `remote.py` work on it.

Any file system that fsspec knows. What must not be overwritten is written with `create`, which S3 and GCS
answer atomically.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

from batchgen.cache import cache_dir
from batchgen.data.urls import protocol, shown_text, shown_url
from batchgen.grammar import counted
from batchgen.types import BatchgenError, StorageError, UsageError

_SAID = 300
PROTOCOLS = {"s3": "s3fs", "s3a": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}
"""Stores in which a name can be created by one writer only, and the package that reaches each."""


def working_copy(url: str) -> Path:
    """Where this machine keeps its copy of an output folder in an object store."""
    key = blake2b(url.rstrip("/").encode(), digest_size=10).hexdigest()
    return cache_dir() / "remote" / key


class ObjectStore:
    """Objects under one prefix.

    Args:
        url: of the prefix, such as `s3://bucket/results`.

    Raises:
        UsageError: the protocol is unknown, or its package is not installed.
    """

    def __init__(self, url: str) -> None:
        import fsspec

        self.url = shown_url(url.rstrip("/"))
        name = protocol(url)
        if name not in PROTOCOLS:
            raise UsageError(
                f"output.path: {self.url}: results cannot be written to {name}://; use a local folder or one "
                f"of {', '.join(f'{known}://' for known in PROTOCOLS)}"
            )
        try:
            # Listings must be those of this moment: another run may be writing.
            self._fs: Any = fsspec.filesystem(name, use_listings_cache=False)
        except ImportError as error:
            raise UsageError(
                f"output.path: {self.url}: {name}:// needs a package that is not installed; "
                f"pip install {PROTOCOLS[name]}"
            ) from error
        self._root = str(self._fs._strip_protocol(url)).rstrip("/")

    def sizes(self, below: str = "") -> dict[str, int]:
        """Names and sizes of all objects whose name begins with `below`, a folder or nothing."""
        with self._errors(below, "listed"):
            place = f"{self._root}/{below}".rstrip("/")
            self._fs.invalidate_cache()
            found = self._fs.find(place, detail=True)
        cut = len(self._root) + 1
        return {str(name)[cut:]: int(info["size"]) for name, info in found.items()}

    def read(self, name: str) -> bytes | None:
        """An object's bytes; None where there is none."""
        with self._errors(name, "read"):
            try:
                return bytes(self._fs.cat_file(f"{self._root}/{name}"))
            except FileNotFoundError:
                return None

    def fetch(self, name: str, path: Path) -> None:
        """Copy an object to a local file."""
        with self._errors(name, "read"):
            self._fs.get_file(f"{self._root}/{name}", str(path))

    def write(self, name: str, data: bytes) -> None:
        """Write an object, whatever was there."""
        with self._errors(name, "written", len(data)):
            self._fs.pipe_file(f"{self._root}/{name}", data)

    def create(self, name: str, data: bytes) -> bool:
        """Write an object that nobody has written yet; False where somebody has."""
        with self._errors(name, "written", len(data)):
            try:
                self._fs.pipe_file(f"{self._root}/{name}", data, mode="create")
            except FileExistsError:
                return False
        return True

    def upload(self, name: str, path: Path, *, new: bool) -> bool:
        """Copy a local file to an object; `new`: only where there is none. Returns whether it was written."""
        with self._errors(name, "written", path.stat().st_size):
            try:
                mode = "create" if new else "overwrite"
                self._fs.put_file(str(path), f"{self._root}/{name}", mode=mode)
            except FileExistsError:
                return False
        return True

    def delete(self, names: list[str]) -> None:
        """Remove objects; those that are gone already do not matter."""
        if not names:
            return
        with self._errors(names[0], "removed"), contextlib.suppress(FileNotFoundError):
            self._fs.rm([f"{self._root}/{name}" for name in names])

    @contextlib.contextmanager
    def _errors(self, name: str, action: str, needed: int = 0) -> Iterator[None]:
        """Whatever a store's client raises, as one sentence."""
        try:
            yield
        except BatchgenError:
            raise
        except Exception as error:
            reason = shown_text(" ".join(str(error).split()))[:_SAID] or type(error).__name__
            size = f" ({counted(needed, 'byte')})" if needed else ""
            raise StorageError(
                f"{self.url}/{name}: cannot be {action}{size}: {reason}; check the address, the network and "
                "the credentials in the environment, then run the same command again (finished rows are kept)"
            ) from error
