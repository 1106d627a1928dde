"""Small inputs and readers for the tests of the job."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import zstandard


def write_jsonl(path: Path, rows: int, start: int = 0) -> Path:
    """Rows with a prompt, a number and a nested value; every 17th line is broken."""
    with path.open("w") as file:
        for row in range(start, start + rows):
            if row % 17 == 16:
                file.write(f'{{"prompt": "broken {row}\n')
            else:
                file.write(json.dumps({"prompt": f"prompt {row}", "n": row, "tags": [row, None]}) + "\n")
    return path


def write_parquet(path: Path, rows: int) -> Path:
    """Rows of a prompt, a number and a list, in row groups that do not match the parts."""
    table = pa.table(
        {
            "prompt": [f"prompt {row}" for row in range(rows)],
            "n": pa.array(range(rows), pa.int32()),
            "tags": [[str(row)] * (row % 3) for row in range(rows)],
        }
    )
    pq.write_table(table, path, row_group_size=33)
    return path


def read_output(folder: Path) -> list[dict[str, Any]]:
    """All rows of all parts in order."""
    rows: list[dict[str, Any]] = []
    for path in sorted((folder / "data").iterdir()):
        if path.suffix == ".parquet":
            rows += pq.read_table(path).to_pylist()
        else:
            data = path.read_bytes()
            if path.suffix == ".zst":
                data = zstandard.ZstdDecompressor().stream_reader(io.BytesIO(data)).read()
            rows += [json.loads(line) for line in data.decode().splitlines()]
    return rows


def data_bytes(folder: Path) -> dict[str, bytes]:
    """Every file under data/, hidden ones too."""
    return {path.name: path.read_bytes() for path in sorted((folder / "data").iterdir())}
