"""`batchgen show`: one row as the model will see it."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from batchgen.cli.options import AS_JSON, JOB, SET, print_json
from batchgen.grammar import agreeing, counted, how_many

if TYPE_CHECKING:
    from batchgen.data.row import Row
    from batchgen.data.source import InputSet
    from batchgen.job.spec.job import JobSpec
    from batchgen.sampling.overrides import RowSampling
    from batchgen.text.prompt_spec import PromptSpec
    from batchgen.types import RowError, SamplingParams


@click.command("show", short_help="One row's prompt, its token ids, and the sampling in effect; no weights.")
@JOB
@click.option("--row", type=click.IntRange(min=0), help="Number of the row in the input, from 0.")
@click.option("--id", "row_id", help="The row with this id.")
@SET
@AS_JSON
def command(job: Path, row: int | None, row_id: str | None, sets: tuple[str, ...], as_json: bool) -> int:
    """Show how one row (default: the first) is rendered and tokenized, and what would be done with it.

    That is how it would be sampled, or, with another task than `generate`, which of its tokens are scored or
    how its embedding is made.
    """
    if row is not None and row_id is not None:
        raise click.UsageError("--row and --id both choose a row; give one of them")
    shown = _explain(job, sets, row, row_id)
    if as_json:
        print_json(shown)
    else:
        _print(shown)
    return 0


def _explain(job: Path, sets: tuple[str, ...], number: int | None, row_id: str | None) -> dict[str, Any]:
    from batchgen.api.job_input import bind_prompt, open_job_input
    from batchgen.api.job_model import find_model, find_tokenizer, load_tokenizer, recorded_commit
    from batchgen.data.prompt_values import prompt_values
    from batchgen.job.load import load_job
    from batchgen.text.prompt import Explanation, PromptRenderer

    spec = load_job(job, sets)
    with closing(open_job_input(spec)) as inputs:
        prompt = bind_prompt(spec, inputs)
        row = _find_row(inputs, number or 0, row_id)
    source = find_model(spec, recorded_commit(spec))
    tokenizer_source = find_tokenizer(spec)
    shown: dict[str, Any] = {"row": row.ordinal, "id": row.id, "file": row.file, "line": row.line}
    columns = prompt_values(row, prompt.required_columns())
    sampling, fault = _effective_sampling(spec, source.folder, prompt, columns)
    if row.error is not None:
        explanation = Explanation(None, [], 0, 0, row.error)
    else:
        renderer = PromptRenderer(prompt, load_tokenizer(tokenizer_source or source))
        explanation = renderer.explain(columns, spec.model.max_model_len, sampling)
    error = fault or explanation.error
    return {
        **shown,
        "status": "ok" if error is None else error.status.value,
        "error": None if error is None else {"class": error.error_class.value, "message": error.message},
        "prompt": explanation.text,
        "continuation": explanation.continuation,
        "tokens": [{"id": i, "token": text, "special": special} for i, text, special in explanation.tokens],
        "task": spec.task,
        "scored_tokens": explanation.scored_tokens,
        "control_tokens": explanation.control_tokens,
        "truncated_tokens": explanation.truncated_tokens,
        "sampling": _plain(sampling) if spec.task == "generate" else {},
        "embedding": spec.embedding.model_dump(mode="json") if spec.task == "embed" else {},
        "turns": _turns(prompt, columns),
        "overridden": _overridden(sampling, spec, source.folder) if spec.task == "generate" else [],
    }


def _find_row(inputs: InputSet, number: int, row_id: str | None) -> Row:
    from batchgen.types import UsageError

    row, count = _search(inputs, number, row_id)
    if row is not None:
        return row
    if row_id is not None:
        raise UsageError(
            f"--id {row_id}: {how_many(count, 'row')} {agreeing(count, 'was', 'were')} searched and none "
            "has this id; check it"
        )
    raise UsageError(f"--row {number}: the input has {how_many(count, 'row')}; count them from 0")


def _search(inputs: InputSet, number: int, row_id: str | None) -> tuple[Row | None, int]:
    """The row, and how many were before it."""
    count = 0
    for row in inputs.rows():
        if row.id == row_id if row_id is not None else row.ordinal == number:
            return row, count
        count += 1
    return None, count


def _effective_sampling(
    spec: JobSpec, folder: Path | None, prompt: PromptSpec, columns: dict[str, Any]
) -> tuple[SamplingParams, RowError | None]:
    """The section with its nulls filled as the first attempt would fill them, and the row's overrides."""
    from batchgen.types import RowFailure

    sampling = _row_sampling(spec, folder, prompt.per_row)
    try:
        return sampling.of_row(columns), None
    except RowFailure as failure:
        return sampling.of_job, failure.error


def _row_sampling(spec: JobSpec, folder: Path | None, column: str | None) -> RowSampling:
    from batchgen.sampling.overrides import RowSampling
    from batchgen.sampling.resolve import generation_defaults, read_generation_config

    defaults: dict[str, Any] = {}
    if spec.model.generation_defaults == "model" and folder is not None:
        defaults = generation_defaults(read_generation_config(folder))
    return RowSampling(spec.sampling.model_dump(), defaults, column)


def _turns(prompt: PromptSpec, columns: dict[str, Any]) -> int | None:
    """How many user turns a dialogue has; its prompt is shown up to the first."""
    value = columns.get(prompt.turns) if prompt.turns is not None else None
    return len(value) if isinstance(value, list) else None


def _plain(sampling: SamplingParams) -> dict[str, Any]:
    values = dataclasses.asdict(sampling)
    del values["logits_processors"]
    return values


def _overridden(sampling: SamplingParams, spec: JobSpec, folder: Path | None) -> list[str]:
    """Keys in which the row differs from the job."""
    ours, jobs = (_plain(s) for s in (sampling, _row_sampling(spec, folder, None).of_job))
    return [key for key, value in ours.items() if value != jobs[key]]


def _print(shown: dict[str, Any]) -> None:
    from batchgen.text.terminal import safe

    place = f"{shown['file']} line {shown['line']}" if shown["line"] else shown["file"]
    lines = [f"row {shown['row']}, id {shown['id']!r}, {place}"]
    if shown["error"] is not None:
        lines.append(f"{shown['status']} {shown['error']['class']}: {shown['error']['message']}")
    if shown["prompt"] is not None:
        lines += ["", _heading(shown), shown["prompt"]]
        if shown["continuation"] is not None:
            lines += ["", "continuation", shown["continuation"]]
        lines += ["", *_token_lines(shown)]
        if shown["control_tokens"]:
            lines.append(f"the row's own text spells {counted(shown['control_tokens'], 'control token')}")
        if shown["truncated_tokens"]:
            lines.append(
                f"{counted(shown['truncated_tokens'], 'token')} "
                f"{agreeing(shown['truncated_tokens'], 'was', 'were')} cut to make the prompt fit"
            )
    for section in ("sampling", "embedding"):
        if shown[section]:
            lines += ["", f"{section} (* of this row)" if shown["overridden"] else section]
        for key, value in shown[section].items():
            lines.append(
                f"{'*' if key in shown['overridden'] else ' '} {key}: {json.dumps(value, ensure_ascii=False)}"
            )
    click.echo(safe("\n".join(lines)))


def _heading(shown: dict[str, Any]) -> str:
    if shown["task"] == "loglikelihood":
        return "context"
    if shown["task"] != "generate":
        return "text"
    return "prompt" if shown["turns"] is None else f"prompt of turn 1 of {shown['turns']}"


def _token_lines(shown: dict[str, Any]) -> Iterator[str]:
    """Each token with its marks; those that are scored are the last ones."""
    tokens, scored = shown["tokens"], shown["scored_tokens"]
    marks = f"(* special, > scored: {scored:,})" if scored else "(* special)"
    yield f"{counted(len(tokens), 'token')} {marks}"
    for position, token in enumerate(tokens):
        mark = ">" if position >= len(tokens) - scored else " "
        yield (
            f"{position:7} {token['id']:8} {'*' if token['special'] else ' '}{mark if scored else ''} "
            f"{token['token']}"
        )
