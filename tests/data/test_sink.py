"""Parts on disk: the same bytes for the same rows, streamed, strict, and nothing left behind on failure."""

import gzip
import hashlib
import json
import os
import subprocess
import sys
import tracemalloc
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from data_files import jsonl, parquet, result, write_rows

from batchgen.data.results import RowResult, plan_output
from batchgen.data.row import Position, Row
from batchgen.data.row_result import pack_ids
from batchgen.data.sink import part_suffix, write_part
from batchgen.data.source import InputSet, open_input
from batchgen.job.part_reader import read_part
from batchgen.types import ErrorClass, RowError, StorageError

COMPRESSIONS = {"parquet": ("zstd", "snappy", "gzip", "none"), "jsonl": ("zstd", "gzip", "none")}
SINKS = [(format, compression) for format, allowed in COMPRESSIONS.items() for compression in allowed]


def unpacked(data: bytes, compression: str) -> bytes:
    if compression == "gzip":
        return gzip.decompress(data)
    return zstandard.decompress(data, 1 << 20) if compression == "zstd" else data


def mixed_input(tmp_path: Path, kind: str, rows: int = 2600) -> InputSet:
    if kind == "jsonl":
        lines = (f'{{"n": {i}, "x": {i}.50, "l": [{i}]}}' if i % 7 else "broken" for i in range(rows))
        return jsonl(tmp_path, *lines)
    words = pa.array([f"w{i % 13}" for i in range(rows)])
    nested = pa.array([{"d": [i], "s": None} for i in range(rows)])
    table = pa.table({"n": list(range(rows)), "w": words.dictionary_encode(), "p": words, "s": nested})
    return open_input(parquet(tmp_path, table, row_group_size=1100))


@pytest.mark.parametrize(("format", "compression"), SINKS)
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_bytes_do_not_depend_on_how_the_input_was_read(
    tmp_path: Path, kind: str, format: str, compression: str
) -> None:
    inputs = mixed_input(tmp_path, kind)
    plan = plan_output(inputs, format=format)
    rows = list(inputs.rows())
    for first in (0, 1000, 1500):
        start = Position() if first == 0 else rows[first - 1].next_position
        variants = [rows[first : first + 1000], islice(open_input(inputs.files[0].path).rows(start), 1000)]
        written = [
            write_rows(tmp_path / f"out{i}", variant, plan, compression=compression, group_rows=300)
            for i, variant in enumerate(variants)
        ]
        assert written[0] == written[1]
        data = (tmp_path / "out0").read_bytes()
        assert data == (tmp_path / "out1").read_bytes()
        assert (written[0].bytes, written[0].rows) == (len(data), 1000)
        assert written[0].digest == hashlib.blake2b(data, digest_size=16).hexdigest()


def test_row_groups_are_fixed_and_metadata_is_bare(tmp_path: Path) -> None:
    inputs = mixed_input(tmp_path, "parquet")
    write_rows(tmp_path / "secret-path", inputs.rows(), plan_output(inputs), group_rows=1000)
    metadata = pq.read_metadata(tmp_path / "secret-path")
    assert [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)] == [1000, 1000, 600]
    assert metadata.row_group(0).column(0).compression == "ZSTD"
    assert set(metadata.metadata) == {b"ARROW:schema"}
    assert b"secret-path" not in (tmp_path / "secret-path").read_bytes()


def test_bytes_are_equal_in_another_process(tmp_path: Path) -> None:
    inputs = mixed_input(tmp_path, "jsonl", 300)
    write_rows(tmp_path / "here", inputs.rows(), plan_output(inputs))
    code = (
        "import sys; from pathlib import Path; from data_files import open_input, write_rows;"
        "from batchgen.data.results import plan_output;"
        "i = open_input(sys.argv[1]); write_rows(Path(sys.argv[2]), i.rows(), plan_output(i))"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "PYTHONHASHSEED": "123"}
    there = tmp_path / "there"
    subprocess.run([sys.executable, "-c", code, inputs.files[0].path, str(there)], check=True, env=env)
    assert there.read_bytes() == (tmp_path / "here").read_bytes()


@pytest.mark.parametrize(("format", "compression"), SINKS)
def test_records_come_back(tmp_path: Path, format: str, compression: str) -> None:
    inputs = jsonl(tmp_path, '{"p": "a"}', "broken")
    plan = plan_output(inputs, format=format)
    path = tmp_path / "out"
    write_rows(path, inputs.rows(), plan, compression=compression)
    if format == "parquet":
        records = pq.read_table(path).to_pylist()
    else:
        raw = path.read_bytes()
        text = unpacked(raw, compression)
        records = [json.loads(line) for line in text.splitlines()]
    first, second = records
    assert first["usage"] == {"prompt_tokens": 3, "completion_tokens": 1, "truncated_tokens": 0}
    assert (first["error"], first["generated_text"]) == (None, "answer")
    assert second["error"]["class"] == "invalid_json"
    assert (second["usage"], second["generated_text"], second["status"]) == (None, None, "error")


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_no_rows(tmp_path: Path, format: str) -> None:
    plan = plan_output(jsonl(tmp_path, "{}"), format=format)
    written = write_part(tmp_path / "out", [], plan, compression="none")
    assert written.rows == 0
    if format == "parquet":
        assert pq.read_table(tmp_path / "out").schema == plan.schema()
    else:
        assert (tmp_path / "out").read_bytes() == b""


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_text_that_is_not_unicode_is_still_stored(tmp_path: Path, format: str) -> None:
    inputs = jsonl(tmp_path, "{}")
    error = RowError(ErrorClass.TEMPLATE, "bad \udc00")
    bad = RowResult("error", "a\ud83d", None, "\ud800", error)
    plan = plan_output(inputs, format=format)
    write_part(tmp_path / "out", ((row, bad) for row in inputs.rows()), plan, compression="none")
    data = (
        pq.read_table(tmp_path / "out").to_pylist()
        if format == "parquet"
        else [json.loads((tmp_path / "out").read_bytes())]
    )
    assert (data[0]["generated_text"], data[0]["stop_reason"]) == ("a\ufffd", "\ufffd")
    assert data[0]["error"]["message"] == "bad \ufffd"


@pytest.mark.parametrize(("format", "compression"), SINKS)
def test_a_failure_leaves_no_file(tmp_path: Path, format: str, compression: str) -> None:
    inputs = mixed_input(tmp_path, "jsonl", 50)
    rows = list(inputs.rows())

    def failing():
        for row in rows[:30]:
            yield row, result(row)
        raise KeyboardInterrupt

    path = tmp_path / "out"
    plan = plan_output(inputs, format=format)
    with pytest.raises(KeyboardInterrupt):
        write_part(path, failing(), plan, compression=compression, group_rows=10)
    with pytest.raises(ValueError, match="row 3 comes after row 3"):
        write_rows(path, [rows[3], rows[3]], plan, compression=compression)
    assert not path.exists()


@pytest.mark.parametrize(("format", "compression"), SINKS)
def test_full_disk(tmp_path: Path, format: str, compression: str) -> None:
    os.symlink("/dev/full", tmp_path / "out")
    inputs = mixed_input(tmp_path, "jsonl", 50)
    with pytest.raises(StorageError, match="No space left on device") as caught:
        write_rows(
            tmp_path / "out", inputs.rows(), plan_output(inputs, format=format), compression=compression
        )
    assert caught.value.exit_code == 5


def test_missing_folder(tmp_path: Path) -> None:
    plan = plan_output(jsonl(tmp_path, "{}"))
    with pytest.raises(StorageError, match="No such file or directory"):
        write_part(tmp_path / "none" / "out", [], plan)


def test_suffixes() -> None:
    parquet, jsonl = [".parquet"] * 4, [".jsonl.zst", ".jsonl.gz", ".jsonl"]
    assert [part_suffix(*sink) for sink in SINKS] == parquet + jsonl


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_writing_holds_one_row_group(tmp_path: Path, format: str) -> None:
    (model,) = jsonl(tmp_path, '{"t": "x"}').rows()
    plan = plan_output(jsonl(tmp_path, '{"t": "x"}'), format=format)

    def rows():
        for i in range(4000):
            yield Row(i, str(i), {"t": f"{i:0>20000}"}, None, 1, "f", model.digest, model.next_position)

    tracemalloc.start()
    write_rows(tmp_path / "out", rows(), plan, group_rows=50)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20_000_000


def test_gzip_holds_neither_a_time_nor_a_name(tmp_path: Path) -> None:
    plan = plan_output(jsonl(tmp_path, "{}"), format="jsonl")
    write_rows(tmp_path / "out", jsonl(tmp_path, "{}").rows(), plan, compression="gzip")
    header = (tmp_path / "out").read_bytes()[:10]
    assert header[:2] == b"\x1f\x8b"
    assert header[3:8] == bytes(5)


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_row_groups_end_with_so_many_bytes_too(tmp_path: Path, kind: str) -> None:
    sizes = [10, 60_000, 10, 300_000, 10, 10, 50_000, 50_000, 10]
    if kind == "jsonl":
        inputs = jsonl(tmp_path, *(json.dumps({"t": "x" * size}) for size in sizes))
    else:
        inputs = open_input(
            parquet(tmp_path, pa.table({"t": ["x" * size for size in sizes]}), row_group_size=1)
        )
    plan = plan_output(inputs)
    for path in (tmp_path / "a", tmp_path / "b"):
        write_rows(path, inputs.rows(), plan, group_rows=6, group_bytes=100_000)
    metadata = pq.read_metadata(tmp_path / "a")
    groups = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    assert groups == [4, 4, 1]
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


INCLUDED = {
    "prompt": "<|user|>h\u00e9\ud800",
    "prompt_token_ids": pack_ids([5, 70_000, 0]),
    "output_token_ids": pack_ids([]),
    "seed": 7,
}


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_what_was_asked_for_beyond_the_answer(tmp_path: Path, format: str) -> None:
    inputs = jsonl(tmp_path, "{}", "broken", "{}")
    plan = plan_output(inputs, format=format, include=list(INCLUDED))
    results = [RowResult("ok", "a", "stop", None, None, (3, 0, 0), INCLUDED), None, None]
    rows = list(inputs.rows())
    results[1] = RowResult.from_error(rows[1].error)
    results[2] = RowResult("ok", "a", included={"seed": 7, "output_token_ids": pack_ids([1])})
    path = tmp_path / ("out" + part_suffix(format, "none"))
    write_part(path, zip(rows, results, strict=True), plan, compression="none")
    expected = [
        {
            "prompt": "<|user|>h\u00e9\ufffd",
            "prompt_token_ids": [5, 70_000, 0],
            "output_token_ids": [],
            "seed": 7,
        },
        dict.fromkeys(INCLUDED),
        {"prompt": None, "prompt_token_ids": None, "output_token_ids": [1], "seed": 7},
    ]
    if format == "parquet":
        table = pq.read_table(path)
        assert table.schema.field("output_token_ids").type == pa.list_(pa.int32())
        assert table.select(list(INCLUDED)).to_pylist() == expected
        assert "usage" not in table.schema.names
    else:
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        assert [{key: line[key] for key in INCLUDED} for line in lines] == expected
        assert list(lines[0])[-4:] == list(INCLUDED)
    back = [row.result.included for row in read_part(path, plan.to_json())]
    assert back[1:] == [None, results[2].included]
    assert back[0] == {**INCLUDED, "prompt": "<|user|>h\u00e9\ufffd"}
