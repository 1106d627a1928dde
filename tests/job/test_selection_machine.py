"""Which rows come out: any order of smaller and larger selections, kills and continuations, against what the
output must be, worked out the slow way.
"""

from __future__ import annotations

import json
import shutil
from collections import defaultdict
from contextlib import closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from job_driver import Settings, setup_of
from job_inputs import data_bytes, read_output
from thread_worker import Killed, ThreadLauncher, text_of

from batchgen.data.source import open_input
from batchgen.job import supervisor
from batchgen.job.folder_rows import FolderRows
from batchgen.job.run import run_job
from batchgen.job.run_options import RunHooks
from batchgen.job.selection import Selection
from batchgen.job.status import read_status
from batchgen.job.verify import verify_folder
from batchgen.types import DriftError

WHERES = (None, "n > 3", "n % 3 = 0", "n < 0", "lower(t) = 'a' or n is null", "contains(t, 'b')")
ROWS = st.lists(
    st.builds(lambda n, t: {"n": n, "t": t}, st.none() | st.integers(0, 9), st.sampled_from("aAbc"))
    | st.sampled_from([None, {"n": "x", "t": "a"}]),
    max_size=25,
)
"""None is a broken line; a text in `n` has no answer where `n` is compared."""


def run(job: Settings, kill_after: int | None = None) -> list[int]:
    """One run; the rows that ran."""
    setup = setup_of(job)
    launcher = ThreadLauncher(kill_after)
    try:
        run_job(setup, job.run_options(), RunHooks(launch=launcher))
    finally:
        setup.inputs.close()
    return launcher.rows


def write_rows(path: Path, rows: list[dict[str, Any] | None]) -> None:
    lines = [
        "{broken" if row is None else json.dumps({"prompt": f"p{i}", **row}) for i, row in enumerate(rows)
    ]
    path.write_text("".join(line + "\n" for line in lines))


def passes(row: dict[str, Any] | None, where: str | None) -> bool | None:
    """What `where` says of a row in plain Python: None for an error row."""
    if row is None:
        return None
    n, t = row["n"], row["t"]
    compares_n = where in ("n > 3", "n % 3 = 0", "n < 0")
    if compares_n and isinstance(n, str):
        return None
    return {
        None: lambda: True,
        "n > 3": lambda: n is not None and n > 3,
        "n % 3 = 0": lambda: n is not None and n % 3 == 0,
        "n < 0": lambda: n is not None and n < 0,
        "lower(t) = 'a' or n is null": lambda: t.lower() == "a" or n is None,
        "contains(t, 'b')": lambda: "b" in t,
    }[where]()


class SelectionMachine(RuleBasedStateMachine):
    """One folder and its job; `wanted` is the selection of the last run that was not refused."""

    @initialize(rows=ROWS, where=st.sampled_from(WHERES), part_rows=st.integers(1, 7), fmt=st.booleans())
    def begin(self, rows: list[Any], where: str | None, part_rows: int, fmt: bool) -> None:
        self.place = TemporaryDirectory()
        root = Path(self.place.name)
        self.rows = rows
        self.where = where
        write_rows(root / "in.jsonl", rows)
        self.job = Settings(
            output=str(root / "out"),
            input=str(root / "in.jsonl"),
            where=where,
            part_rows=part_rows,
            format="parquet" if fmt else "jsonl",
        )
        self.out = root / "out"
        self.ran: dict[int, int] = defaultdict(int)
        self.complete = False
        self.wanted = Selection()

    def selected(self, selection: Selection) -> list[int]:
        stop = len(self.rows) if selection.stop is None else min(selection.stop, len(self.rows))
        chosen = [i for i in range(selection.first, stop) if passes(self.rows[i], self.where) is not False]
        return chosen if selection.limit is None else chosen[: selection.limit]

    @rule(
        first=st.sampled_from([0, 0, 0, 1, 5, 11, 30]),
        length=st.none() | st.integers(1, 25),
        limit=st.none() | st.integers(1, 12),
        kill=st.none() | st.none() | st.integers(0, 10),
    )
    def select(self, first: int, length: int | None, limit: int | None, kill: int | None) -> None:
        wanted = Selection(first, None if length is None else first + length, limit)
        self.job.rows, self.job.limit = wanted.rows, limit
        before = data_bytes(self.out) if (self.out / "data").exists() else {}
        had = {row["row"] for row in read_output(self.out)} if before else set()
        try:
            ran = run(self.job, kill)
        except Killed:
            self.complete, self.wanted = False, wanted
            return
        except DriftError:
            # Only a selection that lacks what the folder holds is refused, and then nothing changes.
            assert not had <= set(self.selected(wanted)) or self.is_cut(wanted)
            assert had <= {row["row"] for row in read_output(self.out)}
            self.complete = False
            return
        for row in ran:
            assert row not in had
        self.complete, self.wanted = True, wanted
        assert [row["row"] for row in read_output(self.out)] == self.selected(wanted)

    def is_cut(self, wanted: Selection) -> bool:
        """Whether the range or limit ends before rows that were looked at, and not selected."""
        return wanted != Selection()

    @rule()
    def go_on(self) -> None:
        """The same command again runs nothing that is done, and changes no byte of a complete folder."""
        if not self.complete:
            return
        before = data_bytes(self.out)
        assert run(self.job) == []
        assert data_bytes(self.out) == before

    @invariant()
    def folder_is_right(self) -> None:
        if not getattr(self, "complete", False):
            return
        chosen = self.selected(self.wanted)
        for row in read_output(self.out):
            if passes(self.rows[row["row"]], self.where) is None:
                assert row["status"] == "error"
            else:
                assert row["generated_text"] == text_of(f"p{row['row']}")
        with open_input(self.job.input, where=self.where) as inputs:
            report = verify_folder(self.out, inputs)
        assert report.faults == []
        assert report.rows == len(chosen)
        status = read_status(self.out)
        assert (status.state, status.rows_total, status.rows_done) == ("complete", len(chosen), len(chosen))
        assert json.loads((self.out / "_SUCCESS").read_text())["rows"] == len(chosen)
        assert self.same_bytes_as_at_once()

    def same_bytes_as_at_once(self) -> bool:
        root = self.out.with_name("at-once")
        if root.exists():
            shutil.rmtree(root)
        once = Settings(**{**vars(self.job), "output": str(root)})
        run(once)
        return data_bytes(root) == data_bytes(self.out)

    def teardown(self) -> None:
        if hasattr(self, "place"):
            self.place.cleanup()


SelectionMachine.TestCase.settings = settings(
    max_examples=10,
    stateful_step_count=6,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestSelection = pytest.mark.filterwarnings("ignore")(SelectionMachine.TestCase)


def test_a_job_with_parts_without_rows_is_retried_and_exported(tmp_path: Path) -> None:
    write_rows(tmp_path / "in.jsonl", [{"n": i, "t": "a"} for i in range(20)])
    job = Settings(
        output=str(tmp_path / "out"), input=str(tmp_path / "in.jsonl"), where="n > 11", part_rows=4
    )
    run(job)
    assert sorted(data_bytes(tmp_path / "out")) == ["part-000003.jsonl", "part-000004.jsonl"]
    before = data_bytes(tmp_path / "out")
    job.retry = {"where": "row=13", "temperature": None}
    assert run(job) == [13]
    assert data_bytes(tmp_path / "out") == before
    with closing(FolderRows(tmp_path / "out")) as folder:
        assert [row.ordinal for n in folder.numbers() for row, _ in folder.records(n)] == list(range(12, 20))


def test_status_counts_no_row_beyond_a_smaller_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a condition selects the rows and a killed run had more of them done than are asked for now."""
    write_rows(tmp_path / "in.jsonl", [{"n": 5}] * 20)
    job = Settings(
        output=str(tmp_path / "out"), input=str(tmp_path / "in.jsonl"), part_rows=20, where="n > 3"
    )
    monkeypatch.setattr(supervisor, "COMMIT_BYTES", 0)
    with pytest.raises(Killed):
        run(job, kill_after=9)
    before = read_status(Path(job.output)).rows_done
    assert before > 2
    job.limit = 2
    monkeypatch.setattr(supervisor.Supervisor, "_assemble", killed)
    with pytest.raises(Killed):
        run(job)
    assert read_status(Path(job.output)).rows_done == 2


def killed(_: supervisor.Supervisor) -> None:
    raise Killed
