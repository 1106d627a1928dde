"""Where a story is told: a folder of its own, `batchgen` and Python in it, and what each must end with."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from scripted_worker import Script

from batchgen.cli.main import main
from batchgen.types import BatchgenError

JOB = "model: ./model\ninput: prompts.jsonl\noutput: out/\n"


class Stage:
    """The current folder, with the good small job of two prompts in it.

    Attributes:
        wrong: what did not end as the story says.
        said: all that was said.
    """

    def __init__(self, model: Path) -> None:
        self.wrong: list[str] = []
        self.said = ""
        self.write(job_yaml=JOB, prompts_jsonl='{"prompt": "hi"}\n{"prompt": "ho"}\n')
        Path("model").symlink_to(model)

    def write(self, **files: str | bytes) -> None:
        """Write files; `a_x_jsonl` becomes `a_x.jsonl`."""
        write_files({".".join(name.rsplit("_", 1)): content for name, content in files.items()})

    def batchgen(self, line: str, ends: int, script: Script | None = None, *settings: str) -> str:
        """Run a command line, whose words are parted by spaces, with scripted workers; returns what it said.

        Args:
            line: the command line.
            ends: the exit code that it must have.
            script: what its workers do; None: they answer.
            settings: for `--set`.
        """
        words = [*line.split(), *(word for setting in settings for word in ("--set", setting))]
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(words, launch=script or Script())
        said = out.getvalue() + err.getvalue()
        self.said += said
        if code != ends or "Traceback" in said:
            self.wrong.append(f"{words} ended with {code}, not {ends}: {said}")
        return said

    def python(self, kind: type[BatchgenError], call: Callable[[], Any]) -> None:
        """Call what must raise an error."""
        try:
            with contextlib.redirect_stderr(io.StringIO()):
                call()
        except kind as error:
            self.said += f"{error}\n"
            return
        self.wrong.append(f"{call} raised no {kind.__name__}")

    @contextlib.contextmanager
    def patched(self, *patches: tuple[object, str, Any]) -> Iterator[None]:
        """While the context lasts, other values of attributes: object, name, value."""
        with contextlib.ExitStack() as stack:
            for target, name, value in patches:
                stack.enter_context(mock.patch.object(target, name, value))
            yield


def write_files(files: dict[str, str | bytes]) -> None:
    """Write files under the current folder."""
    for name, content in files.items():
        file = Path(name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content if isinstance(content, bytes) else content.encode())


def rows(count: int, **columns: Any) -> str:
    """A JSONL file of so many prompts."""
    return "".join(json.dumps({"prompt": f"p{n}", **columns}) + "\n" for n in range(count))
