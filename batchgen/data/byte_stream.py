"""Decompressed bytes of a file in bounded chunks: plain, gzip, bzip2 or zstd, every member or frame of it.

The record readers pull chunks. All data that can be decompressed comes out before a cut end is reported.

Plain text, a remote one too, is entered anywhere at once. Compressed text is decompressed up to there: about
1 s of CPU time for each GB of text in zstd, 2 s in gzip, 30 to 50 s in bzip2.
"""

from __future__ import annotations

import bz2
import zlib
from collections.abc import Generator
from typing import Protocol

import zstandard

from batchgen.data.input_file import InputFile
from batchgen.data.raw_file import open_raw
from batchgen.data.read_ahead import ReadAhead
from batchgen.grammar import counted
from batchgen.types import InputError

CHUNK_BYTES = 256 * 1024
# A zstd block of 4 bytes can expand to 128 KiB and zstandard's decompressobj has no output limit,
# so small pieces of input are what bounds a decompression bomb (to 16 MiB at a time).
_ZSTD_INPUT_BYTES = 512


class TruncatedStream(Exception):
    """The file ends before what it holds does. `offset` is where, as the message says."""

    def __init__(self, message: str, offset: int) -> None:
        super().__init__(message)
        self.offset = offset


class ByteStream(Protocol):
    """Reads forward; `seek` goes to an offset of the decompressed text at or after the current one."""

    def read_chunk(self) -> bytes:
        """More bytes, or b"" at the end. Raises TruncatedStream, InputError."""

    def seek(self, offset: int) -> None: ...

    def close(self) -> None: ...


def open_stream(file: InputFile, *, ahead: bool = True) -> ByteStream:
    """Opens `file` as a stream of decompressed bytes.

    Args:
        file: what was appended since the job looked at it is not read.
        ahead: whether a thread may read and decompress ahead.

    Raises:
        InputError: the file cannot be opened.
    """
    source = _Source(file)
    if file.compression == "none":
        return _PlainStream(source, ahead=ahead and file.url is not None)
    chunks = _DECOMPRESS[file.compression](source)
    return _CompressedStream(source, ReadAhead(chunks, len) if ahead else chunks)


class _Source:
    """The file as stored, up to its size; `offset` is that of the next byte."""

    def __init__(self, file: InputFile) -> None:
        self.path = file.path
        self.size = file.size
        self.offset = 0
        self.raw = open_raw(file)

    def read(self) -> bytes:
        data = self.raw.read_at(self.offset, max(0, min(self.raw.block_bytes, self.size - self.offset)))
        if not data and self.offset < self.size:
            raise InputError(
                f"{self.path}: ends at byte {self.offset} but had {counted(self.size, 'byte')} when the job "
                "started; restore it, and do not change input files while a job runs"
            )
        self.offset += len(data)
        return data

    def blocks(self) -> Generator[bytes]:
        while data := self.read():
            yield data

    def truncated(self) -> TruncatedStream:
        message = f"the compressed stream ends at byte {self.offset}, before its end mark"
        return TruncatedStream(message, self.offset)

    def corrupt(self, kind: str, reason: Exception) -> InputError:
        start = max(0, self.offset - self.raw.block_bytes)
        return InputError(
            f"{self.path}: corrupt {kind} data between bytes {start} and {self.offset}: {reason}; "
            "restore the file from its source"
        )


class _PlainStream:
    def __init__(self, source: _Source, *, ahead: bool) -> None:
        self._source = source
        self._ahead = ReadAhead(source.blocks(), len) if ahead else None
        self._is_fresh = True

    def read_chunk(self) -> bytes:
        if self._ahead is None:
            return self._source.read()
        self._is_fresh = False
        return next(self._ahead, b"")

    def seek(self, offset: int) -> None:
        if self._ahead is not None and not self._is_fresh:
            self._ahead.close()
            self._ahead = ReadAhead(self._source.blocks(), len)
        self._source.offset = offset

    def close(self) -> None:
        if self._ahead is not None:
            self._ahead.close()
        self._source.raw.close()


class _CompressedStream:
    def __init__(self, source: _Source, chunks: ReadAhead[bytes] | Generator[bytes]) -> None:
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
        self._source.raw.close()


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
            raise source.truncated()
        data = member.unconsumed_tail
        if chunk:
            yield chunk
    return member.unused_data


def _bunzip2(source: _Source) -> Generator[bytes]:
    data = source.read()
    while True:
        data = yield from _bunzip2_stream(source, data)
        if not data and not (data := source.read()):
            return


def _bunzip2_stream(source: _Source, data: bytes) -> Generator[bytes, None, bytes]:
    """Yields the content of one stream; returns the bytes read beyond it."""
    stream = bz2.BZ2Decompressor()
    while not stream.eof:
        if stream.needs_input and not data and not (data := source.read()):
            raise source.truncated()
        try:
            chunk = stream.decompress(data, CHUNK_BYTES)
        except (OSError, ValueError) as e:
            raise source.corrupt("bzip2", e) from e
        data = b""
        if chunk:
            yield chunk
    return stream.unused_data


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
                raise source.truncated()
        try:
            chunk = frame.decompress(data[start : start + _ZSTD_INPUT_BYTES])
        except zstandard.ZstdError as e:
            if "Dictionary" in str(e):
                raise InputError(
                    f"{source.path}: is compressed with a zstd dictionary, which batchgen does not have; "
                    "compress it again without one"
                ) from e
            raise source.corrupt("zstd", e) from e
        start += _ZSTD_INPUT_BYTES
        if chunk:
            yield chunk
    return frame.unused_data + data[start:]


_DECOMPRESS = {"gzip": _gunzip, "bzip2": _bunzip2, "zstd": _unzstd}
