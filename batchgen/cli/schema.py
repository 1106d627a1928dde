"""`batchgen schema`: the job file's JSON Schema, for editors."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("schema", short_help="JSON Schema of the job file, so that an editor completes and checks it.")
@click.option("--output", type=click.Path(path_type=Path), help="Write it to this file instead.")
def command(output: Path | None) -> None:
    """Print the JSON Schema of the job file.

    Editors with a YAML language server use it where the first line of a job file is
    "# yaml-language-server: $schema=FILE".
    """
    import json

    from batchgen.job.schema import job_schema
    from batchgen.types import StorageError

    text = json.dumps(job_schema(), indent=2, allow_nan=False) + "\n"
    if output is None:
        click.echo(text, nl=False)
        return
    try:
        output.write_text(text)
    except OSError as error:
        raise StorageError(
            f"--output {output}: cannot be written ({error.strerror}); choose another file"
        ) from error
