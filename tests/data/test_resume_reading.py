"""Reading can begin at any position and gives the same rows and digests, for every format."""

import random
from collections.abc import Iterable
from itertools import islice
from pathlib import Path

import pyarrow as pa
import pytest
from data_files import TEXT_SUFFIXES, compress, parquet, write
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.data.row import PartIndexEntry, PartIndexer, Position, Row
from batchgen.data.source import InputSet, open_input

KINDS = (*TEXT_SUFFIXES, ".parquet")
STRUCT = pa.struct([("x", pa.int64()), ("y", pa.string())])
LINE = st.sampled_from(
    ["", " ", "\r", '{"a": 1}', '{"a": 1}\r', "broken", '{"b": "é"}', '{"a": NaN}', "\ufeff{}"]
)


def write_kind(folder: Path, name: str, kind: str, count: int) -> str:
    if kind == ".parquet":
        struct = pa.array([{"x": i, "y": None} for i in range(count)], STRUCT)
        table = pa.table({"n": pa.array(range(count), pa.int64()), "s": struct})
        return parquet(folder, table, f"{name}.parquet", row_group_size=700)
    lines = (f'{{"n": {i}, "t": "{"é" * (i % 50)}"}}\r\n' + "\n" * (i % 3) for i in range(count))
    return write(folder, f"{name}{kind}", compress("".join(lines).encode(), kind))


def facts(row: Row) -> tuple:
    """All of a row that another read must repeat."""
    values = dict(row.values)
    return row.ordinal, row.id, repr(values), row.error, row.line, row.digest, row.next_position, row.notes


@pytest.fixture(params=KINDS)
def inputs(request: pytest.FixtureRequest, tmp_path: Path) -> InputSet:
    counts = {"a": 2500, "b": 0, "c": 1300}
    return open_input([write_kind(tmp_path, name, request.param, count) for name, count in counts.items()])


def test_any_position(inputs: InputSet) -> None:
    rows = [facts(row) for row in inputs.rows()]
    assert [fact[0] for fact in rows] == list(range(3800))
    rng = random.Random(1)
    for ordinal in [0, 699, 700, 1023, 1024, 2498, 2499, 2500, 3799, *rng.sample(range(3800), 20)]:
        start = Position.from_json(rows[ordinal][6].to_json())
        assert [facts(row) for row in islice(inputs.rows(start), 40)] == rows[ordinal + 1 : ordinal + 41]


def test_parts_in_order_do_not_restart(inputs: InputSet, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []
    real_open = InputSet._open
    monkeypatch.setattr(
        InputSet, "_open", lambda self, file: opened.append(file.name) or real_open(self, file)
    )
    expected = [facts(row) for row in inputs.rows()]
    opened.clear()
    ahead, behind = Position(), Position()
    read: dict[str, list] = {"ahead": [], "behind": []}
    # As the job does: one reader feeds the engine while another, behind it, assembles parts.
    for _ in range(38):
        for row in islice(inputs.rows(ahead), 100):
            read["ahead"].append(facts(row))
            ahead = row.next_position
        if len(read["ahead"]) >= 800:
            for row in islice(inputs.rows(behind), 100):
                read["behind"].append(facts(row))
                behind = row.next_position
    assert read["ahead"] == expected
    assert read["behind"] == expected[: len(read["behind"])]
    assert len(read["behind"]) > 3000
    assert sorted(opened) == sorted([file.name for file in inputs.files] * 2)


@settings(max_examples=60)
@given(
    files=st.lists(st.lists(LINE, max_size=8), min_size=1, max_size=3), final=st.booleans(), data=st.data()
)
def test_any_lines_any_position(
    tmp_path: Path, files: list[list[str]], final: bool, data: st.DataObject
) -> None:
    suffix = data.draw(st.sampled_from(TEXT_SUFFIXES))
    paths = []
    for index, lines in enumerate(files):
        text = "\n".join(lines) + ("\n" if final else "")
        paths.append(write(tmp_path, f"f{index}{suffix}", compress(text.encode(), suffix)))
    with open_input(paths) as inputs:
        rows = [facts(row) for row in inputs.rows()]
        for ordinal, fact in enumerate(rows):
            assert [facts(row) for row in inputs.rows(fact[6])] == rows[ordinal + 1 :]


def index_part(part: int, start: Position, rows: Iterable[Row]) -> PartIndexEntry:
    indexer = PartIndexer(part, start)
    for row in rows:
        indexer.add(row)
    return indexer.entry()


def test_part_index(inputs: InputSet) -> None:
    entries = []
    start = Position()
    rows = inputs.rows()
    while part := list(islice(rows, 1000)):
        entries.append(index_part(len(entries), start, part))
        start = part[-1].next_position
    assert [entry.rows for entry in entries] == [1000, 1000, 1000, 800]
    for entry in entries:
        again = index_part(entry.part, entry.start, islice(inputs.rows(entry.start), entry.rows))
        assert again == entry == PartIndexEntry.from_json(entry.to_json())
    assert len({entry.digest for entry in entries}) == 4


def test_a_changed_record_changes_the_digest_of_its_part(tmp_path: Path) -> None:
    texts = ['{"a": 1}\n{"a": 2}\n', '{"a": 1}\n{"a": 3}\n', '{"a":1}\n{"a": 2}\n']
    digests = set()
    for text in texts:
        rows = open_input(write(tmp_path, "x.jsonl", text)).rows()
        digests.add(index_part(0, Position(), rows).digest)
    assert len(digests) == 3


def test_closing_gives_the_files_back(tmp_path: Path) -> None:
    path = write_kind(tmp_path, "a", ".jsonl.gz", 100)
    with open_input(path) as inputs:
        first = next(inputs.rows())
        assert facts(next(inputs.rows())) == facts(first)
    assert facts(next(inputs.rows())) == facts(first)
