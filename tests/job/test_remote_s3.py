"""A job whose output folder lies in S3, through the command line: killed, continued elsewhere, looked at."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest
from stand_in_s3 import serve_s3
from tiny_models import save_tokenizer
from waiting import wait_until

FAKE = Path(__file__).resolve().parents[1] / "fake_batchgen.py"
URL = "s3://results/of/a-job"
ROWS = 60


@pytest.fixture(scope="module")
def s3() -> Iterator[dict[str, str]]:
    with serve_s3("results") as settings:
        yield settings


@pytest.fixture
def job(tmp_path: Path) -> Path:
    model = tmp_path / "model"
    model.mkdir()
    save_tokenizer(model)
    (model / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "in.jsonl").write_text(
        "".join(json.dumps({"prompt": [i, 7] if i != 5 else None, "i": i}) + "\n" for i in range(ROWS))
    )
    path = tmp_path / "job.yaml"
    path.write_text(
        f"model: model/\ninput: in.jsonl\noutput: {{path: '{URL}', part_rows: 10}}\n"
        "prompt: {mode: tokens}\nsampling: {max_tokens: 6}\n"
        "run: {progress: none, checkpoint_seconds: 0.05, lease_seconds: 1}\n"
    )
    return path


def batchgen(s3: dict[str, str], cache: Path, *arguments: str, **behaviour: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(FAKE), *arguments],
        env={
            **os.environ,
            **s3,
            "BATCHGEN_CACHE": str(cache),
            "BATCHGEN_FAKE_ENGINE": json.dumps(behaviour),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen[str], code: int = 0) -> str:
    out, err = process.communicate()
    assert process.returncode == code, err
    return out + err


def parts() -> dict[str, bytes]:
    files = fsspec.filesystem("s3", use_listings_cache=False)
    return {Path(name).name: files.cat_file(name) for name in sorted(files.find(f"{URL}/data"))}


def test_a_killed_run_is_continued_by_another_machine(s3: dict[str, str], job: Path, tmp_path: Path) -> None:
    local = batchgen(s3, tmp_path / "c", "run", str(job), "--set", f"output.path={tmp_path / 'local'}")
    finish(local)
    expected = {p.name: p.read_bytes() for p in sorted((tmp_path / "local" / "data").iterdir())}
    first = batchgen(s3, tmp_path / "first", "run", str(job), step_seconds=0.1, tokens_per_step=1)
    copy = tmp_path / "first" / "remote"
    assert wait_until(lambda: any(f.stat().st_size for f in copy.glob("*/.batchgen/journal/*.seg")), first)
    os.killpg(first.pid, signal.SIGKILL)
    first.communicate()
    said = finish(batchgen(s3, tmp_path / "second", "run", str(job)))
    assert f"complete: all {ROWS} rows have a result" in said
    assert f"results: {URL}/data" in said
    assert str(tmp_path / "second") not in said
    assert parts() == expected
    status = json.loads(finish(batchgen(s3, tmp_path / "third", "status", URL, "--json")))
    assert (status["state"], status["ok"], status["error"]) == ("complete", ROWS - 1, 1)
    assert "nothing is wrong" in finish(batchgen(s3, tmp_path / "third", "verify", URL))
    assert "--watch follows a local folder" in finish(
        batchgen(s3, tmp_path / "third", "status", URL, "--watch"), 2
    )
    retried = finish(batchgen(s3, tmp_path / "third", "retry", URL, "--where", "null_prompt"))
    assert "1 of them" in retried or "complete" in retried
    assert parts() == expected


def test_a_bucket_that_is_not_there_is_said(s3: dict[str, str], job: Path, tmp_path: Path) -> None:
    said = finish(batchgen(s3, tmp_path / "c", "run", str(job), "--set", "output.path=s3://nowhere/x"), 5)
    assert "s3://nowhere/x/" in said
    assert "check the address" in said
