"""Suspicion in the abstract: whoever kills is convicted, nobody else is, whatever is killed in between."""

from __future__ import annotations

import json
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from job_driver import Settings, run_here
from job_inputs import write_jsonl

from batchgen.job.poison import Suspects
from batchgen.job.stop_signals import STOPPING, StoppedEarly, stoppable
from batchgen.job.window import Pending


def pending(row: int) -> Pending:
    return Pending(row, b"", b"")


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 40),
    killers=st.sets(st.integers(0, 39), max_size=4),
    in_step=st.sets(st.integers(0, 39)),
    data=st.data(),
)
def test_exactly_the_killers_are_convicted(
    rows: int, killers: set[int], in_step: set[int], data: st.DataObject
) -> None:
    """The canary works; the supervisor may be killed after any step, and reads all rows again."""
    killers &= set(range(rows))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "suspects.json")
        suspects = Suspects(path)
        suspects.finished(pending(99), 1)
        waiting, convicted = set(range(rows)), set()
        if killers:
            suspects.accuse([pending(row) for row in waiting], in_step)
        deaths = 0
        while len(suspects):
            group = suspects.next_group()
            guilty = killers & {p.row for p in group}
            done = {p.row for p in group} - guilty
            if guilty:
                deaths += 1
                done = data.draw(st.sets(st.sampled_from(sorted(done)))) if done else set()
                left = [p for p in group if p.row not in done]
                found = suspects.died(left, guilty | (in_step & {p.row for p in left}))
                if found is not None:
                    convicted.add(found.row)
                    done.add(found.row)
                    suspects.convicted(found.row)
            else:
                suspects.passed()
            waiting -= done
            if data.draw(st.booleans()):
                suspects = Suspects(path)
                suspects.finished(pending(99), 1)
                waiting = {row for row in waiting if not suspects.expects(pending(row))} | waiting
        assert convicted == killers
        assert deaths <= len(killers) * 60
        suspects.forget()
        assert not path.exists()


def test_a_row_that_killed_alone_before_the_supervisor_died_needs_one_death_more(tmp_path: Path) -> None:
    path = tmp_path / "suspects.json"
    suspects = Suspects(path)
    suspects.finished(pending(9), 1)
    suspects.accuse([pending(3)], {3})
    assert suspects.died(suspects.next_group(), {3}) is None
    again = Suspects(path)
    again.finished(pending(9), 1)
    assert not again.expects(pending(4))
    assert again.expects(pending(3))
    guilty = again.died(again.next_group(), {3})
    assert guilty is not None
    assert guilty.row == 3


@pytest.mark.parametrize("content", ["", "[]", '{"rows": 3}', '{"rows": ["x"], "deaths_alone": {}}'])
def test_a_torn_file_of_suspects_accuses_nobody(tmp_path: Path, content: str) -> None:
    path = tmp_path / "suspects.json"
    path.write_text(content)
    suspects = Suspects(path)
    assert not suspects.expects(pending(3))


def test_the_supervisor_is_killed_while_a_row_is_suspected(tmp_path: Path) -> None:
    """A row that killed alone once, by the file that an earlier attempt left, is convicted by one more."""
    path = write_jsonl(tmp_path / "in.jsonl", 16)
    settings_ = Settings(output=str(tmp_path / "out"), input=str(path), worker={"step_seconds": 0})
    settings_.options = {"max_time": 1.0, "began": time.monotonic() - 2.0}
    assert run_here(settings_).exit_code == 75
    kept = {"rows": [5, 6], "deaths_alone": {"5": 1}}
    (tmp_path / "out/.batchgen/suspects.json").write_text(json.dumps(kept))
    settings_.options = {}
    settings_.worker = {"step_seconds": 0, "faults": [{"do": "kill", "rows": [5]}]}
    said: list[str] = []
    assert run_here(settings_, said).counts.error == 1
    assert any("row 5 kills the engine also when it runs alone" in sentence for sentence in said)
    assert not (tmp_path / "out/.batchgen/suspects.json").exists()


def send_within(number: signal.Signals) -> None:
    with stoppable():
        os.kill(os.getpid(), number)
        time.sleep(5)


@pytest.mark.parametrize("name", [s.name for s in STOPPING])
def test_a_signal_before_any_row_ran_says_that_the_run_can_be_continued(name: str) -> None:
    before: dict[Any, Any] = {s: signal.getsignal(s) for s in STOPPING}
    with pytest.raises(StoppedEarly, match=rf"stopped \({name}\) before any row ran") as caught:
        send_within(getattr(signal, name))
    assert caught.value.exit_code == 75
    assert before == {s: signal.getsignal(s) for s in STOPPING}
