"""`batchgen export`: the final rows of an output folder as one file in another format."""

from __future__ import annotations

import sys
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING

import click

from batchgen.cli.options import FOLDER
from batchgen.grammar import how_many

if TYPE_CHECKING:
    from batchgen.data.source import InputSet
    from batchgen.job.export import ExportOptions
    from batchgen.job.folder_rows import FolderRows
    from batchgen.job.spec.job import JobSpec

STDOUT = "-"


@click.command("export", short_help="Final rows as Parquet, JSONL, CSV or OpenAI batch lines; partial too.")
@FOLDER
@click.option(
    "--format",
    "format_",
    type=click.Choice(["parquet", "jsonl", "csv", "openai_batch"]),
    required=True,
    help="What to write.",
)
@click.option("--partial", is_flag=True, help="Also rows that are final and in no part yet; needs the input.")
@click.option("--columns", metavar="A,B", help="Only these columns, by their names in the output.")
@click.option(
    "--output",
    metavar="PATH",
    help="A file, a folder (a file for each part), or - for standard output; default: DIR/export.EXT. "
    "A name that ends in .gz or .zst is compressed.",
)
@click.option("--csv-safe", is_flag=True, help="Guard cells that a spreadsheet would run as formulas.")
@click.option("--force", is_flag=True, help="Replace files that exist.")
def command(
    folder: Path,
    format_: str,
    partial: bool,
    columns: str | None,
    output: str | None,
    csv_safe: bool,
    force: bool,
) -> int:
    """Write the final rows of an output folder in another format, whether its job runs, is done or dead.

    Nothing in the folder is changed or locked. Rows come in input order.
    """
    from batchgen.job import export, folder_rows
    from batchgen.job.run_options import model_label
    from batchgen.text.terminal import safe

    if csv_safe and format_ != "csv":
        raise click.UsageError("--csv-safe is for --format csv")
    with ExitStack() as stack:
        spec = _resolved_job(folder, required=partial)
        inputs = stack.enter_context(closing(_inputs(spec))) if partial and spec is not None else None
        source = stack.enter_context(closing(folder_rows.FolderRows(folder, inputs)))
        options = export.ExportOptions(
            format=format_,
            columns=None if columns is None else tuple(columns.split(",")),
            csv_safe=csv_safe,
            model="unknown" if spec is None else model_label(spec),
            chat=spec is None or spec.prompt.mode == "chat",
        )
        if output == STDOUT:
            return _to_stdout(source, options)
        path = folder / f"export{export.FORMATS[format_]}" if output is None else Path(output)
        into_folder = path.is_dir() or (output or "").endswith("/")
        write = export.export_to_folder if into_folder else export.export_to_file
        rows = write(source, options, path, force=force)
    click.echo(safe(f"{path}: {how_many(rows, 'row')}"), err=True)
    return 0


def _to_stdout(source: FolderRows, options: ExportOptions) -> int:
    from batchgen.job.export import export_to_stream

    try:
        export_to_stream(source, options, sys.stdout.buffer)
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        # Whoever read us has enough, as in `… | head`. Python must not complain at exit either.
        sys.stdout = None
    return 0


def _resolved_job(folder: Path, *, required: bool) -> JobSpec | None:
    from batchgen.job.folder import JobFolder
    from batchgen.job.load import load_job
    from batchgen.types import BatchgenError

    try:
        return load_job(JobFolder(folder).resolved_job)
    except BatchgenError:
        if required and JobFolder(folder).manifest.exists():
            raise
        return None


def _inputs(spec: JobSpec) -> InputSet:
    from batchgen.api.job_input import open_job_input

    return open_job_input(spec)
