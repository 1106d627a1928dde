"""The `batchgen` command: finds the verb, turns its errors into messages and exit codes.

The entry point of the package. A verb's module is imported only when it is called or listed, and those
modules import everything heavy inside their functions, so that `batchgen --help` is immediate.
"""

from __future__ import annotations

import importlib
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

import click

import batchgen
from batchgen.cli.standard_files import open_standard_files, refused_output, say_if_possible
from batchgen.text.terminal import safe
from batchgen.types import BatchgenError, StorageError

if TYPE_CHECKING:
    from batchgen.job.run_options import Launcher

VERBS = (
    "run",
    "validate",
    "plan",
    "show",
    "status",
    "report",
    "retry",
    "export",
    "verify",
    "bench",
    "init",
    "config",
    "schema",
    "version",
)
SECOND_INTERRUPT = 130


class _Verbs(click.Group):
    """A group whose commands are the modules named in `VERBS`, each with a `command`."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in VERBS:
            return None
        command: click.Command = importlib.import_module(f"batchgen.cli.{name}").command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            import difflib

            near = difflib.get_close_matches(args[0], VERBS, n=1)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(VERBS)}"
            ctx.fail(f"no verb {args[0]!r}; {hint}")
        return super().resolve_command(ctx, args)


@click.command(
    cls=_Verbs,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="Exit codes: 0 done, 1 a bug, 2 usage or job file, 3 input, 4 the job differs from its "
    "folder, 5 storage, 6 another process owns the run, 7 engine, 8 finished with faults, 75 run it again, "
    "130 stopped at once.",
)
@click.version_option(batchgen.__version__, prog_name="batchgen")
def group() -> None:
    """Offline batch inference for language models: every row exactly once, resumable to the byte.

    Running the same line again always means: continue.
    """


def main(arguments: Sequence[str] | None = None, *, launch: Launcher | None = None) -> int:
    """Run one command line and return the exit code.

    Args:
        arguments: the command line; default: the process's own.
        launch: starts the worker processes of `run`; default: `batchgen.dist.handle.launch_worker`.
    """
    open_standard_files()
    try:
        result = group.main(args=arguments, prog_name="batchgen", standalone_mode=False, obj=launch)
        return result if isinstance(result, int) else 0
    except click.Abort:
        return SECOND_INTERRUPT
    except click.ClickException as error:
        with suppress(OSError):
            error.show()
        return 2
    except BatchgenError as error:
        _complain(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        return SECOND_INTERRUPT
    except SystemExit:
        # click's answer when whoever read our output has gone, as in `batchgen status out | head -1`.
        # A run that was cut off in this way is not complete.
        given = sys.argv[1:] if arguments is None else arguments
        return 1 if list(given[:1]) == ["run"] else 0
    except Exception as error:
        given = sys.argv[1:] if arguments is None else arguments
        refused = _storage_fault(error, given) if isinstance(error, OSError) else None
        if refused is not None:
            _complain(refused)
            return StorageError.exit_code
        traceback.print_exc()
        _complain(
            f"this is a bug in batchgen {batchgen.__version__}; please report it with the lines above. "
            "Finished rows are safe: the same command continues where it stopped."
        )
        return 1


def _storage_fault(error: OSError, arguments: Sequence[str]) -> str | None:
    """A sentence about a disk or a limit that is in the way; None where the error is a bug of ours."""
    from batchgen.job.files import is_of_storage, storage_error

    if (refused := refused_output(error)) is not None or not is_of_storage(error):
        return refused
    place = error.filename or f"a file that `batchgen {' '.join(arguments[:1])}` needs"
    return str(storage_error(place, error, action="read or written"))


def _complain(message: str) -> None:
    say_if_possible(f"batchgen: {safe(message)}")
