"""What reaches the prompt is the same whether a row comes from JSONL or Parquet; nothing loads torch."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from data_files import jsonl, parquet

from batchgen.data.prompt_values import prompt_values
from batchgen.data.source import InputSet, open_input

ROWS = [
    {"prompt": "hi", "tools": '[{"name": "f"}]'},
    {"prompt": None, "tools": "[broken"},
    {"prompt": "", "tools": None},
    {"prompt": "   ", "tools": ""},
]


@pytest.fixture(params=["jsonl", "parquet"])
def inputs(request: pytest.FixtureRequest, tmp_path: Path) -> InputSet:
    if request.param == "jsonl":
        return jsonl(tmp_path, *map(json.dumps, ROWS))
    return open_input(parquet(tmp_path, pa.Table.from_pylist(ROWS)))


def test_c15_c16_strings_nulls_and_blanks_are_left_to_the_prompt(inputs: InputSet) -> None:
    rows = list(inputs.rows())
    assert [prompt_values(row, ["prompt", "tools"]) for row in rows] == ROWS
    assert [row.error for row in rows] == [None] * 4


def test_the_data_layer_never_loads_torch() -> None:
    code = (
        "import sys, pkgutil, importlib, batchgen.data as d;"
        "[importlib.import_module(f'batchgen.data.{m.name}') for m in pkgutil.iter_modules(d.__path__)];"
        "sys.exit(str({'torch', 'transformers', 'datasets', 'pandas'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.stderr.strip() == "set()"
