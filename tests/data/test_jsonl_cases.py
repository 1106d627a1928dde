"""The hard cases of JSONL input on real files; the names are those of the list of cases."""

import gzip
import json
from pathlib import Path

import pytest
from data_files import TEXT_SUFFIXES, classes, compress, jsonl, write, write_rows

from batchgen.data.results import plan_output
from batchgen.data.source import open_input
from batchgen.types import InputError, UsageError

BOM = b"\xef\xbb\xbf"


def records(path: Path) -> list[dict]:
    text = path.read_bytes()
    assert text.endswith(b"\n")
    return [json.loads(line, parse_constant=pytest.fail) for line in text.decode().split("\n")[:-1]]


def output(tmp_path: Path, inputs) -> list[dict]:
    plan = plan_output(inputs, format="jsonl")
    write_rows(tmp_path / "out", inputs.rows(), plan, compression="none")
    return records(tmp_path / "out")


def test_c01_bom(tmp_path: Path) -> None:
    lines = [
        b'{"a": {"x": 1}, "prompt": "p"}',
        b'{"a": {"x": 2}, "prompt": "q"}',
        b'{"a": null, "prompt": "r"}',
    ]
    plain = list(jsonl(tmp_path, *lines, name="plain.jsonl").rows())
    inputs = jsonl(tmp_path, BOM + lines[0], *lines[1:])
    rows = list(inputs.rows())
    assert [row.values for row in rows] == [row.values for row in plain]
    assert inputs.columns() == ("a", "prompt")
    assert [row.notes for row in rows] == [("bom_stripped",), (), ()]


def test_c02_crlf(tmp_path: Path) -> None:
    path = write(tmp_path, "x.jsonl", b'{"p": "a"}\r\n\r\n   \t\r\n{"p": "b"}\r\nbroken\r\n{"p": "c"}')
    rows = list(open_input(path).rows())
    assert [row.line for row in rows] == [1, 4, 5, 6]
    assert [row.ordinal for row in rows] == [0, 1, 2, 3]
    assert classes(rows) == [None, None, "invalid_json", None]
    assert rows[2].error is not None
    assert rows[2].error.message.startswith("x.jsonl line 5: ")
    assert "\r" not in json.dumps([row.values for row in rows])


def test_bare_cr_does_not_split(tmp_path: Path) -> None:
    rows = list(open_input(write(tmp_path, "x.jsonl", b'{"p":\r1}\n{"p": 2}\r{"p": 3}\n')).rows())
    assert classes(rows) == [None, "invalid_json"]


def test_c03_line_separators(tmp_path: Path) -> None:
    text = "a\u2028b\u2029c\x85d\ve\ff"
    inputs = jsonl(
        tmp_path,
        json.dumps({"prompt": text}, ensure_ascii=False).replace("\\u000b", "\v").replace("\\f", "\f"),
    )
    (record,) = output(tmp_path, inputs)
    assert record["prompt"] == text
    assert len((tmp_path / "out").read_text().splitlines()) == 1


def test_c05_nan(tmp_path: Path) -> None:
    inputs = jsonl(tmp_path, '{"p": "a"}', '{"p": "b", "score": NaN}', '{"p": "c", "temperature": Infinity}')
    rows = list(inputs.rows())
    assert classes(rows) == [None, None, None]
    assert [row.nonfinite for row in rows] == [(), ("score",), ("temperature",)]
    assert rows[1].notes == ("nan_replaced",)
    assert output(tmp_path, inputs)[1]["score"] is None


def test_c07_big_integers(tmp_path: Path) -> None:
    ids = ["123456789012345678901234567890", "18446744073709551616"]
    inputs = jsonl(tmp_path, *(f'{{"id": {n}, "p": "x"}}' for n in ids), id_column="id")
    assert [row.id for row in inputs.rows()] == ids
    assert [record["id"] for record in output(tmp_path, inputs)] == ids


def test_c08_surrogate(tmp_path: Path) -> None:
    lines = [r'{"prompt": "ok \ud83d"}', r'{"prompt": "\ud83d\ude00"}']
    rows = list(jsonl(tmp_path, *lines).rows())
    assert classes(rows) == ["invalid_unicode", None]
    assert len(rows[1].values["prompt"]) == 1
    replaced = jsonl(tmp_path, *lines, unicode="replace")
    assert [row.values["prompt"] for row in replaced.rows()] == ["ok \ufffd", "\U0001f600"]
    assert output(tmp_path, replaced)[0]["prompt"] == "ok \ufffd"


def test_c09_bad_utf8(tmp_path: Path) -> None:
    lines = [b'{"p": "a"}', b'{"p": "\xff"}', b'{"p": "c"}']
    rows = list(jsonl(tmp_path, *lines).rows())
    assert classes(rows) == [None, "invalid_unicode", None]
    assert rows[1].error is not None
    assert "in.jsonl line 2: byte 0xff at byte 7 of the line" in rows[1].error.message
    assert [row.id for row in rows] == ["in.jsonl:0", "in.jsonl:1", "in.jsonl:2"]


@pytest.mark.parametrize("suffix", TEXT_SUFFIXES[1:])
def test_c10_torn_input(tmp_path: Path, suffix: str) -> None:
    # The second member holds rows 3 to 5 and is cut, so rows 1 and 2 are certain.
    first = b'{"n": 1}\n{"n": 2}\n'
    second = b"".join(b'{"n": %d, "x": "%s"}\n' % (n, str(n).encode() * 9) for n in (3, 4, 5))
    whole = compress(first, suffix) + compress(second, suffix)
    path = write(tmp_path, f"x{suffix}", whole[:-20])
    inputs = open_input(path)
    read = []
    with pytest.raises(InputError, match=rf"ends at byte {len(whole) - 20}, .*on_truncated: keep") as caught:
        read.extend(iter(inputs.rows()))
    assert path in str(caught.value)
    assert caught.value.exit_code == 3

    kept = open_input(path, on_truncated="keep")
    rows = list(kept.rows())
    assert [row.values["n"] for row in rows][:2] == [1, 2]
    assert len(rows) < 5
    assert classes(rows) == [None] * len(rows)
    assert list(map(repr, rows)) == list(map(repr, kept.rows()))
    assert len(kept.notes) == 1
    assert "the rows before it were kept" in kept.notes[0]


def test_truncated_file_is_followed_by_the_next(tmp_path: Path) -> None:
    cut = write(tmp_path, "a.jsonl.gz", gzip.compress(b'{"n": 1}\n' * 3000)[:-9])
    inputs = open_input([cut, write(tmp_path, "b.jsonl", '{"n": 2}')], on_truncated="keep")
    rows = list(inputs.rows())
    assert rows[-1].values == {"n": 2}
    assert [row.ordinal for row in rows] == list(range(len(rows)))


def test_c22_id_missing(tmp_path: Path) -> None:
    lines = [
        '{"id": "a"}',
        '{"x": 1}',
        '{"id": null}',
        '{"id": [1]}',
        '{"id": 1.50}',
        '{"id": true}',
        "broken",
    ]
    rows = list(jsonl(tmp_path, *lines, id_column="id").rows())
    assert classes(rows) == [
        None,
        "missing_column",
        "missing_column",
        "missing_column",
        None,
        None,
        "invalid_json",
    ]
    assert [row.id for row in rows] == [
        "a",
        "in.jsonl:1",
        "in.jsonl:2",
        "in.jsonl:3",
        "1.50",
        "true",
        "in.jsonl:6",
    ]
    with pytest.raises(UsageError, match="no column 'key'; it has id, x"):
        jsonl(tmp_path, *lines, id_column="key")


def test_synthetic_ids_are_unique_across_files_of_one_name(tmp_path: Path) -> None:
    paths = []
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        paths.append(write(tmp_path / folder, "a.jsonl", '{"p": 1}\n{"p": 2}\n'))
    assert [row.id for row in open_input(paths).rows()] == [
        "a.jsonl:0",
        "a.jsonl:1",
        "a.jsonl:2",
        "a.jsonl:3",
    ]


def test_too_long_line_is_one_error_row(tmp_path: Path) -> None:
    inputs = jsonl(tmp_path, '{"p": 1}', json.dumps({"p": "x" * 600_000}), '{"p": 3}', max_record_bytes=1000)
    rows = list(inputs.rows())
    assert classes(rows) == [None, "invalid_json", None]
    assert rows[1].error is not None
    assert "600,009 bytes, more than the limit of 1,000" in rows[1].error.message


def test_error_rows_pass_through_the_sink(tmp_path: Path) -> None:
    inputs = jsonl(tmp_path, '{"p": 1}', "broken", "[]")
    out = output(tmp_path, inputs)
    assert [record["status"] for record in out] == ["ok", "error", "error"]
    assert out[1]["error"]["class"] == "invalid_json"
    assert "p" not in out[1]


@pytest.mark.parametrize(
    "data",
    [b"", b"\n \r\n", BOM, BOM + b"\r\n\n", BOM + b" "],
    ids=["empty", "blank", "bom", "bom crlf", "bom sp"],
)
def test_files_without_rows(tmp_path: Path, data: bytes) -> None:
    inputs = open_input(write(tmp_path, "a.jsonl", data))
    assert list(inputs.rows()) == []
    assert inputs.columns() == ()


@pytest.mark.parametrize("option", ["unicode", "on_truncated"])
def test_unknown_policies_are_refused(tmp_path: Path, option: str) -> None:
    with pytest.raises(ValueError, match=f"{option} is .*, not 'maybe'"):
        jsonl(tmp_path, "{}", **{option: "maybe"})
