"""Random bytes as CSV, JSON arrays, Parquet and Arrow: the rows are those that a slow reader of another kind
finds, or there is a clean error; nothing crashes or hangs.

BATCHGEN_FUZZ multiplies the number of inputs; `make fuzz` runs 100,000.
"""

import contextlib
import io
import os
import random
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_files import compress, write

from batchgen.data.row import Row
from batchgen.data.source import open_input
from batchgen.types import InputError, UsageError

SCALE = int(os.environ.get("BATCHGEN_FUZZ", "1"))
BOM = b"\xef\xbb\xbf"
JSON_PIECES = [
    b"{", b"}", b"[", b"]", b'"', b"\\", b",", b":", b"\n", b" ", b'{"a": 1}', b'{"a": "x,]}"}', b"null",
    b'{"a": [1, {"b": "\\""}]}', b'\\"', b"\xff", b"\xed\xa0\xbd", b"NaN", b"1e999", b"\r\n", b"\0", b",",
    b'{"a": {"b": [[]]}},\n', b"\\ud83d", BOM, b"1", b",",
]  # fmt: skip
CSV_PIECES = [
    b"\n", b"\n", b"\r\n", b"\r", b",", b",", b'"', b'"', b'""', b"a", b"b c", b";", b"\t", b" ", b"\xff",
    b"1,2\n", b'"x\ny",z\n', b'3,"4"\r\n', b'"u""v",w\n', b",\n", b'"",""\n', b"\0", BOM, "é".encode(),
]  # fmt: skip


def check_resume(path: str, rows: list[Row], rng: random.Random, **options: object) -> None:
    """The rows from any position are those that came after it."""
    if not rows:
        return
    start = rng.choice(rows)
    with open_input(path, **options) as inputs:  # type: ignore[arg-type]
        again = list(inputs.rows(start.next_position))
    assert list(map(repr, again)) == list(map(repr, rows[start.ordinal + 1 :]))


def elements(data: bytes) -> list[tuple[int, bytes]] | None:
    """The elements of an array and the lines they begin on, one byte at a time; None if it is none."""
    text = data.removeprefix(BOM)
    place = len(text) - len(text.lstrip(b" \t\r\n"))
    if text[place : place + 1] != b"[":
        return None
    found = []
    depth, in_string, start = 0, False, place + 1
    skip = False
    for i in range(place + 1, len(text)):
        byte = text[i : i + 1]
        if skip:
            skip = False
        elif in_string:
            in_string, skip = byte != b'"', byte == b"\\"
        elif byte == b'"':
            in_string = True
        elif byte in (b"[", b"{"):
            depth += 1
        elif depth == 0 and byte in (b",", b"]"):
            element = text[start:i]
            content = element.strip(b" \t\r\n")
            first = start + len(element) - len(element.lstrip(b" \t\r\n"))
            if byte == b"," or content or found:
                found.append((text.count(b"\n", 0, first) + 1, content))
            if byte == b"]":
                return None if text[i + 1 :].strip(b" \t\r\n") else found
            start = i + 1
        elif byte in (b"]", b"}"):
            depth = max(0, depth - 1)
    return None


@pytest.mark.parametrize("seed", range(4))
def test_json_arrays(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(150 * SCALE):
        middle = b"".join(rng.choices(JSON_PIECES, k=rng.randint(0, 25)))
        data = rng.choice([b"[", b"\n [", BOM + b"[", b""]) + middle + rng.choice([b"]", b"]\n", b""])
        expected = elements(data)
        suffix = rng.choice([".json", ".json.gz", ".json.zst"])
        path = write(tmp_path, f"x{suffix}", compress(data, suffix))
        options = {"format": "json", "max_record_bytes": rng.choice([20, 100_000])}
        with open_input(path, **options) as inputs:
            try:
                rows = list(inputs.rows())
            except InputError:
                assert expected is None, data
                continue
        assert expected is not None, data
        assert [row.line for row in rows] == [line for line, _ in expected], data
        for row, (_, content) in zip(rows, expected, strict=True):
            if len(content) > options["max_record_bytes"] or not content.startswith(b"{"):
                assert row.error is not None, data
        check_resume(path, rows, rng, **options)


def records(text: bytes, delimiter: bytes) -> list[tuple[int, list[bytes | None] | None]]:
    """CSV one byte at a time: the line of each record and its fields, None for a bad one."""
    lines = text.split(b"\n")
    if not lines[-1]:
        lines.pop()
    found: list[tuple[int, list[bytes | None] | None]] = []
    at = 0
    while at < len(lines):
        fields, used = one_record(lines[at:], delimiter)
        found.append((at + 1, fields))
        at += used
    return found


def one_record(lines: list[bytes], delimiter: bytes) -> tuple[list[bytes | None] | None, int]:
    fields: list[bytes | None] = []
    field, state = b"", "start"
    for used, line in enumerate(lines, 1):
        for i in range(len(line)):
            byte = line[i : i + 1]
            last = i == len(line) - 1
            if state == "quoted":
                state = "after quote" if byte == b'"' else state
                field += b"" if byte == b'"' else byte
            elif state == "after quote" and byte == b'"':
                field, state = field + b'"', "quoted"
            elif byte == delimiter:
                fields.append(field if state == "after quote" else field or None)
                field, state = b"", "start"
            elif byte == b"\r" and last:
                continue
            elif state == "start" and byte == b'"':
                state = "quoted"
            elif state == "after quote" or byte == b'"':
                return None, 1
            else:
                field, state = field + byte, "plain"
        if state == "quoted":
            field += b"\n"
            continue
        fields.append(field if state == "after quote" else field or None)
        return fields, used
    return None, 1


@pytest.mark.parametrize("seed", range(4))
def test_csv(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(150 * SCALE):
        names, delimiter = rng.choice([([b"p", b"q"], b","), ([b"p"], b","), ([b"p", b"q", b"r"], b";")])
        body = b"".join(rng.choices(CSV_PIECES, k=rng.randint(0, 30)))
        data = rng.choice([b"", BOM]) + delimiter.join(names) + b"\n" + body
        suffix = rng.choice([".csv", ".csv.gz", ".csv.bz2"])
        path = write(tmp_path, f"x{suffix}", compress(data, suffix))
        blank = b"" if len(names) == 1 else b" "
        lines = body.split(b"\n")
        expected = [
            (line + 1, fields)
            for line, fields in records(body, delimiter)
            if lines[line - 1].removesuffix(b"\r").strip(blank)
        ]
        with open_input(path) as inputs:
            rows = list(inputs.rows())
        assert [row.line for row in rows] == [line for line, _ in expected], data
        for row, (_, fields) in zip(rows, expected, strict=True):
            if fields is None or len(fields) != len(names):
                assert row.error is not None
                assert row.error.error_class.value == "invalid_csv", data
            elif row.error is None:
                assert [v if v is None else v.encode() for v in row.values.values()] == fields, data
        check_resume(path, rows, rng)


def damaged(whole: bytes, rng: random.Random) -> bytes:
    data = bytearray(whole)
    for _ in range(rng.randint(1, 4)):
        place = rng.randrange(len(data))
        if rng.random() < 0.5:
            data[place] = rng.randrange(256)
        else:
            data[place : place + 4] = rng.randbytes(rng.randint(0, 8))
    return bytes(data[: rng.randrange(len(data))] if rng.random() < 0.1 else data)


def table(rng: random.Random) -> pa.Table:
    rows = rng.randint(0, 50)
    return pa.table(
        {
            "p": [rng.choice(["", "text é", None, "x" * 100]) for _ in range(rows)],
            "n": pa.array([rng.choice([None, 1, -5]) for _ in range(rows)], pa.int64()),
            "m": pa.array([[{"role": "user", "content": None}]] * rows),
        }
    )


def as_parquet(rng: random.Random) -> bytes:
    out = io.BytesIO()
    pq.write_table(
        table(rng),
        out,
        row_group_size=rng.choice([7, 100]),
        compression=rng.choice(["none", "zstd", "snappy"]),
        use_dictionary=rng.random() < 0.5,
        write_page_checksum=True,
    )
    return out.getvalue()


def as_arrow(rng: random.Random) -> bytes:
    out = io.BytesIO()
    content = table(rng)
    create = rng.choice([pa.ipc.new_stream, pa.ipc.new_file])
    with create(out, content.schema) as writer:
        writer.write_table(content, max_chunksize=7)
    return out.getvalue()


@pytest.mark.parametrize(("name", "make"), [("x.parquet", as_parquet), ("x.arrow", as_arrow)])
def test_damaged_tables(tmp_path: Path, name: str, make: Callable[[random.Random], bytes]) -> None:
    rng = random.Random(13)
    for _ in range(250 * SCALE):
        path = write(tmp_path, name, damaged(make(rng), rng))
        with contextlib.suppress(InputError, UsageError), open_input(path) as inputs:
            rows = list(inputs.rows())
            assert len(rows) == inputs.num_rows()
            assert [row.ordinal for row in rows] == list(range(len(rows)))
