"""`input.id: auto`: the column `id` where a row has one, a made-up id where it has not."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.data.results import plan_output
from batchgen.data.source import open_input
from batchgen.types import ErrorClass

LINES = ['{"id": 7, "x": 1}', '{"x": 2}', '{"id": null, "x": 3}', '{"id": 12345678901234567890123, "x": 4}']
IDS = ["7", "a.jsonl:1", "a.jsonl:2", "12345678901234567890123"]


def test_a_row_without_an_id_gets_a_stable_one(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(LINES))
    with open_input([str(tmp_path / "a.jsonl")]) as inputs:
        assert [row.id for row in inputs.rows()] == IDS
        schema = plan_output(inputs).schema()
    assert schema.names.count("id") == 1
    assert schema.field("id").type == pa.string()


def test_an_id_that_is_no_scalar_is_an_error_of_its_row(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": [1]}\n{"id": "b"}\n')
    with open_input([str(tmp_path / "a.jsonl")]) as inputs:
        first, second = inputs.rows()
    assert first.error is not None
    assert first.error.error_class is ErrorClass.MISSING_COLUMN
    assert second.id == "b"


def test_parquet_too(tmp_path: Path) -> None:
    pq.write_table(pa.table({"id": [3, None], "x": ["a", "b"]}), tmp_path / "a.parquet")
    with open_input([str(tmp_path / "a.parquet")]) as inputs:
        assert [row.id for row in inputs.rows()] == ["3", "a.parquet:1"]


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_renaming_ours_lets_the_users_column_through(tmp_path: Path, format: str) -> None:
    (tmp_path / "a.jsonl").write_text('{"id": 1, "x": 2}\n')
    with open_input([str(tmp_path / "a.jsonl")]) as inputs:
        plan = plan_output(inputs, format=format, renames={"id": "key"})
        assert plan.names["id"] == "key"
        if format == "parquet":
            assert {"key", "id", "x"} <= set(plan.schema().names)
