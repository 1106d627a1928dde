"""Ids that occur twice: found whatever the number of files they are spread over, and decided in order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.data import id_decisions, id_ledger, sorted_runs
from batchgen.data.id_decisions import IdDecisions, Policy, decide
from batchgen.data.id_hash import hash_id, hash_suffixed, looks_suffixed, suffixed
from batchgen.data.id_ledger import IdLedger
from batchgen.data.row import Position, Row
from batchgen.data.sorted_runs import RunSorter, merge, read_run, sorted_records, write_run

IDS = st.text("ab#23", max_size=6)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sorted_runs, "CHUNK_RECORDS", 3)
    monkeypatch.setattr(id_ledger, "_FANOUT", 3)
    monkeypatch.setattr(id_decisions, "_MOST_IN_MEMORY", 4)


@pytest.fixture
def folder() -> Iterator[Path]:
    with TemporaryDirectory() as path:
        yield Path(path)


def position(ordinal: int) -> Position:
    return Position(0, ordinal * 10, ordinal, ordinal)


def row_of(ordinal: int, row_id: str) -> Row:
    return Row(ordinal, row_id, {}, None, ordinal + 1, "in", b"", position(ordinal + 1))


def fill(ledger: IdLedger, ids: Sequence[str], every: int) -> None:
    """Adds what the ledger does not have yet, flushing now and then."""
    for ordinal in range(ledger.end, len(ids)):
        ledger.add(ids[ordinal], ordinal)
        if ordinal % every == every - 1:
            ledger.flush(position(ordinal + 1))
        if ledger.twice:
            return
    ledger.flush(position(len(ids)))


@given(st.lists(st.lists(st.tuples(*[st.integers(0, 5)] * 3), max_size=20), max_size=5))
@settings(max_examples=20, deadline=None)
def test_merged_runs_are_sorted(lists: list[list[tuple[int, int, int]]]) -> None:
    with TemporaryDirectory() as place:
        runs = []
        for number, records in enumerate(lists):
            table = sorted_records(np.array(records, np.uint64).reshape(-1, 3))
            runs.append(write_run(Path(place) / str(number), [table], {"n": number}))
            assert read_run(runs[-1].path) == runs[-1]
        merged = [tuple(record) for chunk in merge(runs) for record in chunk.tolist()]
        assert merged == sorted(record for records in lists for record in records)
        for run, records in zip(runs, lists, strict=True):
            for key in range(7):
                assert run.find(key) == sum(record[0] < key for record in records)
        sorter = RunSorter(Path(place), "sorter", 4)
        for records in lists:
            sorter.add(np.array(records, np.uint64).reshape(-1, 3))
        assert [tuple(r) for c in sorter.merged() for r in c.tolist()] == merged
        sorter.close()
        assert not list(Path(place).glob("sorter*"))


def test_a_torn_or_foreign_run_is_none(folder: Path) -> None:
    path = folder / "run"
    assert read_run(path) is None
    write_run(path, [np.zeros((5, 3), np.uint64)], {})
    whole = path.read_bytes()
    for cut in (0, 5, 100, len(whole) - 1):
        path.write_bytes(whole[:cut])
        assert read_run(path) is None
    path.write_bytes(whole[24:])
    assert read_run(path) is None


@pytest.mark.parametrize("text", ["", "a", "a#", "#2", "a#2", "a#2#3", "a#1", "a#02", "a#x#2", "a#²", "é#9"])
def test_the_hash_of_a_made_up_id_is_that_of_the_same_text(text: str) -> None:
    assert hash_suffixed(hash_id(text), 7) == hash_id(suffixed(text, [7]))
    assert hash_suffixed(hash_suffixed(hash_id(text), 2), 12) == hash_id(f"{text}#2#12")
    assert looks_suffixed(f"{text}#12")
    assert not looks_suffixed(f"{text}#1")
    assert len({hash_id(text), hash_id(f"{text}#1"), hash_id(f"{text}#2"), hash_id(f"{text}#02")}) == 4


@given(st.lists(IDS, max_size=40), st.integers(1, 7), st.integers(0, 40))
@settings(max_examples=40, deadline=None)
def test_an_id_that_occurs_twice_is_found(ids: list[str], every: int, stop: int) -> None:
    """Also where the process stops in the middle and another goes on."""
    with TemporaryDirectory() as place:
        fill(IdLedger(Path(place), 0, find_twice=True), ids[:stop], every)
        ledger = IdLedger(Path(place), 0, find_twice=True)
        fill(ledger, ids, every)
        ledger.merge_all()
        if len(set(ids)) == len(ids):
            assert ledger.twice is None
            assert ledger.end == ledger.rows == len(ids)
            again = IdLedger(Path(place), 0, find_twice=True)
            assert (again.end, again.rows) == (len(ids), len(ids))
            assert again.position == (position(len(ids)) if ids else None)
        else:
            assert ledger.twice is not None
            first, second = ledger.twice
            assert first < second
            assert ids[first] == ids[second]


def test_a_ledger_of_other_rows_starts_anew(folder: Path) -> None:
    fill(IdLedger(folder, 0, find_twice=True), ["a", "b", "c"], 2)
    later = IdLedger(folder, 2, find_twice=True)
    assert (later.end, later.rows) == (3, 1)
    assert IdLedger(folder, 0, find_twice=True).end == 0


def renamed_in_rounds(ids: Sequence[str]) -> list[str]:
    """What `suffix` promises, the slow way."""
    current = list(ids)
    while len(set(current)) < len(current):
        seen: dict[str, int] = defaultdict(int)
        following = []
        for text in current:
            seen[text] += 1
            following.append(text if seen[text] == 1 else f"{text}#{seen[text]}")
        current = following
    return current


def apply_all(decisions: IdDecisions, ids: Sequence[str], order: Sequence[int]) -> dict[int, Row]:
    rows = {}
    for ordinal in order:
        rows[ordinal] = row_of(ordinal, ids[ordinal])
        decisions.apply(rows[ordinal])
    return rows


@given(st.lists(IDS, max_size=30), st.integers(1, 7), st.integers(0, 30), st.randoms(use_true_random=False))
@settings(max_examples=30, deadline=None)
def test_decisions_are_those_of_the_slow_way(ids: list[str], every: int, stop: int, random: object) -> None:
    """In any order of reading, and for a part of the rows as for all of them."""
    expected = renamed_in_rounds(ids)
    firsts = {text: ordinal for ordinal, text in reversed(list(enumerate(ids)))}
    policies: tuple[Policy, ...] = ("suffix", "keep_first")
    with TemporaryDirectory() as place:
        for count in (min(stop, len(ids)), len(ids)):
            for policy in policies:
                ledger = IdLedger(Path(place), 0, find_twice=False)
                fill(ledger, ids[:count], every)
                ledger.merge_all()
                decide(ledger, policy, Path(place))
                decisions = decide(ledger, policy, Path(place))
                order = list(range(count))
                random.shuffle(order)  # type: ignore[attr-defined]
                for chosen in (range(count), order):
                    rows = apply_all(decisions.another(), ids, chosen)
                    if policy == "suffix":
                        assert [rows[i].id for i in range(count)] == expected[:count]
                        assert set(decisions.ordinals()) == {i for i in range(count) if expected[i] != ids[i]}
                    else:
                        assert [rows[i].skipped for i in range(count)] == [
                            firsts[ids[i]] != i for i in range(count)
                        ]
        assert {path.name[:3] for path in Path(place).iterdir()} <= {"ids", "dec"}


def test_a_made_up_id_that_is_also_a_real_one() -> None:
    assert renamed_in_rounds(["a", "b", "a"]) == ["a", "b", "a#2"]
    assert renamed_in_rounds(["a", "a", "a#2"]) == ["a", "a#2", "a#2#2"]
    assert renamed_in_rounds(["a#2", "a", "a"]) == ["a#2", "a", "a#2#2"]
