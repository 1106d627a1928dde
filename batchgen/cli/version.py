"""`batchgen version`: what to put into a report."""

from __future__ import annotations

import click

from batchgen.cli.options import AS_JSON, print_json

LIBRARIES = ("torch", "transformers", "tokenizers", "pyarrow", "numpy", "numba", "datasets")


@click.command("version", short_help="Versions of batchgen and the libraries that results depend on.")
@AS_JSON
def command(as_json: bool) -> None:
    """Print the versions of batchgen, Python and the libraries that results depend on."""
    import platform
    from importlib.metadata import PackageNotFoundError, version

    import batchgen

    versions = {"batchgen": batchgen.__version__, "python": platform.python_version()}
    for library in LIBRARIES:
        try:
            versions[library] = version(library)
        except PackageNotFoundError:
            versions[library] = "not installed"
    versions["platform"] = platform.platform()
    if as_json:
        print_json(versions)
    else:
        for name, text in versions.items():
            click.echo(f"{name:14}{text}")
