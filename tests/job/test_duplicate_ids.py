"""Ids that occur twice, in whole jobs: refused with both rows named, suffixed, or only the first kept."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from job_driver import Settings, setup_of
from job_inputs import data_bytes, read_output
from test_selection_machine import run
from thread_worker import Killed, text_of

from batchgen.data import id_decisions, id_ledger
from batchgen.data.id_ledger import IdLedger
from batchgen.data.source import open_input
from batchgen.job import ids as ids_module
from batchgen.job import unique_ids
from batchgen.job.ids import IdReading
from batchgen.job.run import run_job
from batchgen.job.run_options import RunHooks
from batchgen.job.selection import Selection
from batchgen.job.unique_ids import UniqueIds
from batchgen.job.verify import verify_folder
from batchgen.types import DriftError, UsageError


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ids_module, "HELD_ROWS", 4)
    monkeypatch.setattr(ids_module, "_ROWS_AT_ONCE", 2)
    monkeypatch.setattr(id_ledger, "_FANOUT", 3)
    monkeypatch.setattr(id_decisions, "_MOST_IN_MEMORY", 4)


def job(root: Path, ids: Sequence[str | int | None], **changes: Any) -> Settings:
    """A job on rows with these ids; a row without one has no column `id`."""
    path = root / "in.jsonl"
    rows = [{"prompt": f"p{i}", **({} if id is None else {"id": id})} for i, id in enumerate(ids)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Settings(output=str(root / "out"), input=str(path), **{"part_rows": 3, **changes})


def output(settings: Settings) -> list[tuple[str, str]]:
    return [(row["id"], row["status"]) for row in read_output(Path(settings.output))]


def test_suffix_numbers_the_later_rows(tmp_path: Path) -> None:
    settings = job(tmp_path, ["a", "b", "a", "a#2", "a", 7, "7"], duplicate_ids="suffix")
    run(settings)
    assert [id for id, _ in output(settings)] == ["a", "b", "a#2", "a#2#2", "a#3", "7", "7#2"]
    with open_input(settings.input) as inputs:
        assert verify_folder(tmp_path / "out", inputs).faults == []


def test_keep_first_skips_the_later_rows(tmp_path: Path) -> None:
    settings = job(tmp_path, ["a", "b", "a", "c", "b"], duplicate_ids="keep_first", format="parquet")
    assert sorted(run(settings)) == [0, 1, 3]
    assert output(settings) == [("a", "ok"), ("b", "ok"), ("a", "skipped"), ("c", "ok"), ("b", "skipped")]
    rows = read_output(tmp_path / "out")
    assert rows[2]["generated_text"] is None
    assert rows[2]["error"] is None
    with open_input(settings.input) as inputs:
        assert verify_folder(tmp_path / "out", inputs).faults == []


def test_an_id_twice_ends_the_run_with_both_rows_named(tmp_path: Path) -> None:
    settings = job(tmp_path, [*map(str, range(20)), "7"])
    with pytest.raises(UsageError) as error:
        run(settings)
    assert error.value.exit_code == 2
    assert "id '7' is at in.jsonl line 8 and at in.jsonl line 21 (rows 7 and 20)" in str(error.value)
    assert not (tmp_path / "out/_SUCCESS").exists()
    with pytest.raises(UsageError, match="rows 7 and 20"):
        run(settings)


def test_ids_that_begin_after_the_first_rows_are_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batchgen.data.source.WINDOW_ROWS", 2)
    settings = job(tmp_path, [None, None, None, "x", None, "in.jsonl:1"])
    with pytest.raises(UsageError, match=r"id 'in.jsonl:1' is at in.jsonl line 2 and at in.jsonl line 6"):
        run(settings)
    assert (tmp_path / "out/.batchgen/index/ids-wanted").exists()


def test_what_was_done_stays_when_ids_are_then_suffixed(tmp_path: Path) -> None:
    settings = job(tmp_path, ["a", "b", "c", "d", "e", "f", "a", "x", "b"])
    settings.limit = 6
    ran = run(settings)
    settings.limit = None
    with pytest.raises(UsageError):
        run(settings)
    settings.duplicate_ids = "suffix"
    ran += run(settings)
    assert [id for id, _ in output(settings)] == ["a", "b", "c", "d", "e", "f", "a#2", "x", "b#2"]
    assert {row["generated_text"] for row in read_output(tmp_path / "out")} == {
        text_of(f"p{i}") for i in range(9)
    }
    once = Settings(**{**vars(settings), "output": str(tmp_path / "once")})
    run(once)
    assert data_bytes(tmp_path / "once") == data_bytes(tmp_path / "out")
    settings.duplicate_ids = "keep_first"
    with pytest.raises(DriftError, match=r"written with input\.duplicate_ids: suffix, and it is keep_f"):
        run(settings)


def test_a_stop_while_ids_are_read_can_be_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ids_module, "_ROWS_AT_ONCE", 1)
    settings = job(tmp_path, ["a", "b", "a", "a"], duplicate_ids="suffix")
    setup = setup_of(settings)

    def say(sentence: str) -> None:
        if sentence.startswith("reading the ids"):
            os.kill(os.getpid(), signal.SIGTERM)

    with setup.inputs:
        result = run_job(setup, settings.run_options(), RunHooks(launch=settings.launcher(), say=say))
    assert (result.exit_code, result.reason) == (75, "stopped (SIGTERM); run the same command to continue")
    run(settings)
    assert [id for id, _ in output(settings)] == ["a", "b", "a#2", "a#3"]


def in_order(ids: Sequence[str]) -> list[str]:
    """What `suffix` makes of ids without a `#`."""
    return [text if (n := ids[: i + 1].count(text)) == 1 else f"{text}#{n}" for i, text in enumerate(ids)]


@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.sampled_from("abcdefgh"), min_size=1, max_size=14),
    st.integers(1, 5),
    st.integers(0, 14),
    st.none() | st.integers(0, 8),
    st.sampled_from(["suffix", "keep_first"]),
)
@example(["a"] * 7, 2, 7, None, "suffix")
def test_policies_in_any_order_of_work(
    tmp_path_factory: Any, ids: list[str], part_rows: int, first: int, kill: int | None, policy: str
) -> None:
    """A range first, killed or not, then all: the same as at once, and as the slow way."""
    root = tmp_path_factory.mktemp("ids")
    settings = job(root, ids, part_rows=part_rows, duplicate_ids=policy, rows=f"{first}:")
    with contextlib.suppress(Killed):
        run(settings, kill)
    settings.rows = None
    run(settings)
    if policy == "suffix":
        assert output(settings) == [(id, "ok") for id in in_order(ids)]
    else:
        assert output(settings) == [(id, "skipped" if id in ids[:i] else "ok") for i, id in enumerate(ids)]
    once = Settings(**{**vars(settings), "output": str(root / "once")})
    run(once)
    assert data_bytes(root / "once") == data_bytes(root / "out")


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=16),
    st.integers(1, 5),
    st.integers(0, 6),
    st.none() | st.integers(0, 8),
    st.booleans(),
)
@example([*range(16), 3], 3, 0, 7, True)
@example([*range(16)], 3, 2, 7, True)
def test_ids_are_looked_at_whoever_reads_them(
    tmp_path_factory: Any, ids: list[int], part_rows: int, first: int, kill: int | None, fast: bool
) -> None:
    """Those of a run that reads fast come from there, others are read ahead; a range first, killed or not."""
    root = tmp_path_factory.mktemp("fed")
    settings = job(root, ids, part_rows=part_rows, rows=f"{first}:")
    with patch.object(unique_ids._Feed, "fast", lambda self: fast):
        with contextlib.suppress(Killed, UsageError):
            run(settings, kill)
        settings.rows = None
        if len(set(ids)) == len(ids):
            run(settings)
            assert IdLedger(root / "out/.batchgen/index", 0, find_twice=True).rows == len(ids)
        else:
            with pytest.raises(UsageError, match="ids must be distinct"):
                run(settings)


def test_what_a_fast_run_has_read_is_not_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unique_ids._Feed, "fast", lambda self: True)
    monkeypatch.setattr(IdReading, "read", None)
    settings = job(tmp_path, [*"abcdefgh", "c"])
    with open_input(settings.input) as inputs:
        ids = UniqueIds(inputs, tmp_path, Selection(), lambda: 9, lambda error: None)
        rows = list(inputs.rows())
        ids.begin(0)
        for row in rows[:4]:
            ids.add([row])
        ids.end(rows[3].next_position)
        ids.begin(4)
        for row in rows[4:]:
            ids.add([row])
        ids.end(rows[-1].next_position)
        with pytest.raises(UsageError, match="rows 2 and 8"):
            ids.finish(lambda: False)
        ids.close()
