"""Decompressed bytes of a file in bounded chunks: plain, gzip or zstd, every member or frame of it.

`LineReader` pulls chunks. All data that can be decompressed comes out before a truncated end is reported.
"""

from __future__ import annotations

import zlib
from collections.abc import Generator
from typing import IO, Protocol

import zstandard

from batchgen.types import InputError

CHUNK_BYTES = 256 * 1024
# A zstd block of 4 bytes can expand to 128 KiB and zstandard's decompressobj has no output limit,
# so small pieces of input are what bounds a decompression bomb (to 16 MiB at a time).
_ZSTD_INPUT_BYTES = 512


class TruncatedStream(Exception):
    """The compressed file ends before its end mark. `offset` is in bytes of the compressed file."""

    def __init__(self, offset: int) -> None:
        super().__init__(f"the compressed stream ends at byte {offset}, before its end mark")
        self.offset = offset


class ByteStream(Protocol):
    """Reads forward; `seek` goes to an offset of the decompressed text at or after the current one."""

    def read_chunk(self) -> bytes:
        """More bytes, or b"" at the end. Raises TruncatedStream, InputError."""

    def seek(self, offset: int) -> None: ...

    def close(self) -> None: ...


def open_stream(path: str, compression: str, size: int) -> ByteStream:
    """Opens `path` as a stream of decompressed bytes.

    Args:
        path: a local file.
        compression: "none", "gzip" or "zstd".
        size: bytes of the file when the job looked at it; what was appended since is not read.

    Raises:
        InputError: the file cannot be opened.
    """
    source = _Source(path, size)
    if compression == "none":
        return _PlainStream(source)
    decompress = {"gzip": _gunzip, "zstd": _unzstd}[compression]
    return _CompressedStream(source, decompress(source))


class _Source:
    """The file as stored, up to `size`; `offset` is that of the next byte."""

    def __init__(self, path: str, size: int) -> None:
        self.path = path
        self.size = size
        self.offset = 0
        try:
            self.file: IO[bytes] = open(path, "rb", buffering=0)  # noqa: SIM115 - closed by close()
        except OSError as e:
            raise InputError(f"{path}: cannot be read: {e.strerror}") from e

    def read(self) -> bytes:
        try:
            data = self.file.read(max(0, min(CHUNK_BYTES, self.size - self.offset)))
        except OSError as e:
            raise InputError(f"{self.path}: cannot be read at byte {self.offset}: {e.strerror}") from e
        if not data and self.offset < self.size:
            raise InputError(
                f"{self.path}: ends at byte {self.offset} but had {self.size} bytes when the job started; "
                "restore it, and do not change input files while a job runs"
            )
        self.offset += len(data)
        return data

    def seek(self, offset: int) -> None:
        self.file.seek(offset)
        self.offset = offset

    def corrupt(self, kind: str, reason: Exception) -> InputError:
        start = max(0, self.offset - CHUNK_BYTES)
        return InputError(
            f"{self.path}: corrupt {kind} data between bytes {start} and {self.offset}: {reason}; "
            "restore the file from its source"
        )


class _PlainStream:
    def __init__(self, source: _Source) -> None:
        self._source = source
        self.read_chunk = source.read
        self.seek = source.seek

    def close(self) -> None:
        self._source.file.close()


class _CompressedStream:
    def __init__(self, source: _Source, chunks: Generator[bytes]) -> None:
        self._source = source
        self._chunks = chunks
        self._offset = 0
        self._pending = b""

    def read_chunk(self) -> bytes:
        chunk = self._pending or next(self._chunks, b"")
        self._pending = b""
        self._offset += len(chunk)
        return chunk

    def seek(self, offset: int) -> None:
        while self._offset < offset and (chunk := self.read_chunk()):
            excess = self._offset - offset
            if excess > 0:
                self._pending = chunk[-excess:]
                self._offset = offset

    def close(self) -> None:
        self._chunks.close()
        self._source.file.close()


def _gunzip(source: _Source) -> Generator[bytes]:
    data = source.read()
    while True:
        data = yield from _gunzip_member(source, data)
        # Members may be padded with zeros, as tapes and some object stores do.
        while not (data := data.lstrip(b"\0")):
            if not (data := source.read()):
                return


def _gunzip_member(source: _Source, data: bytes) -> Generator[bytes, None, bytes]:
    """Yields the content of one member; returns the bytes read beyond it."""
    member = zlib.decompressobj(wbits=31)
    while not member.eof:
        data = data or source.read()
        try:
            # Without input this yields what zlib still holds back because of the output limit.
            chunk = member.decompress(data, CHUNK_BYTES)
        except zlib.error as e:
            raise source.corrupt("gzip", e) from e
        if not data and not chunk and not member.eof:
            raise TruncatedStream(source.offset)
        data = member.unconsumed_tail
        if chunk:
            yield chunk
    return member.unused_data


def _unzstd(source: _Source) -> Generator[bytes]:
    context = zstandard.ZstdDecompressor()
    data = source.read()
    while True:
        data = yield from _unzstd_frame(source, context, data)
        if not data and not (data := source.read()):
            return


def _unzstd_frame(
    source: _Source, context: zstandard.ZstdDecompressor, data: bytes
) -> Generator[bytes, None, bytes]:
    """Yields the content of one frame (none for a skippable one); returns the bytes read beyond it."""
    frame = context.decompressobj()
    start = 0
    while not frame.eof:
        if start >= len(data):
            data, start = source.read(), 0
            if not data:
                raise TruncatedStream(source.offset)
        try:
            chunk = frame.decompress(data[start : start + _ZSTD_INPUT_BYTES])
        except zstandard.ZstdError as e:
            raise source.corrupt("zstd", e) from e
        start += _ZSTD_INPUT_BYTES
        if chunk:
            yield chunk
    return frame.unused_data + data[start:]
