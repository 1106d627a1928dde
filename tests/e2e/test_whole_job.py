"""The whole way through: job file, command line, real engine worker, a tiny model, real files.

Each test runs `batchgen` as a user would and looks only at exit codes, messages and the output folder. What
is killed or stopped is a process of its own; the rest runs in this one, which saves seconds of imports each.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import pytest
import yaml
from tiny_models import save_tiny_llama
from waiting import PATIENCE, wait_until

from batchgen.cli.main import main

PROMPTS = ("Tell me about {i}.", "Why {i}?", "A long question about the number {i}, " + "please " * 9)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("llama"))


def write_job(folder: Path, model: Path, lines: list[str], /, **changes: Any) -> Path:
    (folder / "rows.jsonl").write_text("".join(f"{line}\n" for line in lines))
    job: dict[str, Any] = {
        "model": {"path": str(model), "max_model_len": 256},
        "input": "rows.jsonl",
        "prompt": {"system": "You answer in few words, and you are polite to everybody who asks."},
        "sampling": {"max_tokens": 64, "temperature": 0.8, "seed": 3, "logprobs": 2},
        "output": {"path": "out", "part_rows": 16, "include": ["usage", "finish_reason", "logprobs"]},
        "run": {"checkpoint_seconds": 0.2, "progress": "none", "min_free_disk": "1MB"},
        "engine": {"max_num_seqs": 8},
    }
    for key, value in changes.items():
        job[key] = {**job[key], **value} if isinstance(job.get(key), dict) else value
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    return folder / "job.yaml"


def make_lines(count: int) -> list[str]:
    return [
        json.dumps({"prompt": PROMPTS[i % 3].format(i=i), "key": i, "score": i / 8}) for i in range(count)
    ]


def command(*args: object) -> list[str]:
    return [sys.executable, "-m", "batchgen", *map(str, args)]


class Done(NamedTuple):
    """How a command ended, and what it said."""

    code: int
    out: str
    err: str


def batchgen(*args: object) -> Done:
    """Run a command to its end in this process; its workers are processes."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        code = main([*map(str, args)])
    return Done(code, out.getvalue(), err.getvalue())


def start(job: Path) -> subprocess.Popen[str]:
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command("run", job), start_new_session=True, **pipes)


def worker_pids(process: subprocess.Popen[str]) -> list[int]:
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    return [int(pid) for pid in children.read_text().split()] if children.exists() else []


def kill_all(process: subprocess.Popen[str]) -> None:
    for pid in (process.pid, *worker_pids(process)):
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    process.communicate()


def journal_bytes(folder: Path) -> int:
    return sum(p.stat().st_size for p in (folder / "out" / ".batchgen" / "journal").glob("*"))


def wait_for_journal(folder: Path, process: subprocess.Popen[str], more_than: int = 0) -> bool:
    """Until results are on disk; False if the process ended first."""
    return wait_until(lambda: journal_bytes(folder) > more_than, process)


def digests(folder: Path) -> dict[str, str]:
    return {
        p.name: hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted((folder / "out" / "data").iterdir())
    }


def rows(folder: Path) -> list[dict[str, Any]]:
    parts = sorted((folder / "out" / "data").glob("*.parquet"))
    return [row for part in parts for row in pq.read_table(part).to_pylist()]


@pytest.fixture(scope="module")
def calm(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a job that nobody killed."""
    folder = tmp_path_factory.mktemp("calm")
    done = batchgen("run", write_job(folder, model, make_lines(60)))
    assert done.code == 0, done.err
    return folder


@pytest.fixture(scope="module")
def undisturbed(calm: Path) -> dict[str, str]:
    """Digests of its parts."""
    return digests(calm)


def test_bad_rows_become_error_rows_and_take_no_other_with_them(
    model: Path, tmp_path: Path, calm: Path
) -> None:
    lines = make_lines(8)
    lines[1] = '{"prompt": "broken'
    lines[3] = '{"prompt": null, "key": 3}'
    lines[4] = '{"prompt": "", "key": 4}'
    lines[6] = json.dumps({"prompt": "long " * 300, "key": 6})
    good = {0, 2, 5, 7}
    job = write_job(tmp_path, model, lines)
    done = batchgen("run", job)
    assert done.code == 0, done.err
    found = rows(tmp_path)
    assert [row["row"] for row in found] == list(range(8))
    errors = {row["row"]: row["error"]["class"] for row in found if row["status"] == "error"}
    assert errors == {1: "invalid_json", 3: "null_prompt", 4: "empty_prompt", 6: "context_length"}
    assert "256" in found[6]["error"]["message"]
    assert all(found[i]["status"] == "ok" and found[i]["usage"]["completion_tokens"] > 0 for i in good)
    expected = rows(calm)
    assert all(found[i]["generated_text"] == expected[i]["generated_text"] for i in good)
    assert batchgen("verify", tmp_path / "out").code == 0


def kill_twice(job: Path) -> None:
    """Let a job run some time, twice."""
    rng, size = random.Random(1), 0
    for _ in range(2):
        process = start(job)
        if wait_for_journal(job.parent, process, more_than=size):
            time.sleep(rng.uniform(0.0, 0.5))
        kill_all(process)
        size = journal_bytes(job.parent)


@pytest.mark.slow
def test_kill_and_run_again_gives_the_same_bytes_with_products_in_int8(model: Path, tmp_path: Path) -> None:
    folders = tmp_path / "calm", tmp_path / "killed"
    for folder in folders:
        folder.mkdir()
        job = write_job(folder, model, make_lines(60), model={"quantization": "int8"})
        if folder is folders[1]:
            kill_twice(job)
        done = batchgen("run", job)
        assert done.code == 0, done.err
    assert digests(folders[0]) == digests(folders[1])


def test_kill_and_run_again_gives_the_same_bytes(
    model: Path, tmp_path: Path, undisturbed: dict[str, str]
) -> None:
    job = write_job(tmp_path, model, make_lines(60))
    kill_twice(job)
    done = batchgen("run", job)
    assert done.code == 0, done.err
    assert digests(tmp_path) == undisturbed
    assert batchgen("verify", tmp_path / "out").code == 0
    again = batchgen("run", job)
    assert again.code == 0
    assert "already complete" in again.err


def test_a_killed_worker_is_replaced(model: Path, tmp_path: Path, undisturbed: dict[str, str]) -> None:
    process = start(write_job(tmp_path, model, make_lines(60)))
    assert wait_for_journal(tmp_path, process)
    (worker,) = worker_pids(process)
    os.kill(worker, signal.SIGKILL)
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, output
    assert "starting another" in output
    assert digests(tmp_path) == undisturbed


@pytest.mark.slow
def test_two_workers_write_the_same_bytes(model: Path, tmp_path: Path, undisturbed: dict[str, str]) -> None:
    done = batchgen("run", write_job(tmp_path, model, make_lines(60)), "--workers", 2)
    assert done.code == 0, done.err
    assert digests(tmp_path) == undisturbed
    assert done.err.count("batch-invariant: ") == 1


def test_sigterm_commits_and_exits_75(model: Path, tmp_path: Path, undisturbed: dict[str, str]) -> None:
    job = write_job(tmp_path, model, make_lines(60), run={"grace": "5min"})
    process = start(job)
    assert wait_for_journal(tmp_path, process)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=PATIENCE)
    assert process.returncode == 75, output
    status = json.loads(batchgen("status", tmp_path / "out", "--json").out)
    assert 0 < status["rows_done"] < 60
    done = batchgen("run", job)
    assert done.code == 0, done.err
    assert digests(tmp_path) == undisturbed


@pytest.mark.slow
def test_the_order_of_work_changes_nothing(model: Path, tmp_path: Path, undisturbed: dict[str, str]) -> None:
    changes: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 40, "prefix_caching": False}
    job = write_job(tmp_path, model, make_lines(60), engine=changes)
    done = batchgen("run", job, "--set", "run.order=length")
    assert done.code == 0, done.err
    assert digests(tmp_path) == undisturbed


@pytest.mark.slow
def test_another_sampling_is_refused_with_the_difference(model: Path, tmp_path: Path) -> None:
    job = write_job(tmp_path, model, make_lines(3), sampling={"max_tokens": 4})
    assert batchgen("run", job).code == 0
    drift = batchgen("run", job, "--set", "sampling.temperature=0.1")
    assert drift.code == 4
    assert "temperature" in drift.err
    assert "0.1" in drift.err
