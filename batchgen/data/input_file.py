"""From the paths in the job file (one, a list, globs) to local files of a known format. For `open_input`."""

from __future__ import annotations

import glob
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath

from batchgen.types import InputError, UsageError

SUPPORTED = "batchgen reads JSONL (plain, .gz, .zst) and Parquet for now"

_SNIFF_BYTES = 4096
_COMPRESSIONS = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
_ZSTD_SKIPPABLE = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18")
_COMPRESSED_SUFFIXES = {".gz": "gzip", ".gzip": "gzip", ".zst": "zstd", ".zstd": "zstd"}
_REFUSED_MAGIC = {
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"PK\x03\x04": "zip",
    b"PARE": "encrypted Parquet",
    b"ARROW1": "Arrow IPC",
    b"Obj\x01": "Avro",
    b"ORC": "ORC",
    b"SQLite format 3": "SQLite",
    b"\xff\xfe": "UTF-16 text",
    b"\xfe\xff": "UTF-16 text",
}
_PARQUET_SUFFIXES = {".parquet", ".pq", ".parq"}
_JSONL_SUFFIXES = {".jsonl", ".ndjson", ".jsonlines"}
_REFUSED_FORMATS = {"json", "csv", "openai_batch"}


@dataclass(frozen=True, slots=True)
class InputFile:
    """One file of the ordered list.

    Args:
        index: its place in the list.
        path: as given in the job, or as the glob found it.
        name: base name; always valid UTF-8.
        format: "jsonl" or "parquet".
        compression: of the text: "none", "gzip" or "zstd"; "none" for Parquet.
        size, mtime_ns: from stat, when opened.
    """

    index: int
    path: str
    name: str
    format: str
    compression: str
    size: int
    mtime_ns: int


def find_files(paths: str | Sequence[str], format: str = "auto") -> tuple[InputFile, ...]:
    """The ordered list of input files: as given, each glob sorted by name.

    Raises:
        UsageError: a format, scheme or kind of file that is not supported; a file twice; formats mixed.
        InputError: a file is missing or unreadable, or a glob matches nothing.
    """
    _check_format(format)
    given = [paths] if isinstance(paths, str) else list(paths)
    resolved = [path for item in given for path in _resolve(item)]
    if not resolved:
        raise UsageError("input.path: the list is empty; name at least one file")
    seen: set[str] = set()
    for path in resolved:
        real = os.path.realpath(path)
        if real in seen:
            raise UsageError(f"input.path: {path} is listed twice; list each file once")
        seen.add(real)
    files = tuple(_describe(index, path, format) for index, path in enumerate(resolved))
    other = next((f for f in files if f.format != files[0].format), None)
    if other is not None:
        raise UsageError(
            f"input.path: {files[0].path} is {files[0].format} and {other.path} is {other.format}; "
            "mixed formats are not supported for now, convert one of them"
        )
    return files


def _check_format(format: str) -> None:
    if format in _REFUSED_FORMATS:
        raise UsageError(f"input.format: {format} is not supported; {SUPPORTED}")
    if format not in {"auto", "jsonl", "parquet"}:
        raise UsageError(f"input.format: {format!r} is not a format; use auto, jsonl or parquet")


def _resolve(item: str) -> list[str]:
    if "://" in item:
        raise UsageError(f"input.path: {item} is not a local file; {SUPPORTED}, from local files")
    if os.path.lexists(item) or not glob.has_magic(item):
        return [item]
    found = sorted(path for path in glob.glob(item, recursive=True) if not os.path.isdir(path))
    if not found:
        raise InputError(f"input.path: {item} matches no file")
    return found


def _describe(index: int, path: str, format: str) -> InputFile:
    try:
        info = os.stat(path)
        if stat.S_ISDIR(info.st_mode):
            raise UsageError(f"input.path: {path} is a folder; name files or a glob such as {path}/*.jsonl")
        if not stat.S_ISREG(info.st_mode):
            raise UsageError(
                f"input.path: {path} is not a regular file and could not be read again on resume"
            )
        with open(path, "rb") as file:
            head = file.read(_SNIFF_BYTES)
    except OSError as e:
        raise InputError(f"input.path: {path} cannot be read: {e.strerror}") from e
    found, compression = _sniff(path, head, format)
    name = os.fsencode(os.path.basename(path)).decode(errors="replace")
    return InputFile(index, path, name, found, compression, info.st_size, info.st_mtime_ns)


def _sniff(path: str, head: bytes, format: str) -> tuple[str, str]:
    """Format and compression, by magic bytes first, then by extension, then by the first character."""
    for magic, kind in _REFUSED_MAGIC.items():
        if head.startswith(magic):
            raise UsageError(f"input.path: {path} is {kind}; {SUPPORTED}")
    if head.startswith(b"PAR1"):
        if format == "jsonl":
            raise UsageError(f"input.format: {path} is Parquet, not jsonl; set it to auto")
        return "parquet", "none"
    suffix, compression = _text_compression(path, head)
    if format != "auto":
        return format, compression if format == "jsonl" else "none"
    if suffix in _PARQUET_SUFFIXES:
        return "parquet", "none"
    opens_object = head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{")
    if suffix in _JSONL_SUFFIXES or (suffix not in {".json", ".csv", ".tsv"} and opens_object):
        return "jsonl", compression
    raise UsageError(
        f"input.path: {path} is neither known JSONL nor Parquet; {SUPPORTED}; "
        "if it holds one JSON object per line, set input.format: jsonl"
    )


def _text_compression(path: str, head: bytes) -> tuple[str, str]:
    """The extension below that of the compression, and the compression."""
    pure = PurePath(path)
    by_suffix = _COMPRESSED_SUFFIXES.get(pure.suffix.lower())
    suffix = (pure.with_suffix("") if by_suffix else pure).suffix.lower()
    for magic, compression in _COMPRESSIONS.items():
        if head.startswith(magic):
            return suffix, compression
    if _ZSTD_SKIPPABLE.match(head):
        return suffix, "zstd"
    # A .gz file of plain text is common (clients that decompress on the way); an empty one is a cut one.
    if by_suffix and not head.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{"):
        return suffix, by_suffix
    return suffix, "none"
