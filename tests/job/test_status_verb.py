"""What `status` prints, once and while it watches."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from job_driver import Settings, run_here, start
from job_inputs import write_jsonl
from waiting import wait_until

from batchgen.cli import status as verb
from batchgen.cli.main import main
from batchgen.cli.options import human_size
from batchgen.job import status as job_status
from batchgen.job.status import JobStatus, glance, read_status

HOSTILE = "\x1b[2J\nstate complete\u202e\x07"


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    write_jsonl(folder / "in.jsonl", 40)
    run_here(Settings(output=str(folder / "out"), input=str(folder / "in.jsonl")))
    return folder / "out"


def test_it_says_everything_at_a_glance(complete: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(complete)]) == 0
    text = capsys.readouterr().out
    assert f"{complete}: complete\n" in text
    assert "rows      40 of 40: 38 ok, 2 failed" in text
    assert re.search(r"parts     4, \d.* kB; journal 0 B; .*B free on the disk", text)
    assert "released" in text
    assert main(["status", str(complete), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["rows_done"], found["bytes_in_journal"], found["owner"]["alive"]) == (40, 0, False)
    assert found["bytes_in_parts"] == sum(path.stat().st_size for path in (complete / "data").iterdir())


def test_watching_what_has_ended_shows_it_once(complete: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(complete), "--watch", "--json"]) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert json.loads(line)["state"] == "complete"


def hostile(status: JobStatus) -> JobStatus:
    owner = {"host": HOSTILE, "pid": 1, "beat": 1, "released": False, "alive": False}
    return replace(status, last_error=HOSTILE, messages=[HOSTILE], owner=owner, folder=HOSTILE)


def test_nothing_steers_the_terminal_or_passes_for_another_line(complete: Path) -> None:
    lines = verb.describe(hostile(read_status(complete)))
    assert all(line.isprintable() for line in lines)
    assert "error     \\x1b[2J\\nstate complete\\u202e\\x07" in lines


def test_a_message_of_several_lines_is_indented(complete: Path) -> None:
    status = replace(read_status(complete), messages=["the job was changed:\n  sampling\n    - 1"])
    assert verb.describe(status)[-3:] == [
        "note      the job was changed:",
        "            sampling",
        "              - 1",
    ]


def test_rows_whose_number_is_not_known_yet(complete: Path) -> None:
    text = "\n".join(verb.describe(replace(read_status(complete), rows_total=None)))
    assert "rows      40 so far: 38 ok, 2 failed" in text


def test_a_watched_job_is_followed_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jsonl(tmp_path / "in.jsonl", 34)
    stall = {"do": "stall", "rows": [32], "until": str(tmp_path / "go")}
    held_open = {"tokens": 16, "faults": [stall]}
    settings = Settings(output=str(tmp_path / "out"), input=str(tmp_path / "in.jsonl"), worker=held_open)
    process = start(settings)
    status = wait_until_it_works(tmp_path / "out")
    monkeypatch.setattr(verb, "WATCH_SECONDS", 0.05)
    monkeypatch.setattr(verb._Screen, "every", 0.05)
    replays = count_replays(monkeypatch)
    stream = _Until(3, tmp_path / "go")
    verb._watch(status, verb._Screen(stream))
    process.communicate()
    drawn = stream.getvalue().split("\x1b[J")
    assert len(drawn) > 3
    assert "rows      34 of 34: 32 ok, 2 failed" in drawn[-1]
    assert re.search(r"rate  .* rows/s, .* tok/s in, .* out.*, ETA ", drawn[0])
    # Only the end is counted row by row; in between a few small files are read.
    assert len(replays) <= 2


def test_a_log_gets_lines(complete: Path) -> None:
    stream = io.StringIO()
    log, status = verb._Log(stream), read_status(complete)
    log.show(replace(status, state="running", rows_per_second=2.5, eta_seconds=61.0))
    log.show(status)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "40 of 40: 38 ok, 2 failed, 2.50 rows/s, 0 tok/s in, 0 out, ETA 1:01"
    assert lines[1] == f"{complete}: complete"


class _Until(io.StringIO):
    """What is drawn; makes the file `go` at the n-th picture."""

    def __init__(self, pictures: int, go: Path) -> None:
        super().__init__()
        self._pictures, self._go = pictures, go

    def write(self, text: str) -> int:
        count = super().write(text)
        if self.getvalue().count("\x1b[J") >= self._pictures:
            self._go.touch()
        return count


def wait_until_it_works(folder: Path) -> JobStatus:
    wait_until((folder / ".batchgen" / "attempts" / "0001.progress.json").exists)
    wait_until(lambda: read_status(folder).rows_done)
    status = read_status(folder)
    assert (status.state, glance(status).state) == ("running", "running")
    return status


def count_replays(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    calls: list[object] = []
    real = job_status.replay

    def counted(*arguments: object) -> object:
        calls.append(arguments)
        return real(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(job_status, "replay", counted)
    return calls


@pytest.mark.parametrize(
    ("count", "text"), [(None, "?"), (0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (3.2e12, "3.2 TB")]
)
def test_sizes(count: int | None, text: str) -> None:
    assert human_size(count) == text
