"""From the paths in the job file (one, a list, patterns, URLs) to files of a known format.

`open_input` calls `find_files`.
"""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

from batchgen.data.urls import is_url, local_path, protocol, shown_url
from batchgen.types import InputError, UsageError

if TYPE_CHECKING:
    from batchgen.data.remote import RemoteFile

FORMATS = ("auto", "parquet", "jsonl", "json", "csv", "openai_batch")
TEXT_FORMATS = ("jsonl", "json", "csv")
"""Files of these may stand side by side in one job."""

Ignore = Callable[[str], bool]
"""Whether a local file is one that the job itself writes."""

_PARALLEL_REQUESTS = 16


def _ignore_none(path: str) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file of the ordered list.

    Args:
        index: its place in the list.
        path: as given in the job, or as the pattern found it; a URL without its credentials.
        name: base name; always valid UTF-8.
        format: "parquet", "arrow", "jsonl", "json", "csv" or "openai_batch".
        compression: of the text: "none", "gzip", "bzip2" or "zstd"; "none" for Parquet and Arrow.
        size: in bytes, when the job looked at it.
        mtime_ns: from stat; 0 for a remote file.
        url: of a remote file, with its credentials.
        version: of a remote file: etag, hash or time stamp, whatever its store tells.
        commit: of the hub's repository that it is read from.
    """

    index: int
    path: str
    name: str
    format: str
    compression: str
    size: int
    mtime_ns: int
    url: str | None = field(default=None, repr=False)
    version: str | None = None
    commit: str | None = None


def find_files(
    paths: str | Sequence[str], format: str = "auto", ignore: Ignore = _ignore_none
) -> tuple[InputFile, ...]:
    """The ordered list of input files: as given, each pattern sorted by name.

    Args:
        paths, format: as `open_input` takes them; at least one path.
        ignore: local files that patterns pass over, and that may not be named.

    Raises:
        UsageError: a format, protocol or kind of file that is not supported; a file twice; formats that
            cannot be mixed.
        InputError: a file is missing or unreadable, or a pattern matches nothing.
    """
    if format not in FORMATS:
        raise ValueError(f"{format!r} is not a format; there are {', '.join(FORMATS)}")
    given = [paths] if isinstance(paths, str) else list(paths)
    found = [file for item in given for file in _resolve(item, ignore)]
    _refuse_twice(found)
    numbered = [replace(file, index=index) for index, file in enumerate(found)]
    files = tuple(_sniffed(numbered, format))
    _refuse_mixture(files)
    return files


def _resolve(item: str, ignore: Ignore) -> list[InputFile]:
    """The files of one entry, of a format not known yet."""
    if not is_url(item):
        return _resolve_local(item, ignore)
    path = local_path(item)
    if path is not None:
        return _resolve_local(path, ignore)
    if protocol(item) == "hf":
        from batchgen.data.hub import find_on_hub

        remote = find_on_hub(item)
    else:
        from batchgen.data.remote import find_remote

        remote = find_remote(item)
    return [_remote(file) for file in remote]


def _remote(file: RemoteFile) -> InputFile:
    name = _url_name(file.shown)
    return InputFile(0, file.shown, name, "", "none", file.size, 0, file.url, file.version, file.commit)


def _url_name(url: str) -> str:
    path = url.partition("://")[2] if protocol(url) == "hf" else unquote(urlsplit(url).path)
    return PurePosixPath(path).name or shown_url(url)


def _resolve_local(item: str, ignore: Ignore) -> list[InputFile]:
    if os.path.lexists(item) or not glob.has_magic(item):
        if os.path.isdir(item):
            from batchgen.data.saved_dataset import saved_files

            return [_local(path) for path in saved_files(item)]
        if ignore(item):
            raise UsageError(
                f"input.path: {item} lies where this job writes its results; choose another output.path"
            )
        return [_local(item)]
    matches = (path for path in glob.glob(item, recursive=True) if not os.path.isdir(path))
    found = sorted(path for path in matches if not ignore(path))
    if not found:
        raise InputError(f"input.path: {item} matches no file; check the pattern")
    return [_local(path) for path in found]


def _local(path: str) -> InputFile:
    try:
        info = os.stat(path)
    except OSError as e:
        raise InputError(f"input.path: {path} cannot be read: {e.strerror}; check the path") from e
    if not stat.S_ISREG(info.st_mode):
        raise UsageError(
            f"input.path: {path} is not a regular file and could not be read again on resume; "
            "copy it to a file"
        )
    name = os.fsencode(os.path.basename(path)).decode(errors="replace")
    return InputFile(0, path, name, "", "none", info.st_size, info.st_mtime_ns)


def _sniffed(files: Sequence[InputFile], format: str) -> Iterable[InputFile]:
    from batchgen.data.sniff import sniff

    if all(file.url is None for file in files):
        return [sniff(file, format) for file in files]
    with ThreadPoolExecutor(_PARALLEL_REQUESTS) as pool:
        return list(pool.map(lambda file: sniff(file, format), files))


def _refuse_twice(files: Iterable[InputFile]) -> None:
    seen: set[str] = set()
    for file in files:
        real = os.path.realpath(file.path) if file.url is None else file.path
        if real in seen:
            raise UsageError(f"input.path: {file.path} is listed twice; list each file once")
        seen.add(real)


def _refuse_mixture(files: Sequence[InputFile]) -> None:
    first = files[0]
    for file in files:
        if file.format != first.format and not {file.format, first.format} <= set(TEXT_FORMATS):
            raise UsageError(
                f"input.path: {first.path} is {first.format} and {file.path} is {file.format}; "
                f"only {', '.join(TEXT_FORMATS)} can be mixed, convert one of them"
            )
