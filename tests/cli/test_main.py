"""The command line as a whole: what it loads, how errors become messages and exit codes."""

from __future__ import annotations

import errno
import json
import subprocess
import sys
from pathlib import Path

import click
import pytest

import batchgen
from batchgen.cli import main as cli
from batchgen.cli import version
from batchgen.text.terminal import safe
from batchgen.types import DriftError

HEAVY = ("torch", "pyarrow", "transformers", "pydantic", "numpy", "yaml", "numba", "datasets")
ROOT = Path(batchgen.__file__).parent.parent


@pytest.mark.parametrize("arguments", [["--help"], ["validate", "-h"], ["--version"]])
def test_help_loads_nothing_heavy(arguments: list[str]) -> None:
    code = (
        "import sys; from batchgen.cli.main import main; code = main(sys.argv[1:]);"
        f"print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stderr == "[]\n"
    assert "batchgen" in done.stdout


def test_help_of_every_verb_loads_nothing_heavy() -> None:
    code = (
        "import sys; from batchgen.cli.main import VERBS, main\n"
        "for verb in VERBS: assert main([verb, '--help']) == 0, verb\n"
        f"print([m for m in {HEAVY!r} if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stderr == "[]\n"
    assert done.stdout.count("Usage: batchgen ") == len(cli.VERBS)


def test_help_lists_every_verb_with_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    text = capsys.readouterr().out
    for verb in cli.VERBS:
        assert f"  {verb} " in text
    assert "Exit codes" in text


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["frobnicate"], "no verb 'frobnicate'; there are run, validate, plan"),
        (["exprt"], "no verb 'exprt'; did you mean export?"),
        (["validate"], "Missing argument 'JOB'"),
        (["validate", "job.yaml", "--fast"], "No such option"),
        (["show", "job.yaml", "--row", "-1"], "-1 is not in the range"),
        (["show", "job.yaml", "--row", "1", "--id", "x"], "give one of them"),
    ],
)
def test_a_wrong_command_line_is_exit_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(arguments) == 2
    assert said in capsys.readouterr().err


def _raising(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> int:
    @click.command("version")
    def broken() -> None:
        raise error

    monkeypatch.setattr(version, "command", broken)
    return cli.main(["version"])


def test_a_known_error_is_a_sentence_and_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _raising(DriftError("the model \x1b[2J differs"), monkeypatch) == 4
    assert capsys.readouterr().err == "batchgen: the model \\x1b[2J differs\n"


def test_a_bug_is_exit_1_with_a_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _raising(KeyError("gone"), monkeypatch) == 1
    text = capsys.readouterr().err
    assert "Traceback" in text
    assert f"this is a bug in batchgen {batchgen.__version__}" in text


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (
            OSError(errno.ENOSPC, "No space left on device"),
            5,
            "batchgen: a file that `batchgen version` needs: cannot be read or written: No space left on "
            "device; free some space there, then run the same command again (finished rows are kept)\n",
        ),
        (OSError(errno.EIO, "Input/output error", "/data/x"), 5, "batchgen: /data/x: cannot be read or wr"),
        (OSError(errno.EMFILE, "Too many open files"), 5, "raise the limit of open files (ulimit -n)"),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", "/data/x"), 1, "this is a bug"),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), 1, "this is a bug"),
    ],
    ids=["no space", "a named file", "open files", "a file that should be there", "a socket"],
)
def test_an_error_of_a_disk_that_nothing_expected(
    error: OSError, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What belongs to standard output says so; see below."""
    assert _raising(error, monkeypatch) == code
    assert said in capsys.readouterr().err


def test_ctrl_c_is_exit_130(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _raising(KeyboardInterrupt(), monkeypatch) == 130


def test_a_closed_pipe_is_no_error() -> None:
    done = subprocess.run(
        f"{sys.executable} -m batchgen version | true; echo ${{PIPESTATUS[0]}}",
        shell=True,
        executable="/bin/bash",
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert (done.stdout, done.stderr) == ("0\n", "")


def test_version_names_what_results_depend_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["version"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"batchgen      {batchgen.__version__}\n")
    assert "torch" in text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain ä 漢 🙂\n\ttab", "plain ä 漢 🙂\n\ttab"),
        ("a\u00a0b\u3000c", "a\u00a0b\u3000c"),
        ("\x1b[31mred\x07", "\\x1b[31mred\\x07"),
        ("\x9b31m\r", "\\x9b31m\\r"),
        ("a\u202eb\u2028", "a\\u202eb\\u2028"),
        ("\ud83d", "\\ud83d"),
    ],
)
def test_text_for_a_terminal_cannot_steer_it(text: str, shown: str) -> None:
    assert safe(text) == shown


_MAIN = "import sys; from batchgen.cli.main import main; sys.exit(main({arguments}))"


def run_with(redirection: str, arguments: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command line in a process of its own, its standard files as the shell's words say."""
    program = [sys.executable, "-c", _MAIN.format(arguments=arguments)]
    return subprocess.run(["sh", "-c", f'exec "$@" {redirection}', "sh", *program], text=True, stderr=-1)


def test_closed_standard_files_lead_nowhere(tmp_path: Path) -> None:
    """Else the first file that is opened would get what is printed."""
    assert run_with("0<&- 1>&- 2>&-", ["schema", "--output", str(tmp_path / "s.json")]).returncode == 0
    assert json.loads((tmp_path / "s.json").read_text())["title"]
    assert run_with("0<&- 1>&- 2>&-", ["status", str(tmp_path)]).returncode == 2


def test_an_output_that_is_full_is_no_bug() -> None:
    full = run_with("1>/dev/full", ["version"])
    assert (full.returncode, full.stderr) == (
        5,
        "batchgen: standard output cannot be written: No space left on device; send it elsewhere\n",
    )
    assert run_with("2>/dev/full", ["status", "gone"]).returncode == 2
    assert run_with("2>/dev/full", ["nothing"]).returncode == 2
