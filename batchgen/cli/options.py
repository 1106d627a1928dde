"""Arguments and options that several verbs share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

JOB = click.argument("job", type=click.Path(path_type=Path))
FOLDER = click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
SET: Callable[..., Any] = click.option(
    "--set",
    "sets",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a key of the job file, as in sampling.temperature=0.7; may be repeated.",
)


def print_json(value: Any) -> None:
    """One JSON document on stdout; ASCII, so that no terminal is steered by what is in it."""
    click.echo(json.dumps(value, indent=2, allow_nan=False))
