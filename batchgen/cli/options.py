"""Arguments and options that several verbs share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

JOB = click.argument("job", type=click.Path(path_type=Path))
URL = "batchgen.folder_url"
"""Where a command's context keeps the URL of a folder that it got as a copy."""


class _Folder(click.ParamType):  # type: ignore[type-arg]
    """An output folder; of one in an object store, a temporary copy that lasts as long as the command."""

    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        from batchgen.data.urls import is_url

        if ctx is None or not is_url(str(value)):
            return Path(value)
        from batchgen.job.remote import fetched

        ctx.meta[URL] = value
        return ctx.with_resource(fetched(value))


FOLDER = click.argument("folder", metavar="DIR", type=_Folder())
AS_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
SET: Callable[..., Any] = click.option(
    "--set",
    "sets",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a key of the job file, as in sampling.temperature=0.7; may be repeated.",
)


def needs_local(what: str) -> None:
    """Refuse what makes no sense on the copy of a folder in an object store. Raises UsageError."""
    from batchgen.types import UsageError

    url = click.get_current_context().meta.get(URL)
    if url is not None:
        raise UsageError(f"{url}: {what}")


def print_json(value: Any) -> None:
    """One JSON document on stdout; ASCII, so that no terminal is steered by what is in it."""
    click.echo(json.dumps(value, indent=2, allow_nan=False))


def human_size(count: int | None) -> str:
    """`812 B`, `3.4 MB`, `1.2 TB`."""
    if count is None:
        return "?"
    size = float(count)
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 999.5 or unit == "TB":
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
