"""The catalogue of what a job file's faults say. A changed sentence is a changed interface."""

from __future__ import annotations

from pathlib import Path

import pytest
from job_files import SMALLEST, Write

from batchgen.job.load import load_job
from batchgen.job.unavailable import MEANS_OFF
from batchgen.types import UsageError

CATALOGUE = Path(__file__).parent / "error_sentences.txt"


def _catalogue() -> list[tuple[str, list[str]]]:
    """Job files with the sentences expected of each."""
    entries = []
    for entry in CATALOGUE.read_text(encoding="utf-8").split("\n\n")[1:]:
        lines = entry.strip("\n").split("\n")
        sentences = [f"job.yaml:{line}" for line in lines if not line.startswith(">")]
        whole = [line[3:] for line in lines if line.startswith(">>")]
        added = [line[2:] for line in lines if line.startswith("> ")]
        text = SMALLEST + "\n".join(added) if added else "\n".join(whole)
        entries.append((text + "\n", sentences))
    return entries


def _faults(file: Path, overrides: tuple[str, ...] = ()) -> str:
    with pytest.raises(UsageError) as error:
        load_job(file, overrides)
    assert error.value.exit_code == 2
    return str(error.value)


@pytest.mark.parametrize(("text", "sentences"), _catalogue())
def test_every_fault_says_where_what_and_what_to_do(job_file: Write, text: str, sentences: list[str]) -> None:
    message = _faults(job_file(text))
    if len(sentences) == 1:
        assert message == sentences[0]
    else:
        head, *faults = message.split("\n  ")
        assert head == f"job.yaml: {len(sentences)} faults"
        assert sorted(faults) == sorted(sentences)


def test_a_fault_of_an_override_names_the_flag(job_file: Write) -> None:
    assert _faults(job_file(SMALLEST), ("sampling.top_p=7",)) == (
        "--set sampling.top_p: sampling.top_p: 7 is not allowed; use null or a number above 0 and up to 1"
    )
    assert _faults(job_file(SMALLEST), ("sampling.top_p",)) == (
        "--set sampling.top_p: no key and value; write it as --set section.key=value"
    )
    assert _faults(job_file(SMALLEST), ("input.path=[a",)).startswith("--set input.path:1:3: not valid YAML")


@pytest.mark.parametrize("path", [p for p in MEANS_OFF if len(p) == 2], ids=".".join)
def test_what_is_not_built_is_refused_not_ignored(job_file: Write, path: tuple[str, str]) -> None:
    message = _faults(job_file(SMALLEST), (f"{'.'.join(path)}=something",))
    assert f"{'.'.join(path)} is not available in this version (given: 'something'); remove it" in message


def test_values_on_a_terminal_are_harmless(job_file: Write) -> None:
    message = _faults(job_file(SMALLEST + 'run: {order: "\\e[2J\\a"}\n'))
    assert message.isprintable()
    assert len(_faults(job_file(SMALLEST + f"run: {{order: {'x' * 500}}}\n"))) < 200
