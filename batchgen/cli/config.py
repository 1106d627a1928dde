"""`batchgen config`: a job with every value that will be used, and where each came from."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from batchgen.cli.options import AS_JSON, JOB, SET, print_json

if TYPE_CHECKING:
    from batchgen.job.spec.job import JobSpec

GENERATION_CONFIG = "the model's generation_config.json"
NEUTRAL = "neutral value"


@click.command("config", short_help="The job with every value that will be used, and where each came from.")
@JOB
@SET
@click.option("--origin", is_flag=True, help="Say of each value where it came from.")
@AS_JSON
def command(job: Path, sets: tuple[str, ...], origin: bool, as_json: bool) -> int:
    """Print a job with includes, command line, defaults and the model's own sampling put together.

    What came from the environment is shown as the job file has it. Without --origin the output is a job file.
    """
    from batchgen.job.load import load_job
    from batchgen.job.origins import all_origins
    from batchgen.job.resolved import dump_yaml, resolved_dict
    from batchgen.text.terminal import safe

    spec = load_job(job, sets)
    values, origins = resolved_dict(spec), all_origins(spec)
    _fill_sampling(spec, values["sampling"], origins)
    if as_json:
        print_json(_with_origins(values, origins) if origin else values)
    elif origin:
        click.echo(safe(_table(values, origins)))
    else:
        click.echo(dump_yaml(values), nl=False)
    return 0


def _fill_sampling(spec: JobSpec, sampling: dict[str, Any], origins: dict[str, str]) -> None:
    """Fill nulls as the first attempt will, if the model's configuration can be had."""
    from batchgen.api.job_model import find_model, recorded_commit
    from batchgen.sampling.resolve import NEUTRAL as NEUTRAL_VALUES
    from batchgen.sampling.resolve import generation_defaults, read_generation_config
    from batchgen.types import BatchgenError

    defaults: dict[str, Any] = {}
    if spec.model.generation_defaults == "model":
        try:
            folder = find_model(spec, recorded_commit(spec)).tokenizer_folder()
            defaults = generation_defaults(read_generation_config(folder))
        except BatchgenError as error:
            click.echo(f"note: the model's own sampling is not known: {error}", err=True)
            return
    for key, neutral in NEUTRAL_VALUES.items():
        if sampling.get(key) is None:
            sampling[key] = defaults.get(key, neutral)
            origins[f"sampling.{key}"] = GENERATION_CONFIG if key in defaults else NEUTRAL


def _with_origins(values: dict[str, Any], origins: dict[str, str]) -> dict[str, Any]:
    return {key: {"value": _at(values, key), "origin": origin} for key, origin in origins.items()}


def _table(values: dict[str, Any], origins: dict[str, str]) -> str:
    from batchgen.job.faults import show_value

    rows = [(key, show_value(_at(values, key)), origin) for key, origin in origins.items()]
    keys, shown = (max(len(row[n]) for row in rows) for n in (0, 1))
    return "\n".join(f"{key:{keys}}  {value:{min(shown, 40)}}  {origin}" for key, value, origin in rows)


def _at(values: dict[str, Any], key: str) -> Any:
    section, _, name = key.partition(".")
    return values[section][name] if name else values[section]
