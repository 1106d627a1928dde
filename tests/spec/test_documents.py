"""README and docs: their job files load, docs/job-file.md has every key with its default and no other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

import batchgen
from batchgen.cli.main import VERBS, group
from batchgen.job.fingerprints import ModelFiles, fingerprint
from batchgen.job.include import INCLUDE
from batchgen.job.load import load_job
from batchgen.job.resolved import resolved_dict
from batchgen.job.spec.job import SECTIONS, TopSpec
from batchgen.promise import PROMISES, STORED

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BASE = "model: org/name\ninput: prompts.jsonl\noutput: out/\n"
REQUIRED = "required"


def fenced(language: str) -> list[pytest.param]:
    """The blocks of a language, each named by its document and number."""
    return [
        pytest.param(block, id=f"{document.name}-{number}")
        for document in DOCUMENTS
        for number, block in enumerate(
            re.findall(rf"^```{language}\n(.*?)^```", document.read_text(), re.M | re.S)
        )
    ]


@pytest.mark.parametrize("block", fenced("yaml"))
def test_a_job_file_loads(block: str, tmp_path: Path) -> None:
    """A fragment over a job that has the rest."""
    (tmp_path / "base.yaml").write_text(BASE)
    job = tmp_path / "job.yaml"
    job.write_text("include: [base.yaml]\n" + block)
    load_job(job)


@pytest.mark.parametrize("block", fenced("python"))
def test_python_compiles_and_names_what_exists(block: str) -> None:
    compile(block, "document", "exec")
    assert set(re.findall(r"\bbg\.(\w+)", block)) <= set(batchgen.__all__)


@pytest.mark.parametrize("block", fenced("sh"))
def test_commands_exist_with_their_options(block: str) -> None:
    for verb, rest in re.findall(r"\bbatchgen (\w+)([^\n;#]*)", block):
        command = group.get_command(click.Context(group), verb)
        assert command is not None, verb
        known = {option for parameter in command.params for option in parameter.opts}
        assert set(re.findall(r"(?<!\S)--[a-z-]+", rest)) <= known, verb


def rows_of(document: Path) -> Iterator[list[str]]:
    for line in document.read_text().splitlines():
        if line.startswith("| `"):
            yield [cell.strip() for cell in line.strip("|").split("|")]


def test_the_table_of_verbs_is_whole_and_its_options_exist() -> None:
    table = {cells[0].split()[0].strip("`"): " ".join(cells[1:]) for cells in rows_of(ROOT / "README.md")}
    assert tuple(table) == VERBS
    for verb, text in table.items():
        command = group.get_command(click.Context(group), verb)
        assert command is not None
        known = {option for parameter in command.params for option in parameter.opts}
        assert set(re.findall(r"`(--[a-z-]+)", text)) <= known, verb


def test_what_is_promised_about_bits_is_what_the_engine_goes_by() -> None:
    found = [
        tuple(cell.strip() for cell in line.strip("|").split("|"))
        for line in (ROOT / "docs" / "numerics.md").read_text().splitlines()
        if line.startswith(("| cpu |", "| cuda |"))
    ]

    def names(values: tuple[str | bool, ...]) -> str:
        return ", ".join(f"`{str(value).lower() if isinstance(value, bool) else value}`" for value in values)

    assert found == [
        (
            line.device,
            names(line.dtypes),
            "any" if line.kv_dtypes == STORED else names(line.kv_dtypes),
            names(line.deterministic),
            line.sentence,
        )
        for line in PROMISES
    ]


def documented() -> dict[str, str]:
    """Each key with its default as docs/job-file.md shows it."""
    return {
        re.findall("`([^`]+)`", cells[0])[0]: cells[2].strip("`")
        for cells in rows_of(ROOT / "docs" / "job-file.md")
    }


def test_every_key_is_documented_and_no_other() -> None:
    keys = {INCLUDE, *TopSpec.model_fields}
    required = set()
    for name, section in SECTIONS.items():
        keys |= {f"{name}.{key}" for key in section.model_fields}
        required |= {f"{name}.{key}" for key, field in section.model_fields.items() if field.is_required()}
    found = documented()
    assert found.keys() == keys
    assert {key for key, default in found.items() if default == REQUIRED} == required


def test_the_documented_defaults_are_the_defaults(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(BASE)
    given = [f"{key}={text}" for key, text in documented().items() if text != REQUIRED and key != INCLUDE]
    assert resolved_dict(load_job(job, given)) == resolved_dict(load_job(job))


def test_the_marked_keys_are_those_that_a_folder_holds_to(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(BASE)
    held = fingerprint(load_job(job, ["task=embed"]), ModelFiles((), None), {})
    marked = {
        re.findall("`([^`]+)`", cells[0])[0]
        for cells in rows_of(ROOT / "docs" / "job-file.md")
        if cells[0].endswith("•")
    }
    sections = {name: keys for name, keys in held.result.items() if name in SECTIONS}
    sections["input"] = held.input.keys() - {"format", "files"}
    # These are held to by what is in the files.
    by_content = {"model.path", "model.revision", "model.tokenizer", "input.path", "input.format", "task"}
    assert marked == by_content | {f"{name}.{key}" for name, keys in sections.items() for key in keys}
