"""`batchgen run`: what flags mean, what is refused before a worker starts, and one job on a tiny model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from tiny_models import save_tiny_llama

import batchgen
import batchgen.job.run
from batchgen.cli.main import main
from batchgen.job.parts import Counts
from batchgen.job.run_options import JobSetup, RunOptions, RunResult

Write = Callable[..., str]
Captured = pytest.CaptureFixture[str]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[JobSetup, RunOptions]]:
    """Runs end at once; what they were asked to do is kept."""
    made: list[tuple[JobSetup, RunOptions]] = []

    def run_job(setup: JobSetup, options: RunOptions, **_: Any) -> RunResult:
        made.append((setup, options))
        return RunResult(75, "stopped (SIGTERM)", Counts())

    monkeypatch.setattr(batchgen.job.run, "run_job", run_job)
    return made


def test_flags_are_keys_of_the_job_file(
    write_job: Write, calls: list[tuple[JobSetup, RunOptions]], capsys: Captured
) -> None:
    job = write_job()
    flags = [
        "--limit",
        "1",
        "--max-time",
        "1h30m",
        "--progress",
        "none",
        "--overwrite",
        "--set",
        "run.grace=3",
    ]
    assert main(["run", job, *flags]) == 75
    setup, options = calls[0]
    assert (setup.limit, setup.columns, setup.part_rows) == (1, ("prompt",), 1000)
    assert (options.max_time, options.grace, options.overwrite) == (5400.0, 3.0, True)
    assert capsys.readouterr().err == "stopped (SIGTERM)\n"


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--max-time", "soon"], 2, "--max-time: run.max_time: 'soon' is not allowed"),
        (["--limit", "0"], 2, "0 is not in the range"),
        (["--workers", "2"], 2, "No such option"),
        (["--set", "input=gone.jsonl"], 3, "gone.jsonl"),
        (["--set", "prompt.messages=chat"], 2, "the input has no column 'chat'"),
        (["--set", "model=./gone"], 2, "model.path"),
        (["--set", "output.path=prompts.jsonl"], 2, "is a file; give a folder"),
    ],
)
def test_what_is_wrong_is_said_before_a_worker_starts(
    write_job: Write,
    calls: list[tuple[JobSetup, RunOptions]],
    capsys: Captured,
    arguments: list[str],
    code: int,
    said: str,
) -> None:
    assert main(["run", write_job(), *arguments]) == code
    assert said in capsys.readouterr().err
    assert calls == []
    assert not Path("out").exists()


def test_several_faults_are_said_together(
    write_job: Write, calls: list[tuple[JobSetup, RunOptions]], capsys: Captured
) -> None:
    arguments = ["--set", "input=gone.jsonl", "--set", "model=./gone"]
    assert main(["run", write_job(), *arguments]) == 2
    said = capsys.readouterr().err
    assert "model.path" in said
    assert "gone.jsonl" in said
    assert calls == []


def test_a_job_from_start_to_no_op_and_drift(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    monkeypatch.chdir(tmp_path)
    root = Path(batchgen.__file__).parent.parent
    monkeypatch.setenv("PYTHONPATH", f"{root}:{root / 'kernels'}")
    monkeypatch.setenv("BATCHGEN_CACHE", str(tmp_path / "cache"))
    save_tiny_llama(tmp_path / "model")
    Path("rows.jsonl").write_text(
        "".join(json.dumps({"prompt": f"row {i}", "n": i}) + "\n" for i in range(5))
    )
    Path("job.yaml").write_text(
        "model: ./model\ninput: rows.jsonl\noutput: out\nsampling: {max_tokens: 4}\n"
        "run: {progress: json, min_free_disk: 0}\nengine: {kv_cache_memory: 4MB, attention: reference}\n"
    )
    capsys.readouterr()
    assert main(["run", "job.yaml"]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = [json.loads(line) for line in captured.err.splitlines()]
    assert lines[-1] == {"note": "complete: all 5 rows have a result"}
    table = pq.read_table("out/data/part-000000.parquet").to_pydict()
    assert table["n"] == [0, 1, 2, 3, 4]
    assert table["status"] == ["ok"] * 5
    assert "max_tokens: 4" in Path("out/job.resolved.yaml").read_text()

    assert main(["run", "job.yaml"]) == 0
    assert "already complete" in capsys.readouterr().err
    assert main(["run", "job.yaml", "--set", "sampling.max_tokens=5"]) == 4
    assert "  sampling.max_tokens\n    - 4\n    + 5\n" in capsys.readouterr().err
