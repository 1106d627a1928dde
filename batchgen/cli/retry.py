"""`batchgen retry`: compute failed rows of a complete folder anew and replace the parts that hold them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from batchgen.job.run_options import Launcher


@click.command("retry", short_help="Compute failed rows anew and replace the parts that hold them.")
@click.argument("folder", metavar="DIR")
@click.option(
    "--where",
    metavar="CLASS,…",
    help="Which rows: error classes, errors, finish_reason=length, status=skipped, row=10:20, id=…",
)
@click.option(
    "--set",
    "sets",
    multiple=True,
    metavar="KEY=VALUE",
    help="Another setting for these rows, as in sampling.max_tokens=512; may be repeated.",
)
@click.pass_obj
def command(launch: Launcher | None, folder: str, where: str | None, sets: tuple[str, ...]) -> int:
    """Compute failed rows of a complete output folder anew; all others stay as they are.

    Without --where: the rows that failed with a class that another attempt can change. The job is the one in
    the folder's job.resolved.yaml. Present results stay readable until the new ones replace them, and the
    same command continues a retry that was stopped.
    """
    from batchgen.api.retry import retry

    return retry(folder, where, sets, launch=launch).exit_code
