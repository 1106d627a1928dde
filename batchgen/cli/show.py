"""`batchgen show`: one row as the model will see it."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from batchgen.cli.options import AS_JSON, JOB, SET, print_json

if TYPE_CHECKING:
    from batchgen.data.row import Row
    from batchgen.data.source import InputSet
    from batchgen.job.spec import JobSpec


@click.command("show", short_help="One row's prompt, its token ids, and the sampling in effect; no weights.")
@JOB
@click.option("--row", type=click.IntRange(min=0), help="Number of the row in the input, from 0.")
@click.option("--id", "row_id", help="The row with this id.")
@SET
@AS_JSON
def command(job: Path, row: int | None, row_id: str | None, sets: tuple[str, ...], as_json: bool) -> int:
    """Show how one row (default: the first) is rendered and tokenized, and how it would be sampled."""
    if row is not None and row_id is not None:
        raise click.UsageError("--row and --id both choose a row; give one of them")
    shown = _explain(job, sets, row, row_id)
    if as_json:
        print_json(shown)
    else:
        _print(shown)
    return 0


def _explain(job: Path, sets: tuple[str, ...], number: int | None, row_id: str | None) -> dict[str, Any]:
    from batchgen.cli import checks
    from batchgen.data.prompt_values import prompt_values
    from batchgen.job.load import load_job
    from batchgen.text.prompt import PromptRenderer

    spec = load_job(job, sets)
    with closing(checks.open_job_input(spec)) as inputs:
        prompt = checks.bind_prompt(spec, inputs)
        row = _find_row(inputs, number or 0, row_id)
    source = checks.find_model(spec, checks.recorded_commit(spec))
    tokenizer_source = checks.find_tokenizer(spec)
    shown: dict[str, Any] = {"row": row.ordinal, "id": row.id, "file": row.file, "line": row.line}
    if row.error is not None:
        shown |= {"prompt": None, "tokens": [], "control_tokens": 0, "error": _error(row.error)}
    else:
        renderer = PromptRenderer(prompt, checks.load_tokenizer(tokenizer_source or source))
        explanation = renderer.explain(
            prompt_values(row, renderer.required_columns()), spec.model.max_model_len
        )
        shown |= {
            "prompt": explanation.text,
            "tokens": [
                {"id": i, "token": text, "special": special} for i, text, special in explanation.tokens
            ],
            "control_tokens": explanation.control_tokens,
            "error": None if explanation.error is None else _error(explanation.error),
        }
    return {**shown, "sampling": _effective_sampling(spec, source.folder)}


def _find_row(inputs: InputSet, number: int, row_id: str | None) -> Row:
    from batchgen.types import UsageError

    row, count = _search(inputs, number, row_id)
    if row is not None:
        return row
    if row_id is not None:
        raise UsageError(f"--id {row_id}: none of the {count:,} rows has this id")
    raise UsageError(f"--row {number}: the input has {count:,} rows, numbered from 0")


def _search(inputs: InputSet, number: int, row_id: str | None) -> tuple[Row | None, int]:
    """The row, and how many were before it."""
    count = 0
    for row in inputs.rows():
        if row.id == row_id if row_id is not None else row.ordinal == number:
            return row, count
        count += 1
    return None, count


def _error(error: Any) -> dict[str, str]:
    return {"class": error.error_class.value, "message": error.message}


def _effective_sampling(spec: JobSpec, folder: Path | None) -> dict[str, Any]:
    """The section with its nulls filled as the first attempt would fill them."""
    import dataclasses
    import json

    from batchgen.sampling.resolve import generation_defaults, resolve_sampling

    defaults: dict[str, Any] = {}
    if spec.model.generation_defaults == "model" and folder is not None:
        file = folder / "generation_config.json"
        defaults = generation_defaults(json.loads(file.read_text())) if file.is_file() else {}
    return dataclasses.asdict(resolve_sampling(spec.sampling.model_dump(), defaults))


def _print(shown: dict[str, Any]) -> None:
    from batchgen.cli.terminal import safe

    place = f"{shown['file']} line {shown['line']}" if shown["line"] else shown["file"]
    lines = [f"row {shown['row']}, id {shown['id']!r}, {place}"]
    if shown["error"] is not None:
        lines.append(f"error {shown['error']['class']}: {shown['error']['message']}")
    if shown["prompt"] is not None:
        lines += ["", "prompt", shown["prompt"], "", f"{len(shown['tokens'])} tokens (* special)"]
        lines += [
            f"{position:7} {token['id']:8} {'*' if token['special'] else ' '} {token['token']}"
            for position, token in enumerate(shown["tokens"])
        ]
        if shown["control_tokens"]:
            lines.append(f"the row's own text spells {shown['control_tokens']} control tokens")
    lines += ["", "sampling", *(f"  {key}: {value!r}" for key, value in shown["sampling"].items())]
    click.echo(safe("\n".join(lines)))
