"""The JSON Schema for editors: what it takes is what the loader takes, as far as a schema can say it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from job_files import SMALLEST, Write
from jsonschema import Draft202012Validator

from batchgen.cli.main import main
from batchgen.job.load import load_job
from batchgen.job.schema import job_schema
from batchgen.job.spec.job import SECTIONS, TopSpec
from batchgen.job.unavailable import MEANS_OFF
from batchgen.job.yaml_loader import parse_document
from batchgen.types import UsageError

ROOT = Path(__file__).parents[2]
SCHEMA = Draft202012Validator(job_schema())


def _data(text: str) -> dict[str, Any]:
    return parse_document(text, "job.yaml").data


def test_it_is_a_schema_of_its_draft() -> None:
    Draft202012Validator.check_schema(job_schema())


@pytest.mark.parametrize(
    "file", [*sorted((ROOT / "jobs").glob("*.yaml")), ROOT / "tests/spec/full_job.yaml"], ids=lambda f: f.name
)
def test_every_example_is_valid(file: Path) -> None:
    SCHEMA.validate(_data(file.read_text()))


@pytest.mark.parametrize(
    "added",
    [
        "",
        "sampling: null\n",
        "run: {grace: 1m30s, max_time: '01:30:00', max_errors: 5%, min_free_disk: 1.5GiB}\n",
        "run: {grace: 20, max_errors: 0.1}\nengine: {kv_cache_memory: 4GB}\n",
        "run: {order: '${env:ORDER:-prefix}', grace: '${env:GRACE:-3s}'}\n",
        "sampling: {stop: ['a', b], top_p: 1, temperature: 0}\nname: x\n",
        "run: {metrics: 9400}\n",
        "run: {metrics: '0.0.0.0:9400'}\n",
        "include: []\n",
    ],
)
def test_what_loads_is_valid(job_file: Write, added: str) -> None:
    load_job(job_file(SMALLEST + added))
    SCHEMA.validate(_data(SMALLEST + added))


def test_shorthands_and_sections() -> None:
    for model in ("model: m/m", "model: {path: m/m, dtype: bf16}"):
        for given in ("input: a", "input: [a, b]", "input: {path: a}", "input: {path: [a], limit: 3}"):
            SCHEMA.validate(_data(f"{model}\n{given}\noutput: o\n"))


@pytest.mark.parametrize(
    "text",
    [
        "model: m/m\noutput: o\n",
        "model: {dtype: bf16}\ninput: i\noutput: o\n",
        SMALLEST + "zzz: 1\n",
        SMALLEST + "sampling: {temprature: 1}\n",
        SMALLEST + "sampling: {top_p: 7}\n",
        SMALLEST + "sampling: {max_tokens: '3'}\n",
        SMALLEST + "sampling: {stop: x}\n",
        SMALLEST + "run: {grace: soon}\n",
        SMALLEST + "run: {fail_fast: maybe}\n",
        SMALLEST + "task: chat\n",
        SMALLEST + "slurm: {gpus: 1}\n",
        SMALLEST + "run: 3\n",
        "model: m/m\ninput: []\noutput: o\n",
    ],
)
def test_what_is_wrong_is_invalid_and_does_not_load(job_file: Write, text: str) -> None:
    assert not SCHEMA.is_valid(_data(text))
    with pytest.raises(UsageError):
        load_job(job_file(text))


def test_an_including_file_may_leave_out_what_the_other_has() -> None:
    SCHEMA.validate(_data("include: base.yaml\nmodel: {dtype: bf16}\n"))


def test_every_key_is_there_with_words_and_its_default() -> None:
    properties = job_schema()["properties"]
    for name, model in SECTIONS.items():
        section = next(branch for branch in properties[name]["anyOf"] if branch["type"] == "object")
        assert properties[name]["description"]
        later = [path[1] for path in MEANS_OFF if len(path) == 2 and path[0] == name]
        assert sorted(section["properties"]) == sorted([*model.model_fields, *later])
        for key, schema in section["properties"].items():
            assert schema["description"], f"{name}.{key}"
            assert "default" in schema or model.model_fields[key].default_factory or key == "path"
        assert all(section["properties"][key]["deprecated"] for key in later)
    tops = [path[0] for path in MEANS_OFF if len(path) == 1]
    assert sorted(properties) == sorted([*SECTIONS, *TopSpec.model_fields, "include", *tops])


def test_the_command_prints_or_writes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["schema"]) == 0
    assert json.loads(capsys.readouterr().out) == job_schema()
    assert main(["schema", "--output", "s.json"]) == 0
    assert json.loads(Path("s.json").read_text()) == job_schema()
    assert main(["schema", "--output", "no/s.json"]) == 5
    assert (
        "--output no/s.json: cannot be written (No such file or directory); choose" in capsys.readouterr().err
    )
