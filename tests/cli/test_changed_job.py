"""A job that is retried, drifts, and carries secrets, as a user sees it on the command line."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_engine import launcher

from batchgen.cli.main import main

Write = Callable[..., str]
Captured = pytest.CaptureFixture[str]
ROWS = "".join(json.dumps({"prompt": f"prompt {row}", "id": f"id{row}"}) + "\n" for row in range(12))
TIMEOUT = {"faults": [{"do": "timeout", "rows": [3, 7], "message": "too slow"}]}
SECRET = "hunter2-t0k3n"
SECRETIVE = """
prompt:
  mode: completion
  user: "{{ prompt }} for https://me:${env:TOKEN}@example.org/{{ id }}"
sampling:
  max_tokens: 3
  stop: ["bye", "${env:TOKEN}", "x${env:TOKEN}y"]
output:
  part_rows: 4
run: {min_free_disk: 0, progress: none}
"""


@pytest.fixture
def job(write_job: Write, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("TOKEN", SECRET)
    path = write_job("", ROWS)
    Path(path).write_text(
        "model: ./model\ninput: prompts.jsonl\n" + SECRETIVE.replace("output:", "output:\n  path: out/")
    )
    return path


def run(*line: str, worker: dict | None = None) -> int:
    return main(line, launch=launcher(worker or {}))


def test_a_retry_from_the_folder_alone(job: str, capsys: Captured) -> None:
    assert run("run", job, worker=TIMEOUT) == 0
    assert run("retry", "out", "--where", "nonsense") == 2
    assert run("retry", "out", "--set", "output.format=jsonl") == 2
    assert "a retry can change sampling.*" in capsys.readouterr().err
    assert run("retry", "out", "--set", "sampling.max_tokens=5") == 0
    assert "2 rows" in capsys.readouterr().err
    assert run("verify", "out", "--deep", "12") == 0
    said = capsys.readouterr().out
    assert "2 rows: retry of 2 rows (context_length,structured_unsatisfied," in said
    assert "with sampling.max_tokens=5" in said
    assert "10 rows computed again, 10 of them the same" in said
    assert "2 rows computed again, 2 of them the same" in said
    assert run("run", job) == 0
    assert run("retry", "out") == 0
    assert "nothing to retry" in capsys.readouterr().err


def test_drift_is_refused_accepted_and_told(job: str, capsys: Captured) -> None:
    assert run("run", job, "--limit", "4") == 0
    line = ("run", job, "--set", "sampling.temperature=0.5")
    assert run(*line) == 4
    said = capsys.readouterr().err
    assert "  sampling.temperature\n    - null\n    + 0.5\n" in said
    assert "--accept-drift" in said
    assert run(*line, "--accept-drift") == 0
    assert run("verify", "out") == 0
    assert "8 rows: accepted drift, by " in capsys.readouterr().out
    assert run("run", job, "--set", "engine.max_num_seqs=4", "--set", "sampling.temperature=0.5") == 0
    os.utime("prompts.jsonl", (1, 1))
    assert run(*line) == 0


def test_secrets_stay_in_the_environment(job: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("run", job, worker=TIMEOUT) == 0
    assert run("retry", "out", "--set", "prompt.system=${env:TOKEN}!") == 2
    assert run("retry", "out", "--where", "row=2", "--set", "prompt.user={{ prompt }} ${env:TOKEN}") == 0
    monkeypatch.setenv("TOKEN", SECRET + "-changed")
    assert run("run", job) == 4
    monkeypatch.delenv("TOKEN")
    assert run("retry", "out") == 2
    captured = capsys.readouterr()
    assert "the environment variable TOKEN is not set" in captured.err
    assert SECRET not in captured.err + captured.out
    assert "${env:TOKEN}" in Path("out/job.resolved.yaml").read_text()
    leaks = [
        path for path in Path("out").rglob("*") if path.is_file() and SECRET.encode() in path.read_bytes()
    ]
    assert leaks == []


def test_a_foreign_folder_and_links_are_left_alone(job: str, capsys: Captured, tmp_path: Path) -> None:
    Path("out/data").mkdir(parents=True)
    Path("out/data/part-000000.parquet").write_bytes(b"mine")
    for line in (("run", job), ("run", job, "--overwrite")):
        assert run(*line) == 2
        assert "is not the output folder of a job (it has no .batchgen folder)" in capsys.readouterr().err
    assert Path("out/data/part-000000.parquet").read_bytes() == b"mine"
    Path("out/data/part-000000.parquet").unlink()
    Path("out/data").rmdir()
    (tmp_path / "elsewhere").mkdir()
    Path("out/data").symlink_to(tmp_path / "elsewhere")
    assert run("run", job) == 2
    assert "data: is a symbolic link, and results stay in their folder" in capsys.readouterr().err
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_files_follow_the_umask_and_names_never_come_from_data(job: str) -> None:
    lines = [
        json.dumps({"prompt": "x", "id": name}) for name in ("../../up", "/etc/passwd", "a/b", "..", "nul\0l")
    ]
    Path("prompts.jsonl").write_text("\n".join(lines) + "\n")
    before = os.umask(0o027)
    try:
        assert run("run", job) == 0
    finally:
        os.umask(before)
    assert {path.name for path in Path("out/data").iterdir()} == {
        "part-000000.parquet",
        "part-000001.parquet",
    }
    modes = {oct(path.stat().st_mode & 0o777) for path in Path("out").rglob("*") if path.is_file()}
    assert modes == {"0o640"}
    assert {p.name for p in Path().iterdir()} == {"job.yaml", "model", "out", "prompts.jsonl"}


def test_no_permission_is_found_before_weights_are_read(
    job: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """S1. Weights of a hub would be fetched next."""
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    monkeypatch.setattr("batchgen.job.fingerprints.hash_files", None)
    assert run("run", job) == 5
    assert "output.path: no permission to write in" in capsys.readouterr().err
