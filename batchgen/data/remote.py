"""Files behind a URL, through fsspec: found, described and read by ranges, with retries.

`find_files` lists and describes them; `open_raw` reads them. Any protocol that fsspec knows will do.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from batchgen.data.urls import protocol, shown_text, shown_url
from batchgen.grammar import counted
from batchgen.types import BatchgenError, InputError, UsageError

T = TypeVar("T")

BLOCK_BYTES = 4 * 1024 * 1024
"""Bytes of one range request: large enough that the time to ask is small beside the time to answer."""
BACKOFF_SECONDS = (0.5, 1.0, 2.0, 4.0)
"""Pauses before the second and each further attempt."""

_PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "http": "aiohttp",
    "https": "aiohttp",
    "hf": "huggingface_hub",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "sftp": "paramiko",
    "ssh": "paramiko",
    "smb": "smbprotocol",
    "webdav": "webdav4",
    "oci": "ocifs",
    "oss": "ossfs",
    "dropbox": "dropboxdrivefs",
}
_VERSIONS = (
    "ETag",
    "etag",
    "blob_id",
    "md5Hash",
    "Content-MD5",
    "content_md5",
    "Last-Modified",
    "LastModified",
    "last_modified",
    "updated",
    "mtime",
    "created",
)
_LASTING = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, NotImplementedError)
_LASTING_NAMES = {
    "NoCredentialsError",
    "PartialCredentialsError",
    "InvalidURL",
    "RepositoryNotFoundError",
    "OfflineModeIsEnabled",
}
_WORTH_A_RETRY = {408, 425, 429}


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file behind a URL.

    Args:
        url: with whatever credentials it carries; never shown.
        shown: what messages and the manifest name it by.
        size: in bytes.
        version: its etag, hash or time stamp, whatever its store offers; None where there is none.
        commit: of the repository that it is read from, on the hub.
    """

    url: str = field(repr=False)
    shown: str
    size: int
    version: str | None
    commit: str | None = None


def open_filesystem(url: str) -> tuple[Any, str]:
    """The fsspec file system of a URL, and the path of the file in it.

    Raises:
        UsageError: the protocol is unknown, its package is not installed, or the URL is not one.
    """
    name = protocol(url)
    if "::" in url:
        raise UsageError(
            f"input.path: {shown_url(url)}: chained URLs are not supported; name the file itself"
        )
    try:
        from fsspec.core import url_to_fs

        return url_to_fs(url, **_options(name))  # type: ignore[no-any-return]
    except ImportError as e:
        package = _PACKAGES.get(name)
        remedy = f"pip install {package}" if package else shown_text(str(e))
        raise UsageError(
            f"input.path: {shown_url(url)}: reading {name}:// needs a package that is not installed; {remedy}"
        ) from e
    except Exception as e:
        raise UsageError(
            f"input.path: {shown_url(url)} cannot be opened: {_reason(e, url)}; check the address"
        ) from e


def _options(name: str) -> dict[str, Any]:
    if name in {"http", "https"}:
        # Offsets are those of the stored bytes, so a server must not compress them on the way.
        return {"client_kwargs": {"headers": {"Accept-Encoding": "identity"}}}
    if name == "hf" and "HF_ENDPOINT" in os.environ:
        return {"endpoint": os.environ["HF_ENDPOINT"]}
    return {}


def find_remote(url: str) -> list[RemoteFile]:
    """The file that `url` names, or all that it matches as a pattern, sorted by name.

    Raises:
        UsageError: a folder, or something that `open_filesystem` refuses.
        InputError: nothing is there, or the store cannot be reached.
    """
    filesystem, path = open_filesystem(url)
    filesystem.invalidate_cache()
    magic = "*[" if protocol(url) in {"http", "https"} else "*?["
    if not any(c in path for c in magic):
        return [_described(url, _info(filesystem, path, url))]
    try:
        return [_described(url, _info(filesystem, path, url))]
    except InputError as e:
        if not isinstance(e.__cause__, FileNotFoundError):
            raise
    found = with_retries(lambda: filesystem.glob(path, detail=True), url)
    urls = {
        _full_url(filesystem, name): info for name, info in found.items() if info.get("type") != "directory"
    }
    if not urls:
        raise InputError(f"input.path: {shown_url(url)} matches no file; check the pattern")
    return [_described(name, info) for name, info in sorted(urls.items())]


def list_folder(url: str) -> list[str]:
    """URLs of every file below a folder, sorted."""
    filesystem, path = open_filesystem(url)
    filesystem.invalidate_cache()
    found = with_retries(lambda: filesystem.find(path), url)
    return sorted(_full_url(filesystem, name) for name in found)


def _full_url(filesystem: Any, name: str) -> str:
    return str(filesystem.unstrip_protocol(name))


def _info(filesystem: Any, path: str, url: str) -> Mapping[str, Any]:
    info: Mapping[str, Any] = with_retries(lambda: filesystem.info(path), url)
    return info


def _described(url: str, info: Mapping[str, Any]) -> RemoteFile:
    shown = shown_url(url)
    if info.get("type") == "directory":
        raise UsageError(
            f"input.path: {shown} is a folder; name files or a pattern such as {shown.rstrip('/')}/*.parquet"
        )
    if info.get("size") is None or info.get("partial") is False:
        raise InputError(
            f"{shown}: the server does not tell the size or does not answer range requests, so a run could "
            "not continue in the middle; download the file and name the copy"
        )
    return RemoteFile(url, shown, int(info["size"]), _version(info))


def _version(info: Mapping[str, Any]) -> str | None:
    lfs = info.get("lfs")
    if lfs is not None:  # the hub's large files
        return str(lfs["sha256"] if isinstance(lfs, Mapping) else lfs.sha256)
    return next((str(info[key]) for key in _VERSIONS if info.get(key) is not None), None)


class RangeReader:
    """Reads byte ranges of a remote file. One reader may be used by one thread at a time."""

    block_bytes = BLOCK_BYTES

    def __init__(self, url: str) -> None:
        self._url = url
        self._filesystem, self._path = open_filesystem(url)
        # The hub's file system reads through a file object, which would fetch more than it is asked for.
        self._options = {"cache_type": "none"} if protocol(url) == "hf" else {}

    def read_at(self, offset: int, size: int) -> bytes:
        """Bytes `offset` to `offset + size`, fewer at the end of the file. Raises InputError."""
        if size <= 0:
            return b""
        data: bytes = with_retries(
            lambda: self._filesystem.cat_file(self._path, start=offset, end=offset + size, **self._options),
            self._url,
        )
        if len(data) > size:
            raise InputError(
                f"{shown_url(self._url)}: the server does not answer range requests, so a run could not "
                "continue in the middle; download the file and name the copy"
            )
        return data

    def close(self) -> None:
        """Nothing is held open between two ranges."""


def with_retries(call: Callable[[], T], url: str) -> T:
    """The result of `call`, tried again where the network or the server may have had a bad moment.

    Raises:
        InputError: it failed for good; names the URL without its credentials.
    """
    for pause in (*BACKOFF_SECONDS, None):
        try:
            return call()
        except BatchgenError:
            raise
        except Exception as error:
            e = _root(error)
            if _is_lasting(e):
                raise InputError(_lasting_message(url, e)) from e
            if pause is None:
                raise InputError(
                    f"{shown_url(url)}: cannot be read, {counted(len(BACKOFF_SECONDS) + 1, 'attempt')} "
                    f"failed, the last with: {_reason(e, url)}; check the network, then run the same command "
                    "again"
                ) from e
            time.sleep(pause)
    raise AssertionError("unreachable")


def _root(error: Exception) -> Exception:
    """What happened, where fsspec calls it a missing file: a refused connection, an answer of 403 or 500."""
    cause = error.__cause__
    if not isinstance(error, FileNotFoundError) or isinstance(cause, FileNotFoundError):
        return error
    if isinstance(cause, OSError) or (isinstance(cause, Exception) and hasattr(cause, "status")):
        return cause
    return error


def _is_lasting(error: Exception) -> bool:
    if isinstance(error, _LASTING) or type(error).__name__ in _LASTING_NAMES:
        return True
    status = getattr(error, "status", None) or getattr(getattr(error, "response", None), "status_code", None)
    return isinstance(status, int) and 400 <= status < 500 and status not in _WORTH_A_RETRY


def _lasting_message(url: str, error: Exception) -> str:
    shown = shown_url(url)
    if isinstance(error, FileNotFoundError):
        return f"input.path: {shown} cannot be read: there is no such file; check the address"
    return f"input.path: {shown} cannot be read: {_reason(error, url)}; check address and credentials"


def _reason(error: Exception, url: str) -> str:
    """One line, without secrets; some exceptions have no text of their own."""
    text = str(error).strip().partition("\n")[0].replace(url, shown_url(url))
    return shown_text(text) or type(error).__name__
