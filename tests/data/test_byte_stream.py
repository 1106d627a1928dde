"""Decompression: every member and frame, cut ends with their offset, bounded memory."""

import gzip
import os
import struct
import tracemalloc
from pathlib import Path

import pytest
import zstandard
from data_files import TEXT_SUFFIXES, compress, write

from batchgen.data.byte_stream import CHUNK_BYTES, ByteStream, TruncatedStream
from batchgen.data.byte_stream import open_stream as open_file_stream
from batchgen.data.input_file import InputFile
from batchgen.types import InputError

KINDS = {".jsonl": "none", ".jsonl.gz": "gzip", ".jsonl.bz2": "bzip2", ".jsonl.zst": "zstd"}
TEXT = b"".join(b"%d %s\n" % (i, os.urandom(20).hex().encode()) for i in range(20_000))


def open_stream(path: str, compression: str, size: int) -> ByteStream:
    return open_file_stream(InputFile(0, path, "x", "jsonl", compression, size, 0))


def read_all(path: str, compression: str) -> bytes:
    stream = open_stream(path, compression, os.path.getsize(path))
    try:
        return b"".join(iter(stream.read_chunk, b""))
    finally:
        stream.close()


@pytest.mark.parametrize("suffix", TEXT_SUFFIXES)
def test_every_member_and_frame_is_read(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path, "x", compress(TEXT, suffix))
    assert read_all(path, KINDS[suffix]) == TEXT


@pytest.mark.parametrize("suffix", TEXT_SUFFIXES)
@pytest.mark.parametrize("offset", [0, 1, 70_000, CHUNK_BYTES, CHUNK_BYTES + 1, len(TEXT), len(TEXT) + 9])
def test_seek_goes_to_an_offset_of_the_text(tmp_path: Path, suffix: str, offset: int) -> None:
    data = compress(TEXT, suffix)
    stream = open_stream(write(tmp_path, "x", data), KINDS[suffix], len(data))
    stream.seek(offset)
    assert b"".join(iter(stream.read_chunk, b"")) == TEXT[offset:]
    stream.close()


def test_padding_and_empty_members(tmp_path: Path) -> None:
    padded = gzip.compress(b"a") + b"\0" * 600_000 + gzip.compress(b"") + gzip.compress(b"b") + b"\0\0"
    assert read_all(write(tmp_path, "x.gz", padded), "gzip") == b"ab"


def test_skippable_frames_and_frames_without_size(tmp_path: Path) -> None:
    skippable = struct.pack("<II", 0x184D2A50, 5) + b"12345"
    stream = zstandard.ZstdCompressor(write_checksum=True).compressobj()
    data = skippable + stream.compress(TEXT) + stream.flush() + skippable
    assert read_all(write(tmp_path, "x.zst", data), "zstd") == TEXT


@pytest.mark.parametrize("suffix", TEXT_SUFFIXES[1:])
@pytest.mark.parametrize("cut", [1, 8, 20, 5000])
def test_a_cut_end_is_reported_after_all_data_before_it(tmp_path: Path, suffix: str, cut: int) -> None:
    data = compress(TEXT, suffix)[:-cut]
    stream = open_stream(write(tmp_path, "x", data), KINDS[suffix], len(data))
    read: list[bytes] = []
    with pytest.raises(TruncatedStream) as caught:
        read.extend(iter(stream.read_chunk, b""))
    stream.close()
    assert caught.value.offset == len(data)
    assert TEXT.startswith(b"".join(read))
    assert sum(map(len, read)) >= len(TEXT) // 2


@pytest.mark.parametrize("suffix", TEXT_SUFFIXES[1:])
def test_an_empty_compressed_file_is_a_cut_one(tmp_path: Path, suffix: str) -> None:
    with pytest.raises(TruncatedStream):
        read_all(write(tmp_path, "x", b""), KINDS[suffix])


@pytest.mark.parametrize("suffix", TEXT_SUFFIXES[1:])
def test_corrupt_data_names_file_and_bytes(tmp_path: Path, suffix: str) -> None:
    data = bytearray(compress(TEXT, suffix))
    data[len(data) // 3 : len(data) // 3 + 50] = b"\xff" * 50
    path = write(tmp_path, "x", bytes(data))
    with pytest.raises(InputError, match=rf"{path}: corrupt .* between bytes \d+ and \d+"):
        read_all(path, KINDS[suffix])
    with pytest.raises(InputError, match="corrupt"):
        read_all(write(tmp_path, "y", compress(TEXT, suffix) + b"garbage"), KINDS[suffix])


@pytest.mark.parametrize("suffix", TEXT_SUFFIXES[1:])
def test_a_bomb_is_read_in_bounded_memory(tmp_path: Path, suffix: str) -> None:
    bomb = compress(b"\0" * 100_000_000, suffix)
    path = write(tmp_path, "x", bomb)
    tracemalloc.start()
    stream = open_stream(path, KINDS[suffix], len(bomb))
    total = sum(map(len, iter(stream.read_chunk, b"")))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    stream.close()
    assert total == 100_000_000
    assert peak < 40_000_000


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read: No such file"):
        open_stream(str(tmp_path / "none"), "none", 0)


@pytest.mark.parametrize("suffix", TEXT_SUFFIXES)
def test_files_that_change_while_the_job_runs(tmp_path: Path, suffix: str) -> None:
    data = compress(TEXT, suffix)
    path = write(tmp_path, "x", data + compress(b"appended later", suffix))
    stream = open_stream(path, KINDS[suffix], len(data))
    assert b"".join(iter(stream.read_chunk, b"")) == TEXT
    stream.close()
    os.truncate(path, len(data) // 2)
    stream = open_stream(path, KINDS[suffix], len(data))
    with pytest.raises(InputError, match=rf"ends at byte {len(data) // 2} but had {len(data):,} bytes"):
        list(iter(stream.read_chunk, b""))
    stream.close()
