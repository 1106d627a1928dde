"""CSV by RFC 4180: quoting, headers, delimiters, bad records, and the hard cases that JSONL has too."""

import csv
import gzip
import io
from pathlib import Path

import pytest
from data_files import classes, compress, write, write_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.data.results import plan_output
from batchgen.data.source import InputSet, open_input
from batchgen.types import InputError, UsageError

BOM = b"\xef\xbb\xbf"
FIELD = st.text(alphabet='ab,;\t"\n\r é', max_size=6)


def read(tmp_path: Path, data: bytes | str, name: str = "in.csv", **options) -> InputSet:
    return open_input(write(tmp_path, name, data), **options)


def values(inputs: InputSet) -> list[dict]:
    return [dict(row.values) for row in inputs.rows()]


def test_quotes_delimiters_and_line_breaks_in_fields(tmp_path: Path) -> None:
    text = 'id,prompt,x\r\n1,"a, ""b""\nand c",\r\n2,plain,""\r\n"3","d\r\ne","f"'
    inputs = read(tmp_path, text)
    rows = list(inputs.rows())
    assert inputs.columns() == ("id", "prompt", "x")
    assert values(inputs) == [
        {"id": "1", "prompt": 'a, "b"\nand c', "x": None},
        {"id": "2", "prompt": "plain", "x": ""},
        {"id": "3", "prompt": "d\r\ne", "x": "f"},
    ]
    assert [row.id for row in rows] == ["1", "2", "3"]
    assert [row.line for row in rows] == [2, 4, 5]
    assert [row.next_position.line for row in rows] == [3, 4, 6]


@pytest.mark.parametrize(
    ("name", "header", "expected"),
    [
        ("a.csv", "a,b;c", ("a", "b;c")),
        ("a.csv", "a;b;c,d", ("a", "b", "c,d")),
        ("a.csv", "a\tb", ("a", "b")),
        ("a.csv", '"x;y;z",b', ("x;y;z", "b")),
        ("a.csv", "only", ("only",)),
        ("a.tsv", "a,b,c\td", ("a,b,c", "d")),
        ("a.tsv.gz", "a,b,c\td", ("a,b,c", "d")),
    ],
)
def test_the_delimiter_is_the_most_frequent_in_the_header(
    tmp_path: Path, name: str, header: str, expected: tuple[str, ...]
) -> None:
    data = header.encode() + b"\n"
    assert read(tmp_path, gzip.compress(data) if name.endswith("gz") else data, name).columns() == expected


def test_bom_crlf_and_blank_lines(tmp_path: Path) -> None:
    inputs = read(tmp_path, BOM + b"\r\na,b\r\n\r\n   \r\n1,2\r\n\n3,4")
    rows = list(inputs.rows())
    assert [dict(row.values) for row in rows] == [{"a": "1", "b": "2"}, {"a": "3", "b": "4"}]
    assert [row.line for row in rows] == [5, 7]
    assert [row.notes for row in rows] == [("bom_stripped",), ()]
    assert inputs.columns() == ("a", "b")


def test_spaces_are_a_value_where_there_is_one_column(tmp_path: Path) -> None:
    assert values(read(tmp_path, 'p\n   \n\n""\n"x"\n')) == [{"p": "   "}, {"p": ""}, {"p": "x"}]


def test_tabs_alone_are_a_row_of_nulls(tmp_path: Path) -> None:
    assert values(read(tmp_path, "a\tb\n\t\n1\t\n")) == [{"a": None, "b": None}, {"a": "1", "b": None}]


def test_a_bad_record_costs_its_first_line_only(tmp_path: Path) -> None:
    lines = ["a,b", "1,2", '3,"x', "4,5,6", '7,8"9', '10,"y"z', '"11', '12","x"', "13", "14,15"]
    rows = list(read(tmp_path, "\n".join(lines) + "\n").rows())
    bad = "invalid_csv"
    assert classes(rows) == [None, bad, bad, bad, bad, None, bad, None]
    assert [row.line for row in rows] == [2, 3, 4, 5, 6, 7, 9, 10]
    assert dict(rows[5].values) == {"a": "11\n12", "b": "x"}
    messages = [row.error.message for row in rows if row.error]
    assert messages[0].startswith("in.csv line 3: not valid CSV: text follows the closing quote of field 2")
    assert "the record has 3 fields and the header 2" in messages[1]
    assert "field 2 holds a quote but does not begin with one" in messages[2]


def test_a_quote_that_is_never_closed_leaves_the_rows_behind_it(tmp_path: Path) -> None:
    rows = list(read(tmp_path, "a,b\n" + '1,"x\n' + "2,3\n" * 1000).rows())
    assert classes(rows) == ["invalid_csv"] + [None] * 1000
    assert rows[0].error is not None
    assert "the quote that opens in this line is never closed" in rows[0].error.message


def test_limits_on_a_record(tmp_path: Path) -> None:
    data = 'a,b\n1,"' + "x\n" * 60 + '"\n2,' + "y" * 200 + "\n3,4\n"
    rows = list(read(tmp_path, data, max_record_bytes=100).rows())
    assert rows[0].error is not None
    assert "not closed within the limit of 100 bytes" in rows[0].error.message
    long, last = rows[-2:]
    assert long.error is not None
    assert "the line has 202 bytes, more than the limit of 100; shorten or split it" in long.error.message
    assert last.values == {"a": "3", "b": "4"}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ("a,b,a\n1,2,3\n", "two columns of the CSV header are named 'a'"),
        (",b\n1,2\n", r"column 1 has no name in the CSV header; .*index=False"),
        ('a,"b\n', "line 1: the CSV header is not valid: a quote is never closed"),
        ("a,b\r1,2\r", "the CSV header holds a bare carriage return"),
        (b"a,\xff\n", "name 2 in the CSV header is not valid UTF-8"),
    ],
)
def test_bad_headers(tmp_path: Path, data: str | bytes, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read(tmp_path, data)


@pytest.mark.parametrize("data", [b"", BOM, b"\r\n \n"])
def test_a_file_without_header(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(InputError, match="is empty; a CSV file begins with a header"):
        read(tmp_path, data)


def test_a_header_over_several_lines_and_no_rows(tmp_path: Path) -> None:
    inputs = read(tmp_path, '"a\nb",c\r\n')
    assert inputs.columns() == ("a\nb", "c")
    assert list(inputs.rows()) == []


def test_files_need_the_same_columns(tmp_path: Path) -> None:
    paths = [write(tmp_path, "a.csv", "a,b\n1,2\n"), write(tmp_path, "b.csv", "b;a\n3;4\n")]
    assert values(open_input(paths)) == [{"a": "1", "b": "2"}, {"b": "3", "a": "4"}]
    with pytest.raises(UsageError, match="'c' is in one of them only"):
        open_input([*paths, write(tmp_path, "c.csv", "a,b,c\n")])


def test_csv_and_jsonl_side_by_side(tmp_path: Path) -> None:
    paths = [write(tmp_path, "a.csv", "p\n1\n"), write(tmp_path, "b.jsonl", '{"p": 2, "q": 3}\n')]
    inputs = open_input(paths)
    assert values(inputs) == [{"p": "1"}, {"p": 2, "q": 3}]
    assert inputs.columns() == ("p", "q")


def test_bytes_that_are_not_utf8(tmp_path: Path) -> None:
    data = b'a,b\n1,\xff\n2,"x\n\xed\xa0\xbd"\n3,ok\n'
    rows = list(read(tmp_path, data).rows())
    assert classes(rows) == ["invalid_unicode", "invalid_unicode", None]
    assert rows[1].error is not None
    assert "in.csv line 3: byte 0xed at byte 2 of column 'b'" in rows[1].error.message
    replaced = list(read(tmp_path, data, unicode="replace").rows())
    assert [row.values["b"] for row in replaced] == ["\ufffd", "x\n\ufffd\ufffd\ufffd", "ok"]
    assert replaced[0].notes == ("invalid_unicode_replaced",)


@pytest.mark.parametrize("suffix", [".csv.gz", ".csv.bz2", ".csv.zst"])
def test_a_cut_file(tmp_path: Path, suffix: str) -> None:
    whole = compress(b"a,b\n" + b"".join(b'%d,"x\ny"\n' % i for i in range(100)), suffix)
    path = write(tmp_path, f"x{suffix}", whole[:-20])
    with pytest.raises(InputError, match=rf"ends at byte {len(whole) - 20}, .*on_truncated: keep"):
        list(open_input(path).rows())
    rows = list(open_input(path, on_truncated="keep").rows())
    assert classes(rows) == [None] * len(rows)
    assert 40 < len(rows) < 100


def test_a_changed_header_changes_the_digests(tmp_path: Path) -> None:
    first, second = (list(read(tmp_path, data).rows()) for data in ("a,b\n1,2\n", "b,a\n1,2\n"))
    assert first[0].digest != second[0].digest


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_what_is_read_can_be_written(tmp_path: Path, format: str) -> None:
    inputs = read(tmp_path, 'p,"n ""x"""\n"a\nb",\n1,2,3\nc,"\u2028"\n')
    plan = plan_output(inputs, format=format)
    assert write_rows(tmp_path / "out", inputs.rows(), plan).rows == 3


@settings(max_examples=150)
@given(
    table=st.lists(
        st.lists(st.text(alphabet='ab,;\t"\n\r é', max_size=6), min_size=2, max_size=2), max_size=6
    ),
    delimiter=st.sampled_from(",;\t"),
    ending=st.sampled_from(["\n", "\r\n"]),
)
def test_what_pythons_writer_wrote(
    tmp_path: Path, table: list[list[str]], delimiter: str, ending: str
) -> None:
    text = io.StringIO()
    writer = csv.writer(text, delimiter=delimiter, lineterminator=ending, quoting=csv.QUOTE_ALL)
    writer.writerows([["x", "y"], *table])
    with read(tmp_path, text.getvalue()) as inputs:
        rows = list(inputs.rows())
        assert [[row.values["x"], row.values["y"]] for row in rows] == table
        for row in rows:
            again = list(inputs.rows(row.next_position))
            assert [x.digest for x in again] == [x.digest for x in rows[row.ordinal + 1 :]]
