"""Random bytes as JSONL: every physical line that is not blank is one row, and nothing crashes.

BATCHGEN_FUZZ multiplies the number of inputs.
"""

import contextlib
import os
import random
from pathlib import Path

import pytest
from data_files import TEXT_SUFFIXES, compress, write, write_rows

from batchgen.data.line_reader import BLANK
from batchgen.data.results import plan_output
from batchgen.data.source import open_input
from batchgen.types import InputError

SCALE = int(os.environ.get("BATCHGEN_FUZZ", "1"))
BOM = b"\xef\xbb\xbf"
PIECES = [
    b"\n", b"\n", b"\r\n", b"\r", b" ", b"\t", b"\v", b"\0", BOM, b"{", b"}", b"[", b"]", b'"', b"\\", b",",
    b":", b"\xc2\x85", b"1", b"-",
    b'{"a": 1}\n', b'{"a": "x"}\r\n', b'{"p": [1, {"q": null}]}\n', b'{"a": NaN}', b'{"a": 1e999}\n',
    b"\\ud83d", b"\\ude00", b"\xff", b"\xed\xa0\xbd", b"\xe2\x80\xa8", b"true", b"null", b"1" * 4400,
    b"[" * 300, b'{"id":1,"id":2}\n', b'{"extra":{"row":1}}\n', b'{"a":1.50}\n', b"\x1f", b"\x7f", b"e", b".",
]  # fmt: skip


def random_text(rng: random.Random) -> bytes:
    data = b"".join(rng.choices(PIECES, k=rng.randint(0, 40)))
    # UTF-16 and compressed files are told by their first bytes and never reach the line reader.
    return data if not data.startswith((b"\x1f", b"\xff")) else b"x" + data


def physical_lines(data: bytes) -> list[int]:
    lines = data.removeprefix(BOM).split(b"\n")
    return [number for number, line in enumerate(lines, 1) if line.strip(BLANK)]


@pytest.mark.parametrize("seed", range(8))
def test_every_line_is_accounted_for(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(300 * SCALE):
        data = random_text(rng)
        suffix = rng.choice(TEXT_SUFFIXES)
        unicode = rng.choice(["error", "replace"])
        path = write(tmp_path, f"x{suffix}", compress(data, suffix))
        inputs = open_input(path, unicode=unicode, max_record_bytes=rng.choice([100, 100_000]))
        rows = list(inputs.rows())
        assert [row.line for row in rows] == physical_lines(data), data
        assert [row.ordinal for row in rows] == list(range(len(rows)))
        if rows:
            start = rng.choice(rows)
            again = list(inputs.rows(start.next_position))
            assert list(map(repr, again)) == list(map(repr, rows[start.ordinal + 1 :])), data
        inputs.close()


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_whatever_is_read_can_be_written(tmp_path: Path, format: str) -> None:
    rng = random.Random(99)
    renames = {"row": "our_row", "id": "our_id"}
    for _ in range(60 * SCALE):
        path = write(tmp_path, "x.jsonl", random_text(rng))
        inputs = open_input(path, unicode=rng.choice(["error", "replace"]))
        plan = plan_output(inputs, format=format, renames=renames)
        written = write_rows(tmp_path / "out", inputs.rows(), plan)
        assert written.rows == sum(1 for _ in inputs.rows())
        inputs.close()


@pytest.mark.parametrize("suffix", TEXT_SUFFIXES[1:])
def test_damaged_compressed_files_end_in_an_input_error_or_rows(tmp_path: Path, suffix: str) -> None:
    rng = random.Random(5)
    whole = compress(b'{"a": "some text", "b": [1, 2, 3]}\n' * 200, suffix)
    for _ in range(200 * SCALE):
        data = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            data[rng.randrange(len(data))] = rng.randrange(256)
        del data[rng.randrange(len(data)) :]
        path = write(tmp_path, f"x{suffix}", bytes(data[:4] and whole[:4] + data[4:]))
        inputs = open_input(path, on_truncated=rng.choice(["keep", "stop"]))
        with contextlib.suppress(InputError):
            assert all(row.error is None or row.error.message for row in inputs.rows())
