"""Arrow files, and the folders that `datasets.save_to_disk` makes of them."""

import json
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pytest
from data_files import classes, write, write_rows

from batchgen.data.results import plan_output
from batchgen.data.source import open_input
from batchgen.types import InputError, UsageError

TABLE = pa.table({"n": list(range(3000)), "p": [f"text {i} é" for i in range(3000)]})


def arrow(folder: Path, name: str, table: pa.Table = TABLE, *, stream: bool = True, batch: int = 700) -> Path:
    path = folder / name
    create = pa.ipc.new_stream if stream else pa.ipc.new_file
    with create(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=batch)
    return path


def facts(row) -> tuple:
    return row.ordinal, row.id, dict(row.values), row.digest, row.next_position


@pytest.mark.parametrize("stream", [True, False])
def test_any_position(tmp_path: Path, stream: bool) -> None:
    path = str(arrow(tmp_path, "a.arrow", stream=stream))
    inputs = open_input(path)
    assert inputs.format == "arrow"
    assert inputs.columns() == ("n", "p")
    assert inputs.num_rows() == 3000
    rows = [facts(row) for row in inputs.rows()]
    assert [row[2]["n"] for row in rows] == list(range(3000))
    for ordinal in (0, 698, 699, 700, 1500, 2998):
        fresh = open_input(path)
        assert [facts(row) for row in islice(fresh.rows(rows[ordinal][4]), 5)] == rows[
            ordinal + 1 : ordinal + 6
        ]


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_what_is_read_can_be_written(tmp_path: Path, format: str) -> None:
    inputs = open_input(str(arrow(tmp_path, "a.arrow")))
    assert write_rows(tmp_path / "out", inputs.rows(), plan_output(inputs, format=format)).rows == 3000


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("cut", [1, 8, 500, 20_000])
def test_a_cut_file(tmp_path: Path, stream: bool, cut: int) -> None:
    data = arrow(tmp_path, "a.arrow", stream=stream).read_bytes()
    path = write(tmp_path, "b.arrow", data[:-cut])
    with pytest.raises(InputError, match=rf"{path}: not readable as Arrow, it is cut"):
        open_input(path)


def test_what_is_no_arrow_file(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not begin as an Arrow file"):
        open_input(write(tmp_path, "a.arrow", b"{}"))
    with pytest.raises(UsageError, match="is Arrow, not csv; set it to auto"):
        open_input(str(arrow(tmp_path, "b.arrow", stream=False)), format="csv")


def test_offsets_that_point_elsewhere(tmp_path: Path) -> None:
    path = arrow(tmp_path, "a.arrow")
    data = bytearray(path.read_bytes())
    batch = pa.ipc.open_stream(data).read_next_batch()
    offsets = data.index(batch.column("p").buffers()[1].to_pybytes()[:400])
    data[offsets + 40 : offsets + 44] = b"\xff\xff\xff\x7f"
    with pytest.raises(InputError, match="corrupt data in record batch 0"):
        list(open_input(write(tmp_path, "b.arrow", bytes(data))).rows())


def test_text_that_is_not_utf8_by_policy(tmp_path: Path) -> None:
    table = pa.table({"p": pa.array([b"ok", b"a\xffb"]).view(pa.string())})
    path = str(arrow(tmp_path, "a.arrow", table))
    assert classes(open_input(path).rows()) == [None, "invalid_unicode"]
    assert [row.values["p"] for row in open_input(path, unicode="replace").rows()] == ["ok", "a\ufffdb"]


def save(folder: Path, *files: str, **state: object) -> Path:
    folder.mkdir(parents=True)
    for file in files:
        arrow(folder, file)
    described = {"_data_files": [{"filename": file} for file in files], **state}
    (folder / "state.json").write_text(json.dumps(described))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_a_saved_dataset_in_its_own_order(tmp_path: Path) -> None:
    names = [f"data-{i:05}-of-00011.arrow" for i in (10, 9, 0)]
    folder = save(tmp_path / "saved", *names, _indices_data_files=None)
    inputs = open_input(str(folder))
    assert [file.name for file in inputs.files] == names
    assert inputs.num_rows() == 9000
    assert inputs.fingerprint()["format"] == "arrow"


def test_what_datasets_saves(tmp_path: Path) -> None:
    from datasets import Dataset, DatasetDict

    data = Dataset.from_dict({"p": ["a", "b", "c"], "n": [1, 2, 3]})
    data.shuffle(seed=1).save_to_disk(str(tmp_path / "one"), num_shards=2)
    assert sorted(row.values["p"] for row in open_input(str(tmp_path / "one")).rows()) == ["a", "b", "c"]
    DatasetDict({"train": data, "test": data}).save_to_disk(str(tmp_path / "two"))
    with pytest.raises(
        UsageError, match=r"holds the splits of a dataset; name one: .*two/train or .*two/test"
    ):
        open_input(str(tmp_path / "two"))
    assert len(list(open_input(str(tmp_path / "two" / "test")).rows())) == 3
    DatasetDict({"only": data}).save_to_disk(str(tmp_path / "three"))
    assert len(list(open_input(str(tmp_path / "three")).rows())) == 3


def test_folders_that_cannot_be_read(tmp_path: Path) -> None:
    folder = save(tmp_path / "shuffled", "a.arrow", _indices_data_files=[{"filename": "indices.arrow"}])
    with pytest.raises(
        UsageError, match="in another order than its files; save it again with flatten_indices"
    ):
        open_input(str(folder))
    (folder / "state.json").write_text("{")
    with pytest.raises(InputError, match=r"state.json: does not describe a saved dataset"):
        open_input(str(folder))
