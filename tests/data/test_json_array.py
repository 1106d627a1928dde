"""One JSON array as a file: cut into its elements whatever the chunks, with exact values."""

import gzip
import json
import tracemalloc
from collections import deque
from collections.abc import Iterator
from itertools import chain, repeat
from pathlib import Path

import pytest
from data_files import classes, write
from hypothesis import given
from hypothesis import strategies as st

from batchgen.data.byte_stream import TruncatedStream
from batchgen.data.json_array import JsonArrayRecords
from batchgen.data.source import InputSet, open_input
from batchgen.types import InputError

BOM = b"\xef\xbb\xbf"
NUMBERS = st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=5))
VALUES = st.recursive(
    NUMBERS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
)


def read(tmp_path: Path, data: bytes | str, **options) -> InputSet:
    return open_input(write(tmp_path, "in.json", data), **options)


class Chunks:
    """A stream of pieces of a text."""

    def __init__(self, data: bytes, sizes: Iterator[int]) -> None:
        self._data = data
        self._sizes = sizes

    def read_chunk(self) -> bytes:
        size = next(self._sizes)
        chunk, self._data = self._data[:size], self._data[size:]
        return chunk

    def seek(self, offset: int) -> None:
        raise AssertionError("not needed here")

    def close(self) -> None: ...


def elements(data: bytes, size: int) -> list[bytes]:
    records = JsonArrayRecords(Chunks(data, iter(lambda: size, 0)), "x", 1 << 30)
    return [record.data for record in iter(records.next, None) if record.data is not None]


@given(st.lists(VALUES, max_size=5), st.sampled_from([None, 1]), st.booleans(), st.integers(1, 9))
def test_elements_do_not_depend_on_chunks(
    values: list, indent: int | None, ensure_ascii: bool, size: int
) -> None:
    data = json.dumps(values, indent=indent, ensure_ascii=ensure_ascii).encode(errors="replace")
    found = elements(data, size)
    assert found == elements(data, len(data))
    assert [json.loads(element) for element in found] == json.loads(data)


@given(st.lists(VALUES, min_size=1, max_size=4), st.integers(1, 9), st.data())
def test_a_cut_array_gives_what_is_whole(values: list, size: int, data: st.DataObject) -> None:
    text = json.dumps(values).encode()
    cut = text[: data.draw(st.integers(1, len(text) - 1))]
    records = JsonArrayRecords(Chunks(cut, iter(lambda: size, 0)), "x", 1 << 30)
    found: list[bytes | None] = []
    with pytest.raises(TruncatedStream):
        found.extend(record.data for record in iter(records.next, None))
    assert [json.loads(element or b"") for element in found] == values[: len(found)]


def test_lines_offsets_and_bom(tmp_path: Path) -> None:
    inputs = read(tmp_path, BOM + b'\n[\r\n {"a": "[},\\"",\n  "b": 1.50},\n\n {"a": 2} ,{"a": 3}\n]\n\n')
    rows = list(inputs.rows())
    assert [row.values["a"] for row in rows] == ['[},"', 2, 3]
    assert [row.line for row in rows] == [3, 6, 6]
    assert [row.notes for row in rows] == [("bom_stripped",), (), ()]
    assert [row.id for row in rows] == ["in.json:0", "in.json:1", "in.json:2"]
    for row in rows:
        assert list(map(repr, inputs.rows(row.next_position))) == list(map(repr, rows[row.ordinal + 1 :]))


def test_exact_values(tmp_path: Path) -> None:
    ids = ["123456789012345678901234567890", "18446744073709551616", "1.50"]
    inputs = read(tmp_path, "[" + ",".join(f'{{"id": {n}}}' for n in ids) + "]")
    assert [row.id for row in inputs.rows()] == ids


def test_bad_elements_are_rows(tmp_path: Path) -> None:
    elements = [
        '{"a": 1}', "7", "[]", '{"a": }', "", '{"a": NaN}', '{"a": 1e999}', r'{"a": "\ud83d"}', '{"a": 1} {}',
        '{"a": 1}}', '{"a": ' + "[" * 3000 + "]" * 3000 + "}", '{"a": ' + "1" * 5000 + "}",
        '{"b": 1, "b": 2}',
    ]  # fmt: skip
    rows = list(read(tmp_path, "[" + ", ".join(elements) + ",]").rows())
    json_error, number = "invalid_json", "number_out_of_range"
    expected = [
        None, json_error, json_error, json_error, json_error, None, number, "invalid_unicode", json_error,
        json_error, json_error, number, None, json_error,
    ]  # fmt: skip
    assert classes(rows) == expected
    assert rows[1].error is not None
    assert rows[1].error.message == "in.json line 1: the record holds a number, not an object {...}"
    assert rows[12].notes == ("duplicate_key",)
    strict = read(tmp_path, "[" + ", ".join(elements) + "]", strict_json=True)
    assert [c for c in classes(strict.rows()) if c is None] == [None]


def test_bytes_that_are_not_utf8(tmp_path: Path) -> None:
    data = b'[{"a": "\xff"}, {"a": "ok"}]'
    assert classes(read(tmp_path, data).rows()) == ["invalid_unicode", None]
    assert [row.values["a"] for row in read(tmp_path, data, unicode="replace").rows()] == ["\ufffd", "ok"]


@pytest.mark.parametrize("data", ["[]", " [ \n ] ", "\n[]\n"])
def test_arrays_without_rows(tmp_path: Path, data: str) -> None:
    assert list(read(tmp_path, data).rows()) == []


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("", "is empty; a JSON file holds one array"),
        (" \n", "is empty"),
        ('{"a": 1}', r"line 1 does not begin an array \[...\] of records"),
        ("\n7", "line 2 does not begin an array"),
        ('[{"a": 1}]\n[{"a": 2}]', "line 2 goes on after the end of the array, at byte 11"),
        ('[{"a": 1}] x', "goes on after the end of the array"),
        ('[{"a": 1},\n{"a": "x},\n{"a": 2}]', r"record that begins at line 2 .*; restore the file"),
        (
            '[{"a": 1},\n{"a": [}',
            "is cut, or a quote or bracket is missing in the record that begins at line 2",
        ),
        ("[", "not closed at byte 1"),
    ],
)
def test_what_is_not_one_array(tmp_path: Path, data: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        list(read(tmp_path, data, format="json").rows())
    assert "in.json" in str(caught.value)


def test_a_cut_array_is_kept_on_request(tmp_path: Path) -> None:
    inputs = read(tmp_path, '[{"a": 1}, {"a": 2}, {"a"', on_truncated="keep")
    assert [row.values["a"] for row in inputs.rows()] == [1, 2]
    assert "the rows before it were kept" in inputs.notes[0]
    whole = gzip.compress(json.dumps([{"a": str(i) * 9} for i in range(99)]).encode())
    path = write(tmp_path, "x.json.gz", whole[:-20])
    with pytest.raises(InputError, match=rf"compressed stream ends at byte {len(whole) - 20}"):
        list(open_input(path).rows())
    assert 0 < len(list(open_input(path, on_truncated="keep").rows())) < 99


def test_too_long_elements_are_rows(tmp_path: Path) -> None:
    data = json.dumps([{"a": 1}, {"a": "x" * 600_000}, {"a": 3}])
    rows = list(read(tmp_path, data, max_record_bytes=1000).rows())
    assert classes(rows) == [None, "invalid_json", None]
    assert rows[1].error is not None
    assert "the record has 600,009 bytes, more than the limit of 1,000" in rows[1].error.message


def test_memory_is_that_of_one_element() -> None:
    element = b'{"a": "' + b"x" * 1000 + b'"},\n'
    sizes = chain([1], repeat(len(element) * 200, 300), repeat(0))

    class Endless(Chunks):
        def read_chunk(self) -> bytes:
            size = next(self._sizes)
            return b"[" if size == 1 else element * (size // len(element))

    records = JsonArrayRecords(Endless(b"", sizes), "x", 1 << 20)
    tracemalloc.start()
    with pytest.raises(TruncatedStream):
        deque(iter(records.next, None), maxlen=0)
    assert tracemalloc.get_traced_memory()[1] < 3_000_000
    tracemalloc.stop()
