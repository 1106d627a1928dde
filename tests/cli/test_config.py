"""`batchgen config`, and the comments of `job.resolved.yaml`: each value and where it came from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from batchgen.cli.main import main
from batchgen.job.load import load_job
from batchgen.job.resolved import resolved_yaml

Write = Callable[..., str]
Captured = pytest.CaptureFixture[str]


@pytest.fixture
def job(write_job: Write, monkeypatch: pytest.MonkeyPatch) -> str:
    """A job of two files, a variable, and a model with sampling of its own."""
    monkeypatch.setenv("TOKEN", "hunter2")
    Path("base.yaml").write_text("sampling: {seed: 7, stop: [a, b]}\noutput: {columns: {status: s}}\n")
    return write_job("include: base.yaml\nsampling: {min_p: 0.1}\nprompt: {system: 'use ${env:TOKEN}'}\n")


def _origins(job: str, capsys: Captured, *arguments: str) -> dict[str, dict[str, object]]:
    assert main(["config", job, "--origin", "--json", *arguments]) == 0
    answer: dict[str, dict[str, object]] = json.loads(capsys.readouterr().out)
    return answer


def test_every_value_says_where_it_came_from(job: str, capsys: Captured) -> None:
    shown = _origins(job, capsys, "--set", "sampling.max_tokens=9")
    for key, value, origin in (
        ("version", 1, "default"),
        ("sampling.seed", 7, "base.yaml:1:18"),
        ("sampling.stop", ["a", "b"], "base.yaml:1:27"),
        ("sampling.min_p", 0.1, "job.yaml:5:19"),
        ("sampling.max_tokens", 9, "--set sampling.max_tokens"),
        ("sampling.temperature", 0.6, "the model's generation_config.json"),
        ("sampling.top_k", 0, "neutral value"),
        ("prompt.system", "use ${env:TOKEN}", "job.yaml:6:18 (environment TOKEN)"),
        ("output.columns", {"status": "s"}, "base.yaml:2:28"),
        ("model.dtype", "auto", "default"),
        ("input.path", [str(Path("prompts.jsonl").absolute())], "job.yaml:2:8"),
    ):
        assert shown[key] == {"value": value, "origin": origin}


def test_it_prints_a_job_file(job: str, capsys: Captured) -> None:
    assert main(["config", job]) == 0
    text = capsys.readouterr().out
    assert "hunter2" not in text
    Path("whole.yaml").write_text(text)
    whole = load_job("whole.yaml")
    assert (whole.sampling.temperature, whole.sampling.seed) == (0.6, 7)
    assert whole.prompt.system == "use hunter2"


def test_a_table_for_people(job: str, capsys: Captured) -> None:
    assert main(["config", job, "--origin"]) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["sampling.seed", "7", "base.yaml:1:18"] in lines
    assert main(["config", job, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sampling"]["seed"] == 7


def test_a_model_that_is_not_there_is_a_note(job: str, capsys: Captured) -> None:
    assert main(["config", job, "--set", "model=./gone", "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["sampling"]["temperature"] is None
    assert err.startswith("note: the model's own sampling is not known: model.path: ")


def test_the_copy_beside_the_results_says_it_in_comments(job: str) -> None:
    text = resolved_yaml(load_job(job, ["sampling.max_tokens=9", "name=x"]))
    assert text.partition("# Where values were given")[2].splitlines()[1:] == [
        "#   input.path: job.yaml:2:8",
        "#   model.path: job.yaml:1:8",
        "#   name: --set name",
        "#   output.columns.status: base.yaml:2:28",
        "#   output.path: job.yaml:3:9",
        "#   prompt.system: job.yaml:6:18 (environment TOKEN)",
        "#   sampling.max_tokens: --set sampling.max_tokens",
        "#   sampling.min_p: job.yaml:5:19",
        "#   sampling.seed: base.yaml:1:18",
        "#   sampling.stop: base.yaml:1:27",
    ]
    Path("copy.yaml").write_text(text)
    assert load_job("copy.yaml").sampling == load_job(job, ["sampling.max_tokens=9"]).sampling
