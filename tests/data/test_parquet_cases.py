"""Parquet input: lazily by batches, damage found and named, types as they are."""

import datetime
import gc
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pyarrow.parquet.encryption as pe
import pytest
from data_files import classes, parquet, write

from batchgen.data.source import open_input
from batchgen.types import InputError, UsageError

NUMBERS = pa.table({"n": list(range(5000)), "p": [f"text {i}" for i in range(5000)]})
MESSAGE = pa.struct(
    [
        ("role", pa.string()),
        ("content", pa.string()),
        ("tool_calls", pa.list_(pa.struct([("name", pa.string()), ("arguments", pa.string())]))),
        ("name", pa.string()),
    ]
)


def test_c14_null_struct_fields_are_dropped_for_prompts(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "tool_calls": [{"name": "f"}]}]
    table = pa.table({"messages": pa.array([chat, None], pa.list_(MESSAGE))})
    first, second = open_input(parquet(tmp_path, table)).rows()
    assert first.values["messages"] == chat
    assert second.values["messages"] is None
    assert dict(first.values) == {"messages": chat}


def test_c19_footer(tmp_path: Path) -> None:
    path = parquet(tmp_path, NUMBERS)
    data = Path(path).read_bytes()
    for cut in (data[:-8], data[:-1], data[: len(data) // 2], b"", b"PAR1", b"PAR1\xff\xff\xff\xffPAR1"):
        write(tmp_path, "in.parquet", cut)
        with pytest.raises(InputError, match=rf"{path}: no Parquet footer at its end") as caught:
            open_input(path, on_truncated="keep")
        assert caught.value.exit_code == 3


def test_damaged_footer_names_the_file(tmp_path: Path) -> None:
    path = parquet(tmp_path, NUMBERS)
    data = bytearray(Path(path).read_bytes())
    data[-60:-8] = b"\xff" * 52
    with pytest.raises(InputError, match=rf"{path}: not readable as Parquet"):
        open_input(write(tmp_path, "in.parquet", bytes(data)))


def test_damaged_pages_name_file_and_row_group(tmp_path: Path) -> None:
    path = parquet(tmp_path, NUMBERS, row_group_size=2000, compression="zstd")
    data = bytearray(Path(path).read_bytes())
    column = pq.read_metadata(path).row_group(1).column(1)
    start = column.dictionary_page_offset or column.data_page_offset
    data[start : start + 40] = b"\xff" * 40
    write(tmp_path, "in.parquet", bytes(data))
    read = []
    with pytest.raises(InputError, match=rf"{path}: corrupt data in row group 1 at or after row 2000"):
        read.extend(iter(open_input(path).rows()))
    assert len(read) == 2000


def test_rows_ids_and_empty_row_groups(tmp_path: Path) -> None:
    path = str(tmp_path / "in.parquet")
    with pq.ParquetWriter(path, NUMBERS.schema) as writer:
        for piece in (NUMBERS.slice(0, 0), NUMBERS.slice(0, 3), NUMBERS.slice(0, 0), NUMBERS.slice(3, 2)):
            writer.write_table(piece)
    rows = list(open_input(path).rows())
    assert [row.values["n"] for row in rows] == [0, 1, 2, 3, 4]
    assert [row.id for row in rows] == [f"in.parquet:{i}" for i in range(5)]
    assert [row.line for row in rows] == [0] * 5
    assert [row.values["n"] for row in open_input(path).rows(rows[2].next_position)] == [3, 4]


def test_a_file_without_rows(tmp_path: Path) -> None:
    inputs = open_input(parquet(tmp_path, NUMBERS.slice(0, 0)))
    assert list(inputs.rows()) == []
    assert inputs.columns() == ("n", "p")


def test_id_column_of_any_scalar_type(tmp_path: Path) -> None:
    day = datetime.date(2024, 2, 29)
    table = pa.table({"i": [2**63 - 1, None], "d": [day, day], "l": [[1], [2]]})
    path = parquet(tmp_path, table)
    assert [row.id for row in open_input(path, id_column="d").rows()] == ["2024-02-29"] * 2
    rows = list(open_input(path, id_column="i").rows())
    assert [row.id for row in rows] == ["9223372036854775807", "in.parquet:1"]
    assert classes(rows) == [None, "missing_column"]
    assert classes(open_input(path, id_column="l").rows()) == ["missing_column"] * 2
    with pytest.raises(UsageError, match="has no column 'key'; it has i, d, l"):
        open_input(path, id_column="key")


def test_strings_that_are_not_utf8_by_policy(tmp_path: Path) -> None:
    bad = pa.array([b"ok", b"a\xffb", None]).view(pa.string())
    nested = pa.StructArray.from_arrays([pa.array([b"\xed\xa0\xbd", b"x", b"y"]).view(pa.string())], ["s"])
    path = parquet(tmp_path, pa.table({"p": bad, "q": nested}))
    rows = list(open_input(path).rows())
    assert classes(rows) == ["invalid_unicode", "invalid_unicode", None]
    assert rows[1].error is not None
    assert "in.parquet row 1: column 'p': byte 1 of the text" in rows[1].error.message
    replaced = list(open_input(path, unicode="replace").rows())
    assert [row.values["p"] for row in replaced] == ["ok", "a\ufffdb", None]
    assert replaced[0].values["q"] == {"s": "\ufffd\ufffd\ufffd"}
    assert [row.notes for row in replaced] == [("invalid_unicode_replaced",)] * 2 + [()]
    assert [row.digest for row in replaced] == [row.digest for row in rows]


def test_files_must_agree(tmp_path: Path) -> None:
    first = parquet(tmp_path, NUMBERS, "a.parquet")
    swapped = parquet(tmp_path, NUMBERS.select(["p", "n"]), "b.parquet")
    inputs = open_input([first, swapped])
    assert [row.values["n"] for row in inputs.rows()] == [*range(5000), *range(5000)]
    assert next(inputs.rows()).digest == list(inputs.rows())[5000].digest
    for other, difference in (
        (NUMBERS.append_column("z", NUMBERS["n"]), "column 'z' is additional"),
        (NUMBERS.select(["n"]), "column 'p' is missing"),
        (NUMBERS.set_column(0, "n", NUMBERS["n"].cast(pa.int32())), "column 'n' is int32, not int64"),
    ):
        path = parquet(tmp_path, other, "c.parquet")
        with pytest.raises(UsageError, match=difference):
            open_input([first, path])


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    table = pa.table([pa.array([1]), pa.array([2])], names=["a", "a"])
    with pytest.raises(UsageError, match="two columns named 'a'"):
        open_input(parquet(tmp_path, table))


def test_reading_holds_a_few_batches_not_the_file(tmp_path: Path) -> None:
    size = 20_000
    texts = pa.array([f"{i:0>1000}" for i in range(size)])
    path = parquet(tmp_path, pa.table({"p": texts}), row_group_size=size, use_dictionary=False)
    total = texts.nbytes
    del texts
    gc.collect()
    before = pa.total_allocated_bytes()
    inputs = open_input(path)
    peak = max(pa.total_allocated_bytes() - before for _ in islice(inputs.rows(), size))
    assert peak < total / 2


class _NoKeyServer(pe.KmsClient):
    """Keys are kept as they are."""

    def wrap_key(self, key_bytes: bytes, master_key_identifier: str) -> str:
        return key_bytes.hex()

    def unwrap_key(self, wrapped_key: str, master_key_identifier: str) -> bytes:
        return bytes.fromhex(wrapped_key)


def test_encrypted_columns_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    factory = pe.CryptoFactory(lambda _: _NoKeyServer())
    keys = pe.EncryptionConfiguration(footer_key="f", column_keys={"c": ["a"]}, plaintext_footer=True)
    properties = factory.file_encryption_properties(pe.KmsConnectionConfig(), keys)
    table = pa.table({"a": ["x"]})
    with pq.ParquetWriter(path, table.schema, encryption_properties=properties) as writer:
        writer.write_table(table)
    with pytest.raises(InputError, match=rf"{path}: holds encrypted columns"):
        list(open_input(str(path)).rows())
