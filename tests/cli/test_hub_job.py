"""A job whose model comes from the hub: what is fetched when, and which commit a continued job uses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_engine import launcher
from stand_in_hub import StandInHub

from batchgen.cli.main import main

Write = Callable[..., str]
Captured = pytest.CaptureFixture[str]
ROOT = Path(__file__).parents[2]


def _recorded() -> dict[str, str]:
    commits: dict[str, str] = json.loads(Path("out/manifest.json").read_text())["commits"]
    return commits


def test_a_job_keeps_the_commit_that_its_branch_was_at_first(
    hub: StandInHub, write_job: Write, tokenizer_folder: Path
) -> None:
    job = write_job("prompt: {mode: tokens}\n", '{"prompt_token_ids": [1]}\n{"prompt_token_ids": [2]}\n')
    first = hub.push_folder("org/m", tokenizer_folder, "v1")
    line = ["run", job, "--set", "model.path=org/m", "--set", "model.revision=v1", "--progress", "none"]
    assert main([*line, "--limit", "1"], launch=launcher()) == 0
    assert _recorded() == {"org/m@v1": first}
    files = {file.name: file.read_bytes() for file in tokenizer_folder.iterdir()}
    second = hub.push("org/m", {**files, "config.json": b'{"model_type": "llama", "x": 1}'}, "v1")
    assert main(line, launch=launcher()) == 0
    assert _recorded() == {"org/m@v1": first}
    assert main([*line, "--set", "model.revision=main"], launch=launcher()) == 2
    assert main([*line, "--overwrite"], launch=launcher()) == 0
    assert _recorded() == {"org/m@v1": second}


def test_hf_endpoint_and_hf_home_are_heard(hub: StandInHub, tokenizer_folder: Path, tmp_path: Path) -> None:
    """In a process of its own, as a user sets them."""
    commit = hub.push_folder("org/m", tokenizer_folder)
    home = str(tmp_path / "home")
    environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": home, "HF_HUB_OFFLINE": "0"}
    code = "from batchgen.models.source import find_model; print(find_model('org/m').folder)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**environment, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == f"{home}/hub/models--org--m/snapshots/{commit}"
    assert done.stderr == ""


def test_validate_fetches_no_weights(
    hub: StandInHub, write_job: Write, tokenizer_folder: Path, capsys: Captured
) -> None:
    hub.push_folder("org/m", tokenizer_folder)
    assert main(["validate", write_job(), "--set", "model.path=org/m"]) == 0
    assert capsys.readouterr().err == "valid: nothing found that would stop this job\n"
    assert "model.safetensors" not in hub.fetched
    assert "tokenizer.json" in hub.fetched


def test_what_the_hub_does_not_have_is_a_fault_with_its_place(
    hub: StandInHub, write_job: Write, tokenizer_folder: Path, capsys: Captured
) -> None:
    job = write_job()
    hub.push_folder("org/m", tokenizer_folder)
    sets = ["--set", "model.path=org/m", "--set", "model.revision=v9", "--set", "model.tokenizer=org/none"]
    assert main(["validate", job, *sets, "--json"]) == 2
    faults = json.loads(capsys.readouterr().out)["faults"]
    assert [(fault["key"], fault["file"]) for fault in faults] == [
        ("model.revision", "--set model.revision"),
        ("model.tokenizer", "--set model.tokenizer"),
    ]
