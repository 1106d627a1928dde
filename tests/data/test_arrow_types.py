"""Every Arrow type that Parquet holds goes through unchanged, and to JSONL as a text that loses nothing."""

from __future__ import annotations

import io
import json
import struct
from decimal import Context, Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_files import parquet, write_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.data.arrow_values import unsupported_type
from batchgen.data.results import OutputPlan, plan_output
from batchgen.data.source import open_input

INT64 = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(st.characters(codec="utf-8"), max_size=6)
SECONDS_OF_DAY = 24 * 3600
UNITS = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


def decimals(digits: int, scale: int) -> st.SearchStrategy[Decimal]:
    most = 10**digits - 1
    return st.integers(-most, most).map(lambda n: Decimal(n).scaleb(-scale, Context(prec=80)))


def halves() -> st.SearchStrategy[float]:
    return st.binary(min_size=2, max_size=2).map(lambda b: struct.unpack("<e", b)[0])


SCALARS: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.bool_(), st.booleans()),
    (pa.int8(), st.integers(-128, 127)),
    (pa.uint16(), st.integers(0, 2**16 - 1)),
    (pa.uint32(), st.integers(0, 2**32 - 1)),
    (pa.int64(), INT64),
    (pa.uint64(), st.integers(0, 2**64 - 1)),
    (pa.float16(), halves()),
    (pa.float32(), st.floats(width=32)),
    (pa.float64(), st.floats()),
    (pa.string(), TEXT),
    (pa.large_string(), TEXT),
    (pa.string_view(), TEXT),
    (pa.binary(), st.binary(max_size=5)),
    (pa.large_binary(), st.binary(max_size=5)),
    (pa.binary_view(), st.binary(max_size=5)),
    (pa.binary(3), st.binary(min_size=3, max_size=3)),
    (pa.decimal32(7, 2), decimals(7, 2)),
    (pa.decimal128(38, 10), decimals(38, 10)),
    (pa.decimal256(76, 40), decimals(76, 40)),
    (pa.date32(), st.integers(-(10**6), 10**6)),
    (pa.null(), st.none()),
    *((pa.duration(unit), INT64) for unit in UNITS),
    *((pa.timestamp(unit), INT64) for unit in ("ms", "us", "ns")),
    *((pa.timestamp(unit, "Europe/Zurich"), INT64) for unit in ("ms", "us", "ns")),
    (pa.time32("ms"), st.integers(0, SECONDS_OF_DAY * 10**3 - 1)),
    (pa.time64("us"), st.integers(0, SECONDS_OF_DAY * 10**6 - 1)),
    (pa.time64("ns"), st.integers(0, SECONDS_OF_DAY * 10**9 - 1)),
    (pa.dictionary(pa.int8(), pa.string()), st.sampled_from(["a", "b", ""])),
]
# These cannot be built inside other types from plain values.
EXTENSIONS: list[tuple[pa.DataType, st.SearchStrategy[Any]]] = [
    (pa.uuid(), st.binary(min_size=16, max_size=16)),
    (pa.json_(), TEXT.map(json.dumps)),
]
Typed = tuple[pa.DataType, st.SearchStrategy[Any]]


def nested(inner: Typed) -> list[Typed]:
    type_, values = inner
    items, text = st.none() | values, st.none() | TEXT
    entries = st.dictionaries(TEXT, items, max_size=2)
    field = pa.field("item", type_, metadata={"unit": "m"})
    return [
        (pa.list_(type_), st.lists(items, max_size=3)),
        (pa.large_list(type_), st.lists(items, max_size=3)),
        (pa.list_(type_, 2), st.lists(items, min_size=2, max_size=2)),
        (pa.struct([("x", type_), ("y", pa.string())]), st.fixed_dictionaries({"x": items, "y": text})),
        (pa.map_(pa.string(), type_), entries.map(lambda members: list(members.items()))),
        (pa.struct([field]), st.fixed_dictionaries({"item": items})),
    ]


@st.composite
def tables(draw: st.DrawFn) -> pa.Table:
    """A few rows, each column of another type, some with field metadata."""
    rows = draw(st.integers(1, 5))
    fields, arrays = [], []
    for number in range(draw(st.integers(1, 4))):
        type_, values = draw(st.sampled_from(SCALARS + EXTENSIONS))
        # Arrow itself fails to write most of the views inside other types.
        if not isinstance(type_, pa.BaseExtensionType) and type_ not in (pa.string_view(), pa.binary_view()):
            for _ in range(draw(st.integers(0, 2))):
                type_, values = draw(st.sampled_from(nested((type_, values))))
        cells = draw(st.lists(st.none() | values, min_size=rows, max_size=rows))
        fields.append(pa.field(f"c{number}", type_, metadata=draw(st.sampled_from([None, {"k": "v"}]))))
        arrays.append(pa.array(cells, type_))
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields))


def content(table: pa.Table) -> bytes:
    """Equal for equal values, of which NaN is one."""
    out = io.BytesIO()
    pq.write_table(table.combine_chunks(), out)
    return out.getvalue()


@settings(max_examples=50, deadline=None)
@given(tables())
def test_parquet_to_parquet_changes_nothing(tmp_path: Path, table: pa.Table) -> None:
    inputs = open_input(parquet(tmp_path, table, row_group_size=2))
    write_rows(tmp_path / "out", inputs.rows(), plan_output(inputs), group_rows=3)
    before = pq.read_table(tmp_path / "in.parquet")
    after = pq.read_table(tmp_path / "out").select(table.column_names)
    # Parquet has its own names for the items of lists, so the type is the one that reading the input gives.
    assert after.schema.equals(before.schema.remove_metadata(), check_metadata=True)
    assert content(after) == content(before)


@settings(max_examples=50, deadline=None)
@given(tables())
def test_different_values_are_different_texts(tmp_path: Path, table: pa.Table) -> None:
    """But for NaN and the infinities, which are null, since JSON has none."""
    inputs = open_input(parquet(tmp_path, table))
    write_rows(tmp_path / "out", inputs.rows(), plan_output(inputs, format="jsonl"), compression="none")
    lines = (tmp_path / "out").read_text().split("\n")[:-1]
    assert len(lines) == table.num_rows
    records = [json.loads(line, parse_float=str, parse_int=str, parse_constant=pytest.fail) for line in lines]
    for name in table.column_names:
        texts = [json.dumps(record[name]) for record in records]
        column = table.column(name).combine_chunks()
        stored = column.storage if isinstance(column, pa.ExtensionArray) else column
        cells = (pa.concat_arrays([stored.slice(i, 1)]) for i in range(len(texts)))
        single = [content(pa.table([cell], ["x"])) for cell in cells]
        for i in range(len(texts)):
            for j in range(i):
                same = single[i] == single[j]
                assert same == (texts[i] == texts[j]) or "null" in (texts[i] + texts[j])


@pytest.mark.parametrize("type_", [type_ for type_, _ in SCALARS + EXTENSIONS], ids=str)
def test_every_type_can_be_read(type_: pa.DataType) -> None:
    assert unsupported_type(type_) is None


@pytest.mark.parametrize("view", [pa.string_view(), pa.binary_view()], ids=str)
def test_views_inside_other_types_are_written_as_plain_ones(tmp_path: Path, view: pa.DataType) -> None:
    plain = pa.string() if view == pa.string_view() else pa.binary()
    value: Any = "x" * 20 if plain == pa.string() else b"x" * 20

    def types(inner: pa.DataType) -> list[pa.DataType]:
        struct = pa.struct([pa.field("v", inner, metadata={"k": "v"})])
        lists = [pa.list_(inner), pa.list_(inner, 1), pa.large_list(inner)]
        return [struct, pa.map_(pa.string(), inner), *lists]

    cells: list[Any] = [{"v": value}, [("k", value)], [value], [value], [value]]
    columns = [pa.array([cell, cell, cell], type_) for cell, type_ in zip(cells, types(view), strict=True)]
    inputs = open_input(parquet(tmp_path, pa.table(columns, list("abcde"))))
    assert inputs.arrow_schema().field("c").type.value_type == view
    plan = plan_output(inputs)
    assert OutputPlan.from_json(plan.to_json(), inputs).schema() == plan.schema()
    write_rows(tmp_path / "out", list(inputs.rows())[1:], plan, group_rows=1)
    table = pq.read_table(tmp_path / "out")
    assert table.select(list("abcde")).to_pylist() == [dict(zip("abcde", cells, strict=True))] * 2
    assert table.schema.field("a").type == types(plain)[0]
    assert table.schema.field("a").type.field(0).metadata == {b"k": b"v"}
