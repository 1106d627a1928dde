"""What a file holds: by magic bytes first, then by its extension, then by what its text begins with.

For `find_files`. What is refused says what it is and what to do.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import PurePath

from batchgen.data.byte_stream import TruncatedStream, open_stream
from batchgen.data.input_file import InputFile
from batchgen.data.line_reader import BLANK
from batchgen.data.openai_batch import looks_like_batch
from batchgen.data.raw_file import open_raw
from batchgen.types import InputError, UsageError

SUPPORTED = "batchgen reads Parquet, Arrow, JSONL, JSON arrays, CSV and OpenAI batch files"

_HEAD_BYTES = 4096
_COMPRESSIONS = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\x28\xb5\x2f\xfd": "zstd"}
_ZSTD_SKIPPABLE = re.compile(rb"[\x50-\x5f]\x2a\x4d\x18")
_COMPRESSED_SUFFIXES = {
    ".gz": "gzip",
    ".gzip": "gzip",
    ".bz2": "bzip2",
    ".zst": "zstd",
    ".zstd": "zstd",
}
_REFUSED_MAGIC = {
    b"\xfd7zXZ\x00": "xz (decompress it, or compress it again with zstd)",
    b"PK\x03\x04": "a zip archive (unpack it)",
    b"PARE": "encrypted Parquet",
    b"Obj\x01": "Avro",
    b"ORC": "ORC",
    b"SQLite format 3": "SQLite",
    b"\xff\xfe": "UTF-16 text (rewrite it as UTF-8)",
    b"\xfe\xff": "UTF-16 text (rewrite it as UTF-8)",
}
_ARROW_FILE = b"ARROW1"
_ARROW_STREAM = b"\xff\xff\xff\xff"
_PARQUET_SUFFIXES = {".parquet", ".pq", ".parq"}
_ARROW_SUFFIXES = {".arrow", ".feather", ".ipc"}
_JSONL_SUFFIXES = {".jsonl", ".ndjson", ".jsonlines"}
_CSV_SUFFIXES = {".csv", ".tsv", ".tab"}
_BOM = b"\xef\xbb\xbf"
_ARRAY_OF_OBJECTS = re.compile(rb"\[[ \t\r\n]*+[{\]]")


def sniff(file: InputFile, format: str) -> InputFile:
    """`file` with its format and compression.

    Args:
        file: found, not looked into.
        format: `input.format`; what is not auto is believed, except against magic bytes.

    Raises:
        UsageError: not a kind that is supported.
        InputError: it cannot be read.
    """
    head = _head(file)
    binary = _binary_format(file, head)
    if binary is not None:
        if format not in {"auto", binary}:
            raise UsageError(f"input.format: {file.path} is {binary.title()}, not {format}; set it to auto")
        return replace(file, format=binary)
    suffix, compression = _text_compression(file.name, head)
    if format != "auto":
        return replace(file, format=format, compression="none" if format == "parquet" else compression)
    if suffix in _PARQUET_SUFFIXES:
        return replace(file, format="parquet")
    file = replace(file, compression=compression)
    return replace(file, format=_text_format(file, suffix))


def _head(file: InputFile) -> bytes:
    raw = open_raw(file)
    try:
        return raw.read_at(0, min(_HEAD_BYTES, file.size))
    finally:
        raw.close()


def _binary_format(file: InputFile, head: bytes) -> str | None:
    for magic, kind in _REFUSED_MAGIC.items():
        if head.startswith(magic):
            raise UsageError(f"input.path: {file.path} is {kind}; {SUPPORTED}")
    if head.startswith(b"PAR1"):
        return "parquet"
    suffix = PurePath(file.name).suffix.lower()
    if head.startswith(_ARROW_FILE) or (suffix in _ARROW_SUFFIXES and head.startswith(_ARROW_STREAM)):
        return "arrow"
    if suffix in _ARROW_SUFFIXES:
        raise InputError(f"{file.path}: does not begin as an Arrow file; it is cut or something else")
    return None


def _text_compression(name: str, head: bytes) -> tuple[str, str]:
    """The extension below that of the compression, and the compression."""
    pure = PurePath(name)
    by_suffix = _COMPRESSED_SUFFIXES.get(pure.suffix.lower())
    suffix = (pure.with_suffix("") if by_suffix else pure).suffix.lower()
    for magic, compression in _COMPRESSIONS.items():
        if head.startswith(magic):
            return suffix, compression
    if _ZSTD_SKIPPABLE.match(head):
        return suffix, "zstd"
    # A .gz file of plain text is common (clients that decompress on the way); an empty one is a cut one.
    if by_suffix and (not head or suffix not in _CSV_SUFFIXES) and _first_byte(head) not in {b"{", b"["}:
        return suffix, by_suffix
    return suffix, "none"


def _first_byte(head: bytes) -> bytes:
    return head.removeprefix(_BOM).lstrip()[:1]


def _text_format(file: InputFile, suffix: str) -> str:
    if suffix in _CSV_SUFFIXES:
        return "csv"
    text = _beginning(file).removeprefix(_BOM).lstrip()
    if suffix in _JSONL_SUFFIXES:
        return "openai_batch" if looks_like_batch(text) else "jsonl"
    if suffix == ".json":
        return _json_format(file, text)
    if text.startswith(b"{"):
        return "openai_batch" if looks_like_batch(text) else "jsonl"
    if _ARRAY_OF_OBJECTS.match(text):
        return "json"
    raise UsageError(
        f"input.path: {file.path} is not of a known kind; {SUPPORTED}; "
        "name its kind in input.format if it is one of them"
    )


def _json_format(file: InputFile, text: bytes) -> str:
    """An array, or lines of objects, which are often named .json too."""
    if not text.startswith(b"{"):
        return "json"
    line, newline, _ = text.partition(b"\n")
    try:
        if newline or len(text) < _HEAD_BYTES:
            json.loads(line.strip(BLANK))
    except (ValueError, RecursionError):
        raise UsageError(
            f"input.path: {file.path} holds one JSON object, not records; put the records into one array "
            "[...], or write one object on each line (JSONL)"
        ) from None
    return "openai_batch" if looks_like_batch(text) else "jsonl"


def _beginning(file: InputFile) -> bytes:
    """Up to some hundred KB of decompressed text; b"" where it is damaged, which reading will report."""
    stream = open_stream(file, ahead=False)
    try:
        return stream.read_chunk()
    except (TruncatedStream, InputError):
        return b""
    finally:
        stream.close()
