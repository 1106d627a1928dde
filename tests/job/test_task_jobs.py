"""Jobs of tasks other than generating, with the fake engine: killed, they end with the same bytes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from job_driver import CRASHED, Settings, run_here, start
from job_inputs import data_bytes
from waiting import PATIENCE

from batchgen.data.task_columns import TASK_COLUMNS
from batchgen.job.export import Exporter, ExportOptions
from batchgen.job.folder_rows import FolderRows
from batchgen.job.part_reader import read_part
from batchgen.types import Task

ROWS = 60
TASKS = [task.value for task in Task if task is not Task.GENERATE]
OTHER = {"parquet": "jsonl"}
CRASHES = {"loglikelihood": 9, "perplexity": 23, "embed": 31, "classify": 44}


def write_rows(path: Path) -> str:
    rows = [{"prompt": f"text {i} " * (i % 5), "continuation": f" more {i}"} for i in range(ROWS)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("task", TASKS)
def test_a_killed_job_ends_with_the_bytes_of_one_that_ran_through(task: str, tmp_path: Path) -> None:
    format = "parquet" if task in ("embed", "perplexity") else "jsonl"
    rows = write_rows(tmp_path / "rows.jsonl")
    whole = Settings(output=str(tmp_path / "whole"), input=rows, task=task, format=format)
    assert run_here(whole).exit_code == 0
    broken = replace(whole, output=str(tmp_path / "broken"))
    process = start(replace(broken, crash_at=CRASHES[task]))
    process.communicate(timeout=PATIENCE)
    assert process.returncode == CRASHED
    assert run_here(broken).exit_code == 0
    assert data_bytes(tmp_path / "broken") == data_bytes(tmp_path / "whole")


@pytest.mark.parametrize(
    ("format", "n", "crash_at"), [("parquet", 1, 40), ("jsonl", 3, 120), ("openai_batch", 2, 71)]
)
def test_a_killed_job_with_logprobs_ends_with_the_same_bytes(
    format: str, n: int, crash_at: int, tmp_path: Path
) -> None:
    """Also where an answer goes on from journalled tokens, whose logprobs are not journalled."""
    include = ["usage", "finish_reason"]
    if format != "openai_batch":
        include += ["logprobs", "prompt_logprobs"]
    whole = Settings(
        output=str(tmp_path / "whole"),
        input=write_rows(tmp_path / "rows.jsonl"),
        format=format,
        n=n,
        include=include,
        scored={"logprobs": 2, "prompt_logprobs": 1},
    )
    assert run_here(whole).exit_code == 0
    (tmp_path / "state").mkdir()
    kill = {"do": "kill", "after_tokens": 150, "times": 1}
    worker = {"faults": [kill], "state": str(tmp_path / "state"), "step_seconds": 0.002}
    broken = replace(whole, output=str(tmp_path / "broken"), worker=worker)
    process = start(replace(broken, crash_at=crash_at))
    process.communicate(timeout=60)
    assert process.returncode == CRASHED
    assert run_here(broken).exit_code == 0
    assert data_bytes(tmp_path / "broken") == data_bytes(tmp_path / "whole")
    assert all(b"logprob" in part for name, part in data_bytes(tmp_path / "whole").items() if "part" in name)


@pytest.mark.parametrize("format", OTHER)
@pytest.mark.parametrize("task", TASKS)
def test_results_read_back_are_those_that_were_written(task: str, format: str, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl")
    settings = Settings(output=str(tmp_path / "out"), input=rows, task=task, format=format, part_rows=ROWS)
    assert run_here(settings).exit_code == 0
    other = replace(
        settings, output=str(tmp_path / "other"), format={"jsonl": "parquet"}.get(format, "jsonl")
    )
    assert run_here(other).exit_code == 0
    plans = [
        json.loads(Path(s.output, "manifest.json").read_text())["output_plan"] for s in (settings, other)
    ]
    results: list[Any] = []
    for plan, s in zip(plans, (settings, other), strict=True):
        [part] = Path(s.output, "data").iterdir()
        results.append([row.result for row in read_part(part, plan)])
    assert results[0] == results[1]
    ok = [result for result in results[0] if result.status == "ok"]
    assert len(ok) > 0
    assert all(list(result.included) == [*TASK_COLUMNS[Task(task)]] for result in ok)
    assert all(
        result.generated_text is None and result.included is None for result in results[0] if result.error
    )


def test_vectors_are_exported_with_their_size(tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "rows.jsonl")
    settings = Settings(output=str(tmp_path / "out"), input=rows, task="embed", format="jsonl")
    assert run_here(settings).exit_code == 0
    import pyarrow as pa
    import pyarrow.parquet as pq

    with (tmp_path / "x.parquet").open("wb") as file:
        Exporter(FolderRows(tmp_path / "out"), ExportOptions(format="parquet")).write(file, "none")
    assert pq.read_schema(tmp_path / "x.parquet").field("embedding").type == pa.list_(pa.float32(), 2)
