"""What goes through to the output: for each pair of formats the same types, values and digits."""

import datetime
import json
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_files import jsonl, parquet, write, write_rows
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.data.exact_json import LineDecoder
from batchgen.data.results import OutputPlan, plan_output
from batchgen.data.source import InputSet, open_input
from batchgen.types import DriftError


def written(tmp_path: Path, inputs: InputSet, **options) -> pa.Table:
    plan = plan_output(inputs, **options)
    pinned = json.loads(json.dumps(plan.to_json()))
    write_rows(tmp_path / "out", inputs.rows(), OutputPlan.from_json(pinned, inputs))
    table = pq.read_table(tmp_path / "out")
    assert table.schema == plan.schema()
    return table


def written_lines(tmp_path: Path, inputs: InputSet, **options) -> list[str]:
    plan = plan_output(inputs, format="jsonl", **options)
    pinned = json.loads(json.dumps(plan.to_json()))
    write_rows(tmp_path / "out", inputs.rows(), OutputPlan.from_json(pinned, inputs), compression="none")
    return (tmp_path / "out").read_bytes().decode().split("\n")[:-1]


def every_type() -> pa.Table:
    n = 7
    day = datetime.date(2024, 2, 29)
    columns = {
        "bool": pa.array([True, None] * 3 + [False]),
        "int8": pa.array(range(n), pa.int8()),
        "uint64": pa.array([2**64 - 1] * n, pa.uint64()),
        "half": pa.array([1.5] * n, pa.float16()),
        "float": pa.array([0.1, float("nan"), float("inf"), None, -0.0, 1, 2], pa.float32()),
        "decimal": pa.array([Decimal("123456789012345678901234567890.12")] * n),
        "date": pa.array([day] * n),
        "time": pa.array([1] * n, pa.time64("us")),
        "ns": pa.array([1] * n, pa.timestamp("ns")),
        "zoned": pa.array([1] * n, pa.timestamp("us", "Europe/Paris")),
        "duration": pa.array([1] * n, pa.duration("us")),
        "text": pa.array(["é", "", None, "x", "y", "z", "\u2028"]),
        "large": pa.array(["x"] * n, pa.large_string()),
        "bytes": pa.array([b"\x00\xff"] * n),
        "fixed": pa.array([b"ab"] * n, pa.binary(2)),
        "list": pa.array([[1], [], None, [None], [1, 2], [3], [4]]),
        "vector": pa.array([[1.0, 2.0]] * n, pa.list_(pa.float32(), 2)),
        "struct": pa.array([{"a": 1, "b": None}, None] * 3 + [{"a": 2, "b": [day]}]),
        "map": pa.array([[("k", 1)]] * n, pa.map_(pa.string(), pa.int64())),
        "dictionary": pa.array(["a", "b", None, "a", "c", "a", "b"]).dictionary_encode(),
        "null": pa.nulls(n),
        "tensor": pa.ExtensionArray.from_storage(
            pa.fixed_shape_tensor(pa.int8(), [2]), pa.array([[1, 2]] * n, pa.list_(pa.int8(), 2))
        ),
    }
    return pa.table(columns)


def test_parquet_to_parquet_keeps_every_type_and_value(tmp_path: Path) -> None:
    path = parquet(tmp_path, every_type(), row_group_size=3)
    source = pq.read_table(path)
    table = written(tmp_path, open_input(path))
    assert table.schema.names[:2] == ["row", "id"]
    through = table.select(source.schema.names)
    assert through.schema == source.schema
    for name in source.schema.names:
        before, after = (t[name].combine_chunks() for t in (source, through))
        # Equality of NaN is by the bits here.
        assert before.equals(after) or str(before) == str(after), name


def test_metadata_of_the_file_and_field_ids_stay_behind(tmp_path: Path) -> None:
    field = pa.field("a", pa.int64(), metadata={"PARQUET:field_id": "7", "note": "x"})
    schema = pa.schema([field], metadata={"huggingface": "{}", "pandas": "{}"})
    table = written(tmp_path, open_input(parquet(tmp_path, pa.table([[1]], schema=schema))))
    assert table.schema.metadata is None
    assert table.schema.field("a").metadata == {b"note": b"x"}


def test_invalid_text_keeps_its_bytes_in_parquet(tmp_path: Path) -> None:
    bad = pa.array([b"a\xffb"]).view(pa.string())
    path = parquet(tmp_path, pa.table({"p": bad}))
    assert written(tmp_path, open_input(path))["p"].chunk(0).view(pa.binary()).to_pylist() == [b"a\xffb"]
    (line,) = written_lines(tmp_path, open_input(path))
    assert json.loads(line)["p"] == "a\ufffdb"
    assert json.loads(line)["status"] == "error"


def test_parquet_to_jsonl_is_strict_and_exact(tmp_path: Path) -> None:
    lines = written_lines(tmp_path, open_input(parquet(tmp_path, every_type())))
    assert '"decimal": 123456789012345678901234567890.12' in lines[0]
    first, second = (json.loads(line, parse_constant=pytest.fail) for line in lines[:2])
    assert first["uint64"] == 2**64 - 1
    assert first["date"] == "2024-02-29"
    assert first["ns"] == "1970-01-01T00:00:00.000000001"
    assert first["zoned"] == "1970-01-01T00:00:00.000001Z"
    assert first["bytes"] == "AP8="
    assert first["struct"] == {"a": 1, "b": None}
    assert first["map"] == {"k": 1}
    assert second["float"] is None
    assert json.loads(lines[6])["text"] == "\u2028"


def test_jsonl_to_jsonl_is_verbatim(tmp_path: Path) -> None:
    members = '"n": 1.50, "big": 123456789012345678901234567890, "deep": {"x": [1e5, null]}, "u": "é"'
    (line,) = written_lines(tmp_path, jsonl(tmp_path, f"{{{members}}}"))
    assert members in line
    assert line.startswith('{"row": 0, "id": "in.jsonl:0", "n"')


def test_absent_members_stay_absent_in_jsonl(tmp_path: Path) -> None:
    lines = written_lines(tmp_path, jsonl(tmp_path, '{"a": 1}', '{"b": null}'))
    assert "b" not in json.loads(lines[0])
    assert json.loads(lines[1])["b"] is None


def test_a_late_collision_in_jsonl_goes_to_extra(tmp_path: Path) -> None:
    rows = ['{"a": 1}'] * 1000 + ['{"a": 2, "status": "mine", "extra": [1]}', '{"extra": 5}']
    lines = written_lines(tmp_path, jsonl(tmp_path, *rows))
    late = json.loads(lines[1000])
    assert (late["a"], late["status"], late["extra"]) == (2, "ok", {"status": "mine", "extra": [1]})
    assert json.loads(lines[1001])["extra"] == {"extra": 5}


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (['"x"', "null", '""'], pa.string()),
        (["1", "-9223372036854775808"], pa.int64()),
        (["true", "null"], pa.bool_()),
        (["1.5", "2.50", "0.10000000000000001"], pa.float64()),
        (["1.5", "2"], pa.float64()),
        (["9223372036854775808"], None),
        (["1.5", "9007199254740993"], None),
        (["0.123456789012345678901"], None),
        (["1e-999"], None),
        (["1", "true"], None),
        (["1", '"1"'], None),
        (["[1]"], None),
        (["null"], None),
    ],
)
def test_jsonl_to_parquet_types(tmp_path: Path, values: list[str], kind: pa.DataType | None) -> None:
    inputs = jsonl(tmp_path, *(f'{{"v": {value}}}' for value in values))
    table = written(tmp_path, inputs)
    extras = [x and f"{x}" for x in table["extra"].to_pylist()]
    if kind is None:
        assert "v" not in table.schema.names
        assert extras == [f'{{"v": {value}}}' for value in values]
    else:
        assert table.schema.field("v").type == kind
        assert table["v"].to_pylist() == [json.loads(value) for value in values]
        assert extras == [None] * len(values)


def test_later_mismatches_are_never_an_error(tmp_path: Path) -> None:
    rows = ['{"n": 1, "s": "x"}'] * 1000
    late = ['{"n": "two", "s": null, "new": 1.50}', '{"n": 18446744073709551616, "s": {"a": NaN}}', "broken"]
    table = written(tmp_path, jsonl(tmp_path, *rows, *late))
    assert table["n"].to_pylist()[999:] == [1, None, None, None]
    assert table["extra"].to_pylist()[999:] == [
        None,
        '{"n": "two", "new": 1.50}',
        '{"n": 18446744073709551616, "s": {"a": null}}',
        None,
    ]


def test_extra_takes_a_free_name(tmp_path: Path) -> None:
    table = written(tmp_path, jsonl(tmp_path, '{"extra": "mine", "x": []}'))
    assert table["extra"].to_pylist() == ["mine"]
    assert table["extra_2"].to_pylist() == ['{"x": []}']


def test_selected_columns(tmp_path: Path) -> None:
    line = '{"a": 1, "b": [2], "c": 3}'
    table = written(tmp_path, jsonl(tmp_path, line), columns=["b", "a"])
    assert table.schema.names[:4] == ["row", "id", "a", "extra"]
    assert table["extra"].to_pylist() == ['{"b": [2]}']
    (text,) = written_lines(tmp_path, jsonl(tmp_path, line), columns=["a"])
    assert {"b", "c"}.isdisjoint(json.loads(text))
    path = parquet(tmp_path, pa.table({"a": [1], "b": [2]}))
    assert written(tmp_path, open_input(path), columns=["b"]).schema.names[2:4] == ["b", "generated_text"]


def test_the_id_column_is_written_once(tmp_path: Path) -> None:
    inputs = jsonl(tmp_path, '{"id": 7, "key": 8}', id_column="id")
    assert written(tmp_path, inputs)["id"].to_pylist() == ["7"]
    inputs = jsonl(tmp_path, '{"id": 7, "key": 8}', id_column="key")
    table = written(tmp_path, inputs, renames={"id": "our_id"})
    assert (table["our_id"].to_pylist(), table["id"].to_pylist(), table["key"].to_pylist()) == (
        ["8"],
        [7],
        [8],
    )


def test_a_pinned_plan_refuses_a_changed_schema(tmp_path: Path) -> None:
    plan = plan_output(open_input(parquet(tmp_path, pa.table({"a": [1]})))).to_json()
    changed = open_input(parquet(tmp_path, pa.table({"a": ["x"]})))
    with pytest.raises(DriftError, match="'a' was int64 when the job began and is now string"):
        OutputPlan.from_json(plan, changed)
    gone = open_input(parquet(tmp_path, pa.table({"b": ["x"]})))
    with pytest.raises(DriftError, match="is now missing"):
        OutputPlan.from_json(plan, gone)


_SCALARS = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
)
_OBJECTS = st.dictionaries(st.sampled_from("abcd"), _SCALARS | st.lists(_SCALARS, max_size=2))


@settings(max_examples=60)
@given(st.lists(_OBJECTS, min_size=1, max_size=6))
def test_any_objects_survive_both_outputs(tmp_path: Path, objects: list[dict]) -> None:
    path = write(tmp_path, "in.jsonl", "".join(f"{json.dumps(x)}\n" for x in objects))
    inputs = open_input(path)
    for line, values in zip(written_lines(tmp_path, inputs), objects, strict=True):
        assert {k: v for k, v in json.loads(line).items() if k in "abcd"} == values
    for record, values in zip(written(tmp_path, inputs).to_pylist(), objects, strict=True):
        rest = LineDecoder(False).decode((record["extra"] or "{}").encode()).values
        typed = {k: v for k, v in record.items() if k in "abcd" and v is not None}
        assert typed | rest == {k: v for k, v in values.items() if v is not None or k in rest}
