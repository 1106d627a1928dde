"""What is known of parts is a map, in a few bytes of memory for each."""

from __future__ import annotations

import tracemalloc
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.job import packed_table
from batchgen.job.packed_table import PackedTable


def table() -> PackedTable[dict[str, Any]]:
    return PackedTable(lambda record: record, dict)


OPERATIONS = st.lists(st.tuples(st.sampled_from(["put", "put", "drop", "clear"]), st.integers(0, 12)))


@settings(max_examples=60, deadline=None)
@given(OPERATIONS, st.sampled_from([1, 50, 10_000]))
def test_it_is_a_map_in_order(operations: list[tuple[str, int]], buffer: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_table, "BUFFER_BYTES", buffer)
        made = table()
    model: dict[int, dict[str, Any]] = {}
    for place, (what, number) in enumerate(operations):
        if what == "put":
            made[number] = model[number] = {"n": place, "text": "é\ud800"}
        elif what == "drop":
            assert made.pop(number, None) == model.pop(number, None)
        elif number > 9:
            made.clear()
            model.clear()
        assert len(made) == len(model)
        assert list(made.items()) == sorted(model.items())
        assert made == model
        for n in range(-1, 14):
            assert made.get(n) == model.get(n)
            assert made.nearest(n) == max((k for k in model if k <= n), default=None)


def test_memory_is_a_few_bytes_a_part() -> None:
    tracemalloc.start()
    try:
        made = table()
        before = tracemalloc.get_traced_memory()[0]
        for part in range(20_000):
            made[part] = {"file": f"part-{part:06d}.parquet", "text": "x" * 250}
        grown = tracemalloc.get_traced_memory()[0] - before
    finally:
        tracemalloc.stop()
    assert made[19_999]["file"] == "part-019999.parquet"
    assert grown < 1_000_000
