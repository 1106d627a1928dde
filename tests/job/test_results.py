"""`batchgen.open` on folders of JSON lines, whose rows are not all alike."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from job_driver import Settings, run_here

import batchgen

MANY_DIGITS = 10**30


@pytest.mark.parametrize("compression", ["none", "gzip", "zstd"])
def test_json_lines_of_any_shape(tmp_path: Path, compression: str) -> None:
    rows = [{"prompt": "a"}, {"prompt": "b", "x": 1, "y": [1]}, {"prompt": "c", "x": "1", "n": MANY_DIGITS}]
    lines = ["{broken", *map(json.dumps, rows)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines))
    folder = tmp_path / "out"
    run_here(
        Settings(output=str(folder), input=str(tmp_path / "in.jsonl"), part_rows=2, compression=compression)
    )
    results = batchgen.open(folder)
    assert [row.get("x") for row in results] == [None, None, 1, "1"]
    assert [row["row"] for row in results.errors()] == [0]
    table = results.table().to_pydict()
    assert table["prompt"] == [None, "a", "b", "c"]
    assert table["x"] == [None, None, "1", '"1"']
    assert table["y"] == [None, None, [1], None]
    assert table["n"] == [None, None, None, str(MANY_DIGITS)]
    assert results.table(["row"]).column_names == ["row"]
    assert sum(batch.num_rows for batch in results.batches()) == len(results) == 4
