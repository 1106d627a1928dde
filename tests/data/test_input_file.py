"""From paths in the job file to local files: globs, sniffing, and refusals that say what is supported."""

import bz2
import gzip
import os
from pathlib import Path

import pytest
import zstandard
from data_files import write

from batchgen.data.input_file import find_files
from batchgen.types import InputError, UsageError

LINE = b'{"a": 1}\n'
BATCH = b'{"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"model": 1}}\n'
BOM = b"\xef\xbb\xbf"


def found(path: str | list[str], format: str = "auto") -> list[tuple[str, str, str]]:
    return [(file.name, file.format, file.compression) for file in find_files(path, format)]


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("a.jsonl", LINE, ("jsonl", "none")),
        ("a.jsonl", b"", ("jsonl", "none")),
        ("a.ndjson", b"not json", ("jsonl", "none")),
        ("a.JSONL", BOM + LINE, ("jsonl", "none")),
        ("a.jsonl", gzip.compress(LINE, mtime=0), ("jsonl", "gzip")),
        ("a.jsonl.gz", gzip.compress(LINE, mtime=0), ("jsonl", "gzip")),
        ("a.jsonl.gz", zstandard.compress(LINE), ("jsonl", "zstd")),
        ("a.jsonl.zst", b"\x50\x2a\x4d\x18\x00\x00\x00\x00" + zstandard.compress(LINE), ("jsonl", "zstd")),
        ("a.jsonl.gz", LINE, ("jsonl", "none")),
        ("a.jsonl.gz", b"", ("jsonl", "gzip")),
        ("a.txt", b"\n " + LINE, ("jsonl", "none")),
        ("data", BOM + LINE, ("jsonl", "none")),
        ("a.parquet", b"PAR1...", ("parquet", "none")),
        ("a.jsonl", b"PAR1...", ("parquet", "none")),
        ("a.parquet", b"", ("parquet", "none")),
        ("a.jsonl.bz2", bz2.compress(LINE), ("jsonl", "bzip2")),
        ("a.json", LINE, ("jsonl", "none")),
        ("a.json", b'{"a": 1}', ("jsonl", "none")),
        ("a.json", b'[{"a": 1}]', ("json", "none")),
        ("a.json.gz", gzip.compress(BOM + b" [ ]", mtime=0), ("json", "gzip")),
        ("a.json", b"", ("json", "none")),
        ("data", b'[\n {"a": 1}]', ("json", "none")),
        ("a.csv", b"a,b\n", ("csv", "none")),
        ("a.csv.gz", gzip.compress(b"a,b\n", mtime=0), ("csv", "gzip")),
        ("a.csv", b'{"a",b\n', ("csv", "none")),
        ("a.csv.gz", b"a,b\n", ("csv", "none")),
        ("a.tsv.zst", zstandard.compress(b"a\tb\n"), ("csv", "zstd")),
        ("a.jsonl", BATCH, ("openai_batch", "none")),
        ("a.txt", gzip.compress(BATCH, mtime=0), ("openai_batch", "gzip")),
        ("a.jsonl", BATCH.replace(b'{"model', b'["model'), ("jsonl", "none")),
        ("a.jsonl", b'{"a": ' + BATCH, ("jsonl", "none")),
    ],
)
def test_kind_by_magic_bytes_then_extension(
    tmp_path: Path, name: str, data: bytes, expected: tuple[str, str]
) -> None:
    assert found(write(tmp_path, name, data)) == [(name, *expected)]


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.json", b'{\n "a": 1\n}'),
        ("a.txt", b"plain text"),
        ("a.jsonl.xz", b"\xfd7zXZ\x00"),
        ("a.zip", b"PK\x03\x04"),
        ("a", b"[1] a footnote"),
        ("a.jsonl", '{"a": 1}'.encode("utf-16")),
    ],
)
def test_other_kinds_are_refused_with_what_is_supported(tmp_path: Path, name: str, data: bytes) -> None:
    path = write(tmp_path, name, data)
    with pytest.raises(UsageError, match=r"batchgen reads Parquet, Arrow, JSONL, JSON arrays, CSV|JSONL\)"):
        find_files(path)


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'xml' is not a format; there are auto, parquet, jsonl"):
        find_files("a.jsonl", "xml")


def test_a_given_format_overrides_the_extension(tmp_path: Path) -> None:
    assert found(write(tmp_path, "a.json", LINE), "jsonl") == [("a.json", "jsonl", "none")]
    assert found(write(tmp_path, "a.bin", b"x"), "parquet") == [("a.bin", "parquet", "none")]
    with pytest.raises(UsageError, match="is Parquet, not jsonl"):
        find_files(write(tmp_path, "b.parquet", b"PAR1"), "jsonl")


def test_globs_are_sorted_and_lists_keep_their_order(tmp_path: Path) -> None:
    for name in ("b10.jsonl", "b2.jsonl", "a.jsonl", "sub/c.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path, name, LINE)
    (tmp_path / "b.jsonl").mkdir()
    names = [name for name, _, _ in found([f"{tmp_path}/b*.jsonl", f"{tmp_path}/a.jsonl"])]
    assert names == ["b10.jsonl", "b2.jsonl", "a.jsonl"]
    assert [name for name, _, _ in found(f"{tmp_path}/**/c.jsonl")] == ["c.jsonl"]


def test_a_file_whose_name_looks_like_a_glob(tmp_path: Path) -> None:
    assert found(write(tmp_path, "a[1].jsonl", LINE)) == [("a[1].jsonl", "jsonl", "none")]


def test_a_name_that_is_not_utf8(tmp_path: Path) -> None:
    path = os.fsdecode(os.fsencode(str(tmp_path)) + b"/\xff.jsonl")
    Path(path).write_bytes(LINE)
    assert found(path) == [("\ufffd.jsonl", "jsonl", "none")]


def test_what_is_missing_or_not_a_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"none\.jsonl cannot be read: No such file"):
        find_files(str(tmp_path / "none.jsonl"))
    with pytest.raises(InputError, match="matches no file"):
        find_files(f"{tmp_path}/*.jsonl")
    with pytest.raises(UsageError, match="is a folder; name files or a pattern"):
        find_files(str(tmp_path))
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="not a regular file"):
        find_files(str(tmp_path / "pipe"))


def test_a_file_twice_and_mixed_formats(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", LINE)
    with pytest.raises(UsageError, match="listed twice"):
        find_files([path, f"{tmp_path}/*.jsonl"])
    with pytest.raises(UsageError, match="only jsonl, json, csv can be mixed"):
        find_files([path, write(tmp_path, "b.parquet", b"PAR1")])
