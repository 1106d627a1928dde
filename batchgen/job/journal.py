"""The journal: what the workers produced and no committed part holds yet. Written by the supervisor.

Append-only segments with one writer each. A record is

    magic  4 | payload length  4 | crc32  4 | kind  1 | row  8 | payload (msgpack)

The checksum covers everything after itself and the length, and begins with a number that depends on the job
and the segment, so that neither a renamed segment nor text that looks like a record passes for one.
"""

from __future__ import annotations

import contextlib
import os
import re
import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import msgpack

from batchgen.data.packer import RowPacker
from batchgen.data.row import DIGEST_BYTES
from batchgen.data.row_result import RowResult
from batchgen.grammar import agreeing, counted
from batchgen.job.files import OS_FILES, FileOps, disk_full, open_existing, read_file, storage, storage_error
from batchgen.types import StorageError

# 0xff never occurs in UTF-8, so no text contains the magic.
MAGIC = b"\xffBGR"
HEADER = struct.Struct("<4sIIBq")
SEGMENT_BYTES = 64 * 1024 * 1024
_SEGMENT_NAME = re.compile(r"e(\d{6,})-w(\d{3,})-(\d{6,})\.seg")
_CHECKED = struct.Struct("<IBq")
_SPAN_BYTES = 1024 * 1024
_GAP_BYTES = 16 * 1024
_packer = RowPacker()
# By the first byte of a short array, that of an array with one more member, and that a digest comes first.
_ONE_MORE = {0x90 + n: bytes((0x91 + n, 0xC4, DIGEST_BYTES)) for n in range(15)}


class Kind(IntEnum):
    """What a record holds."""

    RESULT = 1
    PARTIAL = 2


class SegmentName(NamedTuple):
    """Whose segment it is; sorts in the order of writing."""

    epoch: int
    writer: int
    sequence: int

    @classmethod
    def parse(cls, name: str) -> SegmentName | None:
        """From a file name; None for a foreign file."""
        match = _SEGMENT_NAME.fullmatch(name)
        return cls(*map(int, match.groups())) if match else None

    def __str__(self) -> str:
        return f"e{self.epoch:06d}-w{self.writer:03d}-{self.sequence:06d}.seg"


class Location(NamedTuple):
    """Where a record lies: segment file name, byte offset, bytes with header."""

    segment: str
    offset: int
    length: int


class Record(NamedTuple):
    """One intact record."""

    location: Location
    kind: int
    row: int
    payload: bytes


@dataclass(frozen=True, slots=True)
class Dropped:
    """A stretch of a segment that holds no intact record."""

    segment: str
    offset: int
    length: int

    def __str__(self) -> str:
        are = agreeing(self.length, "is", "are")
        return (
            f"journal/{self.segment}: {counted(self.length, 'byte')} at {self.offset} {are} torn or damaged, "
            "left out"
        )


@dataclass(frozen=True, slots=True)
class ResultRecord:
    """A finished row.

    Args:
        digest: of the input record that it answers; another content makes it void.
        result: what became of it.
    """

    digest: bytes
    result: RowResult

    def pack(self) -> bytes:
        return result_payload(self.digest, pack_result(self.result))

    @classmethod
    def unpack(cls, payload: bytes) -> ResultRecord:
        digest, *values = unpack_result(payload)
        return cls(digest, RowResult.of(*values))


def pack_result(result: RowResult) -> bytes:
    """A result as `result_payload` takes it: its fields in order, and `included` only where there is any."""
    status, text, finish_reason, stop_reason, error, usage, included, _ = result
    said = None if error is None else (error.error_class, error.message)
    if included is None:
        return _packer.pack((status, text, finish_reason, stop_reason, said, usage))
    return _packer.pack((status, text, finish_reason, stop_reason, said, usage, included))


def result_payload(digest: bytes, packed: bytes) -> bytes:
    """Payload of a result record, without looking into the result.

    Args:
        digest: of the input record, 16 bytes.
        packed: by `pack_result`.
    """
    # An array of msgpack with one more member in front: so short ones have their length in the first byte.
    return _ONE_MORE[packed[0]] + digest + packed[1:]


def unpack_result(payload: bytes) -> list[Any]:
    """A result's digest and values in the order of `RowResult.of`, without a map for each row.

    Of a result that `pack_result` has made, the values alone.
    """
    values: list[Any] = msgpack.unpackb(payload, unicode_errors="surrogatepass")
    return values


@dataclass(frozen=True, slots=True)
class PartialRecord:
    """Output token ids of an unfinished row's sample, from index `start` of its output on."""

    digest: bytes
    start: int
    ids: Sequence[int]
    sample: int = 0

    def pack(self) -> bytes:
        values = [self.digest, self.start, list(self.ids)]
        # Nearly every row has one sample.
        return _packer.pack([*values, self.sample] if self.sample else values)

    @classmethod
    def unpack(cls, payload: bytes) -> PartialRecord:
        return cls(*msgpack.unpackb(payload))


def segment_seed(job_id: str, name: str) -> int:
    """What checksums of a segment begin with."""
    return zlib.crc32(f"{job_id}/{name}".encode())


def encode_record(seed: int, kind: Kind, row: int, payload: bytes) -> bytes:
    """The bytes of one record."""
    checked = zlib.crc32(payload, zlib.crc32(_CHECKED.pack(len(payload), kind, row), seed))
    return HEADER.pack(MAGIC, len(payload), checked, kind, row) + payload


def scan_segment(name: str, data: bytes, seed: int, dropped: list[Dropped] | None = None) -> Iterator[Record]:
    """Every intact record, going on at the next magic after a bad one.

    Args:
        name: of the segment.
        data: its accepted bytes.
        seed: `segment_seed`.
        dropped: gets the stretches between intact records.
    """
    position, good_end = 0, 0
    while (position := data.find(MAGIC, position)) >= 0:
        record = _record_at(name, data, position, seed)
        if record is None:
            position += 1
            continue
        if dropped is not None and position > good_end:
            dropped.append(Dropped(name, good_end, position - good_end))
        yield record
        position = good_end = position + record.location.length
    if dropped is not None and good_end < len(data):
        dropped.append(Dropped(name, good_end, len(data) - good_end))


def _payload_at(data: bytes, position: int, seed: int, kind: Kind, row: int) -> bytes | None:
    """The payload of the record of this kind and row; None where it is not."""
    body = position + HEADER.size
    if body > len(data):
        return None
    magic, length, checksum, found_kind, found_row = HEADER.unpack_from(data, position)
    payload = data[body : body + length]
    checked = zlib.crc32(payload, zlib.crc32(_CHECKED.pack(length, kind, row), seed))
    whole = magic == MAGIC and (found_kind, found_row) == (kind, row) and len(payload) == length
    return payload if whole and checked == checksum else None


def _spans(wanted: Sequence[tuple[int, Location]]) -> Iterator[tuple[str, int, int, list[int]]]:
    """Stretches of segments to read at once: name, beginning, end, and which of the records are within."""
    places: list[int] = []
    name, start, end = "", 0, 0
    for place in sorted(range(len(wanted)), key=lambda place: wanted[place][1]):
        segment, offset, length = wanted[place][1]
        near = segment == name and offset - end <= _GAP_BYTES
        if not near or offset - start > _SPAN_BYTES:
            if places:
                yield name, start, end, places
            name, start, places = segment, offset, []
        places.append(place)
        end = offset + length
    if places:
        yield name, start, end, places


def _record_at(name: str, data: bytes, position: int, seed: int) -> Record | None:
    if position + HEADER.size > len(data):
        return None
    magic, length, checksum, kind, row = HEADER.unpack_from(data, position)
    end = position + HEADER.size + length
    if magic != MAGIC or end > len(data):
        return None
    payload = data[position + HEADER.size : end]
    if zlib.crc32(payload, zlib.crc32(_CHECKED.pack(length, kind, row), seed)) != checksum:
        return None
    return Record(Location(name, position, end - position), kind, row, payload)


class Committed(NamedTuple):
    """A record that is on disk."""

    kind: Kind
    row: int
    location: Location


class JournalWriter:
    """Appends records for one claim epoch; what `commit` has returned is on disk.

    Args:
        folder: `.batchgen/journal`.
        job_id: of the manifest.
        epoch: the claim that this process holds.
        writer: number of this writer within the epoch.
        segment_bytes: a segment that has reached this size is followed by a new one.
        files: how to reach the disk.
    """

    def __init__(
        self,
        folder: Path,
        job_id: str,
        epoch: int,
        writer: int = 0,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        files: FileOps = OS_FILES,
    ) -> None:
        self._folder = folder
        self._job_id = job_id
        self._epoch = epoch
        self._writer = writer
        self._segment_bytes = segment_bytes
        self._files = files
        self._sequence = 0
        self._pending: list[tuple[Kind, int, bytes]] = []
        self._pending_bytes = 0
        self._fd = -1
        self._name = ""
        self._seed = 0
        self._size = 0

    @property
    def pending_bytes(self) -> int:
        """Payload bytes that the next commit will write."""
        return self._pending_bytes

    @property
    def current_segment(self) -> str:
        """Name of the segment that is being written; empty before the first."""
        return self._name

    def append(self, kind: Kind, row: int, payload: bytes) -> None:
        """Keep a record for the next commit."""
        self._pending.append((kind, row, payload))
        self._pending_bytes += HEADER.size + len(payload)

    def put_first(self, records: Sequence[tuple[Kind, int, bytes]]) -> None:
        """Keep records for the next commit, before all others of it: kind, row, payload."""
        self._pending[:0] = records
        self._pending_bytes += sum(HEADER.size + len(payload) for _, _, payload in records)

    def commit(self) -> list[Committed]:
        """Write and force to disk what was appended; returns where each record lies, in order.

        After a failure the rest of the current segment is never trusted: everything is written again to a
        new one, because a failed fsync may have dropped pages that a second fsync would call clean.

        Raises:
            StorageError: the new segment failed too; nothing of this batch is to be counted on.
        """
        if not self._pending:
            return []
        try:
            committed = self._write_batch()
        except OSError:
            self._abandon()
            try:
                committed = self._write_batch()
            except OSError as error:
                self._abandon()
                raise storage_error(self._folder, error, self._pending_bytes) from error
        self._pending.clear()
        self._pending_bytes = 0
        if self._size >= self._segment_bytes:
            self._abandon()
        return committed

    def close(self) -> None:
        """Close the segment; uncommitted records are forgotten."""
        self._abandon()

    def _write_batch(self) -> list[Committed]:
        if self._fd < 0:
            self._open_segment()
        committed, chunks, offset = [], [], self._size
        for kind, row, payload in self._pending:
            data = encode_record(self._seed, kind, row, payload)
            committed.append(Committed(kind, row, Location(self._name, offset, len(data))))
            chunks.append(data)
            offset += len(data)
        batch = b"".join(chunks)
        if self._files.write(self._fd, batch) != len(batch):
            raise disk_full()
        self._files.fsync(self._fd)
        self._size = offset
        return committed

    def _open_segment(self) -> None:
        self._sequence += 1
        self._name = str(SegmentName(self._epoch, self._writer, self._sequence))
        self._seed = segment_seed(self._job_id, self._name)
        self._fd = self._files.create(self._folder / self._name)
        self._size = 0
        self._files.fsync_folder(self._folder)

    def _abandon(self) -> None:
        if self._fd >= 0:
            # A close that reports an error has closed the descriptor all the same.
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = -1


def read_segment(
    folder: Path, job_id: str, name: str, length: int, dropped: list[Dropped] | None = None
) -> Iterator[Record]:
    """Intact records within the first `length` bytes; a segment that is gone has none."""
    path = folder / name
    try:
        data = read_file(OS_FILES, path, length)
    except FileNotFoundError:
        return
    except OSError as error:
        raise storage_error(path, error, action="read") from error
    yield from scan_segment(name, data, segment_seed(job_id, name), dropped)


class JournalReader:
    """Reads results again, for the assembly of parts.

    Args:
        folder: `.batchgen/journal`.
        job_id: of the manifest.
    """

    def __init__(self, folder: Path, job_id: str) -> None:
        self._folder = folder
        self._job_id = job_id
        self._open: tuple[str, int] = ("", -1)

    def results(self, wanted: Sequence[tuple[int, Location]]) -> list[bytes]:
        """Payloads of results, in the order asked for; neighbours on disk are read at once.

        Args:
            wanted: rows and where their results lie.

        Raises:
            StorageError: a record is damaged since it was written, or cannot be read.
        """
        payloads = []
        for (row, location), payload in zip(wanted, self.payloads(Kind.RESULT, wanted), strict=True):
            if payload is None:
                raise StorageError(
                    f"{self._folder / location.segment}: the record of row {row} at byte {location.offset} "
                    "was damaged after it was written; check the disk, then run the same command again to "
                    "compute the row anew"
                )
            payloads.append(payload)
        return payloads

    def payloads(self, kind: Kind, wanted: Sequence[tuple[int, Location]]) -> list[bytes | None]:
        """Payloads of one kind, as `results` gives them; None for a record that is damaged.

        Raises:
            StorageError: a segment cannot be read.
        """
        found: list[bytes | None] = [None] * len(wanted)
        for name, start, end, places in _spans(wanted):
            with storage(self._folder / name, action="read"):
                data = os.pread(self._descriptor(name), end - start, start)
            seed = segment_seed(self._job_id, name)
            for place in places:
                row, location = wanted[place]
                found[place] = _payload_at(data, location.offset - start, seed, kind, row)
        return found

    def close(self) -> None:
        """Close the segment that was read last."""
        if self._open[1] >= 0:
            os.close(self._open[1])
        self._open = ("", -1)

    def _descriptor(self, name: str) -> int:
        if self._open[0] != name:
            self.close()
            self._open = (name, open_existing(OS_FILES, self._folder / name))
        return self._open[1]
