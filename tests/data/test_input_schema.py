"""`input.schema`: which types there are, which values fit them, and what comes out."""

from __future__ import annotations

import datetime as dt
import json
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.data.declared_types import read_type
from batchgen.data.declared_values import DeclaredColumn
from batchgen.data.exact_json import ExactFloat
from batchgen.data.results import OutputPlan, RowResult, plan_output
from batchgen.data.sink import write_part
from batchgen.data.source import open_input
from batchgen.types import ErrorClass, RowFailure, UsageError

UTC = dt.UTC
ARROW = {
    "int64": pa.int64(),
    "double": pa.float64(),
    "float": pa.float32(),
    "string": pa.string(),
    "bool": pa.bool_(),
    "binary": pa.binary(),
    "date32": pa.date32(),
    "timestamp[us, UTC]": pa.timestamp("us", "UTC"),
    "timestamp[ms, tz=UTC]": pa.timestamp("ms", "UTC"),
    "timestamp[s]": pa.timestamp("s"),
    "time32[ms]": pa.time32("ms"),
    "time64[ns]": pa.time64("ns"),
    "duration[s]": pa.duration("s"),
    "decimal128(10, 2)": pa.decimal128(10, 2),
    "list<string>": pa.list_(pa.string()),
    "list<item: list<int8>>": pa.list_(pa.list_(pa.int8())),
    "struct<a: int64, `b c`: list<bool>>": pa.struct([("a", pa.int64()), ("b c", pa.list_(pa.bool_()))]),
    "map<string, uint16>": pa.map_(pa.string(), pa.uint16()),
}


@pytest.mark.parametrize("text", ARROW)
def test_types_and_their_spelling(text: str) -> None:
    found = read_type(text)
    assert found.arrow() == ARROW[text]
    assert read_type(str(found)) == found


def test_types_as_maps_and_lists() -> None:
    found = read_type({"a": "int64", "b c": [{"x": "timestamp[s]"}]})
    assert str(found) == "struct<a: int64, `b c`: list<struct<x: timestamp[s]>>>"
    assert read_type(str(found)) == found


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("flot", "'flot' is no type"),
        ("", "the name of a type is missing at character 1"),
        ("list<", "the name of a type is missing"),
        ("list<string", "'>' is missing"),
        ("int64 x", "'x' after the type int64"),
        ("timestamp", r"'\[' is missing"),
        ("timestamp[h]", "the unit of timestamp is one of s, ms, us, ns"),
        ("time32[ns]", "the unit of time32 is one of s, ms"),
        ("timestamp[s, Europe/Berlin]", "the zone of a timestamp is UTC"),
        ("decimal128(39, 2)", "1 to 38 digits"),
        ("decimal128(3, 4)", "no more behind its point"),
        ("map<int64, string>", "the keys of a map are strings"),
        ("struct<>", "a struct has fields such as"),
        ("struct<a: int8, a: int8>", "the field 'a' twice"),
        ("list<" * 30 + "int8" + ">" * 30, "nested deeper than 20 levels"),
        ([], "a type is a text, a map of names to types, or a list of one type"),
        ({}, "a type is a text"),
        (3, "a type is a text"),
    ],
)
def test_what_is_no_type(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_type(value)


FITTING: list[tuple[str, Any, Any]] = [
    ("int8", -128, -128),
    ("int64", 3.0, 3),
    ("int64", ExactFloat("9007199254740993.0"), 9007199254740993),
    ("uint64", 2**64 - 1, 2**64 - 1),
    ("float64", 2**53, float(2**53)),
    ("float64", ExactFloat("0.12345678901234567890"), 0.12345678901234568),
    ("string", 10**30, "1" + "0" * 30),
    ("string", True, "true"),
    ("binary", "AAE=", b"\x00\x01"),
    ("date32", "2024-02-29", dt.date(2024, 2, 29)),
    ("timestamp[us, UTC]", "2024-05-01T10:00:00.5+02:00", dt.datetime(2024, 5, 1, 8, 0, 0, 500_000, UTC)),
    ("timestamp[us, UTC]", "2024-05-01 10:00:00", dt.datetime(2024, 5, 1, 10, tzinfo=UTC)),
    ("timestamp[s]", "1969-12-31", dt.datetime(1969, 12, 31)),
    ("timestamp[ms]", 1500, dt.datetime(1970, 1, 1, 0, 0, 1, 500_000)),
    ("time32[s]", "23:59:59", dt.time(23, 59, 59)),
    ("duration[ms]", "-PT1.5S", dt.timedelta(seconds=-1.5)),
    ("decimal128(5, 2)", ExactFloat("123.40"), Decimal("123.40")),
    ("decimal128(5, 2)", "-999.99", Decimal("-999.99")),
    ("decimal128(5, 2)", 1e-9 * 0, Decimal("0.00")),
    ("list<int8>", [1, None], [1, None]),
    ("struct<a: int8, b: string>", {"b": "x"}, {"a": None, "b": "x"}),
    ("map<string, int8>", {"k": 1}, [("k", 1)]),
]


@pytest.mark.parametrize(("type_", "value", "held"), FITTING)
def test_a_value_that_fits(type_: str, value: Any, held: Any) -> None:
    column = DeclaredColumn("c", type_)
    assert pa.array([column.value(value), column.value(None)], column.type.arrow()).to_pylist() == [
        held,
        None,
    ]


MISFITS: list[tuple[str, Any, ErrorClass]] = [
    ("int8", 128, ErrorClass.NUMBER_OUT_OF_RANGE),
    ("uint8", -1, ErrorClass.NUMBER_OUT_OF_RANGE),
    ("int64", ExactFloat("1e300"), ErrorClass.NUMBER_OUT_OF_RANGE),
    ("int64", 3.5, ErrorClass.INVALID_PARAM),
    ("int64", True, ErrorClass.INVALID_PARAM),
    ("int64", "3", ErrorClass.INVALID_PARAM),
    ("float64", 10**400, ErrorClass.NUMBER_OUT_OF_RANGE),
    ("float32", 1e39, ErrorClass.NUMBER_OUT_OF_RANGE),
    ("float64", 2**53 + 1, ErrorClass.INVALID_PARAM),
    ("float32", 2**24 + 1, ErrorClass.INVALID_PARAM),
    ("bool", 1, ErrorClass.INVALID_PARAM),
    ("string", ["a"], ErrorClass.INVALID_PARAM),
    ("binary", "not base64", ErrorClass.INVALID_PARAM),
    ("date32", "2023-02-29", ErrorClass.INVALID_PARAM),
    ("date32", "2023-02-28T10:00:00", ErrorClass.INVALID_PARAM),
    ("timestamp[s]", "2024-05-01T10:00:00Z", ErrorClass.INVALID_PARAM),
    ("timestamp[s]", "2024-05-01T10:00:00.5", ErrorClass.INVALID_PARAM),
    ("timestamp[s]", "yesterday", ErrorClass.INVALID_PARAM),
    ("timestamp[ns]", "9999-01-01", ErrorClass.NUMBER_OUT_OF_RANGE),
    ("time32[s]", "24:00:00", ErrorClass.INVALID_PARAM),
    ("decimal128(5, 2)", 1000, ErrorClass.NUMBER_OUT_OF_RANGE),
    ("decimal128(5, 2)", 0.125, ErrorClass.INVALID_PARAM),
    ("list<int8>", [1, 300], ErrorClass.NUMBER_OUT_OF_RANGE),
    ("struct<a: int8>", {"a": 1, "z": 2}, ErrorClass.INVALID_PARAM),
    ("map<string, int8>", [1], ErrorClass.INVALID_PARAM),
]


@pytest.mark.parametrize(("type_", "value", "error_class"), MISFITS)
def test_a_value_that_does_not_fit(type_: str, value: Any, error_class: ErrorClass) -> None:
    with pytest.raises(RowFailure) as failure:
        DeclaredColumn("c", type_).value(value)
    assert failure.value.error.error_class == error_class
    assert failure.value.error.message.startswith("column 'c': ")
    assert f"is not a value of the type {type_} that input.schema declares" in failure.value.error.message


def write(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_declared_columns_keep_their_types_in_parquet(tmp_path: Path) -> None:
    lines = [
        {"prompt": "a", "score": 1, "tags": ["x"], "when": "2024-05-01T00:00:00Z"},
        {"prompt": "b", "score": "bad", "tags": None, "other": 5},
        {"prompt": "c"},
    ]
    path = write(tmp_path / "in.jsonl", lines)
    schema = {
        "score": "float64",
        "tags": "list<string>",
        "when": "timestamp[us, UTC]",
        "later": "struct<a: int64>",
    }
    with open_input(str(path), schema=schema) as inputs:
        plan = OutputPlan.from_json(json.loads(json.dumps(plan_output(inputs).to_json())), inputs)
        rows = list(inputs.rows())
        results = [RowResult.from_error(r.error) if r.error else RowResult("ok", "text") for r in rows]
        write_part(tmp_path / "part.parquet", zip(rows, results, strict=True), plan)
    table = pq.read_table(tmp_path / "part.parquet")
    assert {name: str(table.schema.field(name).type) for name in schema} == {
        "score": "double",
        "tags": "list<element: string>",
        "when": "timestamp[us, tz=UTC]",
        "later": "struct<a: int64>",
    }
    assert table.column("score").to_pylist() == [1.0, None, None]
    assert table.column("tags").to_pylist() == [["x"], None, None]
    assert json.loads(table.column("extra").to_pylist()[1]) == {"score": "bad"}
    assert table.column("status").to_pylist() == ["ok", "error", "ok"]
    error = table.column("error").to_pylist()[1]
    assert error["class"] == "invalid_param"
    assert error["message"] == (
        "in.jsonl line 2: column 'score': \"bad\" is not a value of the type float64 "
        "that input.schema declares"
    )


def test_csv_values_become_what_is_declared(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text('prompt,n,price,yes,tags\na,5,1.50,TRUE,"[""x""]"\nb,,,,\nc,many,1,no,[\n')
    schema = {"n": "int64", "price": "decimal128(10, 2)", "yes": "bool", "tags": "list<string>"}
    with open_input(str(path), schema=schema, where="n is null or n > 3") as inputs:
        rows = list(inputs.rows())
    assert dict(rows[0].values) == {
        "prompt": "a",
        "n": 5,
        "price": Decimal("1.50"),
        "yes": True,
        "tags": ["x"],
    }
    assert [rows[1].values[name] for name in schema] == [None] * 4
    assert rows[1].error is None
    assert rows[2].error is not None
    assert "column 'n': \"many\" is not a value of the type int64" in rows[2].error.message
    assert [row.selected for row in rows] == [True] * 3


def test_parquet_has_types_of_its_own_and_csv_its_own_columns(tmp_path: Path) -> None:
    pq.write_table(pa.table({"n": [1]}), tmp_path / "in.parquet")
    with pytest.raises(UsageError, match=r"input\.schema: .* is parquet, which has types of its own"):
        open_input(str(tmp_path / "in.parquet"), schema={"n": "int64"})
    (tmp_path / "in.csv").write_text("prompt,score\na,1\n")
    with pytest.raises(UsageError, match="no column 'scor'; did you mean 'score'"):
        open_input(str(tmp_path / "in.csv"), schema={"scor": "int64"})
