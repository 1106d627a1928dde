"""README and docs: their job files load, docs/job-file.md has every key with its default and no other."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
import yaml

import batchgen
from batchgen.cli.main import VERBS, group
from batchgen.job.fingerprints import ModelFiles, fingerprint
from batchgen.job.include import INCLUDE
from batchgen.job.load import load_job
from batchgen.job.spec import SECTIONS, Section, TopSpec

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


def defaults(section: type[Section], prefix: str) -> dict[str, object]:
    return {
        f"{prefix}{name}": REQUIRED if field.is_required() else field.get_default(call_default_factory=True)
        for name, field in section.model_fields.items()
    }


def test_every_key_is_documented_with_its_default() -> None:
    expected: dict[str, object] = {INCLUDE: [], **defaults(TopSpec, "")}
    for name, section in SECTIONS.items():
        expected |= defaults(section, f"{name}.")
    found = {
        re.findall("`([^`]+)`", cells[0])[0]: yaml.safe_load(cells[2].strip("`"))
        for cells in rows_of(ROOT / "docs" / "job-file.md")
    }
    plain = {key: list(value) if isinstance(value, tuple) else value for key, value in expected.items()}
    assert found == plain


def test_the_marked_keys_are_those_that_a_folder_holds_to(tmp_path: Path) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(BASE)
    held = fingerprint(load_job(job), ModelFiles((), None), {})
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
