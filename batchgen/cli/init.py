"""`batchgen init`: a first job file for an input and a model, with a comment on each key that matters."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from batchgen.job.scaffold import Proposal

FILE_NAME = "job.yaml"


@click.command("init", short_help="Write a first job file for an input and a model.")
@click.argument("place", metavar="[DIR|FILE]", default=".")
@click.option("--input", "given", metavar="FILE", help="The input; its columns decide the prompt.")
@click.option("--model", help="Hub id, folder or .gguf file.")
@click.option("--output", metavar="DIR", default="out/", show_default=True, help="Where results will go.")
def command(place: str, given: str | None, model: str | None, output: str) -> int:
    """Write a job file, by default ./job.yaml, that `batchgen validate` accepts; never overwrites one.

    Looks at the first rows of the input and proposes how they become prompts.
    """
    from batchgen.job.scaffold import Proposal, job_text
    from batchgen.text.terminal import safe

    file = Path(place, FILE_NAME) if os.path.isdir(place) or place.endswith(os.sep) else Path(place)
    proposal = Proposal() if given is None else _proposal(given, model)
    text = job_text(
        model=_seen_from(file, model or "org/name"),
        input=_seen_from(file, given or "prompts.jsonl"),
        output=output,
        proposal=proposal,
    )
    _write(file, text)
    click.echo(safe(f"wrote {file}; look it over, then: batchgen validate {file}"), err=True)
    return 0


def _proposal(given: str, model: str | None) -> Proposal:
    from contextlib import closing

    from batchgen.data.prompt_values import prompt_values
    from batchgen.data.source import open_input
    from batchgen.job.scaffold import propose_prompt

    with closing(open_input(given)) as inputs:
        columns = inputs.columns()
        rows = [prompt_values(row, columns) for row in inputs.window() if row.error is None]
    return propose_prompt(rows, chat=_has_chat_template(model))


def _has_chat_template(model: str | None) -> bool:
    """Whether the model's files hold one; taken to be so where no model is given, or it is a GGUF file."""
    from batchgen.models.source import find_model

    folder = find_model(model).folder if model is not None else None
    if folder is None or (folder / "chat_template.jinja").is_file():
        return True
    try:
        return "chat_template" in json.loads((folder / "tokenizer_config.json").read_bytes())
    except (OSError, ValueError):
        return False


def _seen_from(file: Path, path: str) -> str:
    """A path as the job file must have it, which is relative to its own folder."""
    if os.path.isabs(path) or path.startswith("~") or "://" in path or not os.path.lexists(path):
        return path
    relative = os.path.relpath(path, file.parent)
    return (
        relative if os.sep in relative else os.path.join(".", relative) if os.path.isdir(path) else relative
    )


def _write(file: Path, text: str) -> None:
    from contextlib import suppress

    from batchgen.types import StorageError, UsageError

    try:
        with suppress(FileExistsError):
            file.parent.mkdir(parents=True, exist_ok=True)
        with file.open("x", encoding="utf-8") as handle:
            handle.write(text)
    except FileExistsError as error:
        raise UsageError(f"{file}: is there already; choose another name, or remove it first") from error
    except OSError as error:
        raise StorageError(f"{file}: cannot be written ({error.strerror}); choose another place") from error
