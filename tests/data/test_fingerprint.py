"""The cheap check of the input at every start, and what it says when something differs."""

import json
import os
from pathlib import Path

import pyarrow as pa
from data_files import parquet, write

from batchgen.data.fingerprint import describe_changes
from batchgen.data.source import open_input


def fingerprint(*paths: str) -> dict:
    return json.loads(json.dumps(open_input(list(paths)).fingerprint()))


def test_same_input_same_fingerprint(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", "{}\n")
    assert describe_changes(fingerprint(path), fingerprint(path)) == []


def test_size_and_time(tmp_path: Path) -> None:
    path = write(tmp_path, "a.jsonl", "{}\n")
    old = fingerprint(path)
    os.utime(path, ns=(1, 1))
    assert describe_changes(old, fingerprint(path)) == [
        f"{path}: was modified since (its time stamp differs)"
    ]
    write(tmp_path, "a.jsonl", "{}\n{}\n")
    os.utime(path, ns=(old["files"][0]["mtime_ns"],) * 2)
    assert describe_changes(old, fingerprint(path)) == [f"{path}: size was 3 bytes, is 6"]


def test_files_added_removed_and_reordered(tmp_path: Path) -> None:
    a, b, c = (write(tmp_path, f"{name}.jsonl", "{}\n") for name in "abc")
    assert describe_changes(fingerprint(a, b), fingerprint(b, c)) == [
        f"{a}: no longer in the input",
        f"{c}: was not in the input",
    ]
    assert describe_changes(fingerprint(a, b), fingerprint(b, a)) == [
        "input.path: the same files come in another order"
    ]


def test_parquet_footer(tmp_path: Path) -> None:
    path = parquet(tmp_path, pa.table({"a": [1, 2]}))
    old = fingerprint(path)
    parquet(tmp_path, pa.table({"b": [1, 2]}))
    (change,) = describe_changes(old, fingerprint(path))
    assert "the Parquet footer (schema or row groups) differs" in change


def test_another_format(tmp_path: Path) -> None:
    old = fingerprint(write(tmp_path, "x", "{}\n"))
    new = fingerprint(parquet(tmp_path, pa.table({"a": [1]}), "x"))
    assert describe_changes(old, new)[0] == "input.format: was jsonl, is parquet"
    assert describe_changes({**old, "version": 0}, new) == [
        "the fingerprint has version 1, the recorded one 0"
    ]
