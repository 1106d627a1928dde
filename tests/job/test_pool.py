"""The pool hands out every row once, in the order asked for, and never holds up the window."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from job_driver import Settings, run_here
from job_inputs import read_output

from batchgen.data.prompt_values import pack_prompt_values, prompt_values, unpack_prompt_values
from batchgen.data.row_result import RowResult
from batchgen.job.gates import Gate
from batchgen.job.part_summary import summary_of
from batchgen.job.pool import RowPool
from batchgen.job.row_order import ORDERS
from batchgen.job.window import Pending
from batchgen.types import ErrorClass, RowError


class Rows:
    """A window over rows that are made up: parts of `part_rows`, at most `parts` open."""

    def __init__(
        self, texts: list[str], order: str, part_rows: int, parts: int, priorities: list[int]
    ) -> None:
        self.waiting = [
            Pending(row, text.encode(), b"", key=ORDERS[order](row, [text], len(text)), priority=priority)
            for row, (text, priority) in enumerate(zip(texts, priorities, strict=True))
        ]
        self.part_rows = part_rows
        self.parts = parts
        self.next = 0
        self.open: dict[int, set[int]] = {}

    @property
    def exhausted(self) -> bool:
        return self.next == len(self.waiting)

    @property
    def full(self) -> bool:
        return not self.exhausted and self.next % self.part_rows == 0 and len(self.open) >= self.parts

    def take(self) -> list[Pending]:
        if self.exhausted or self.full:
            return []
        pending = self.waiting[self.next]
        self.open.setdefault(pending.row // self.part_rows, set()).add(pending.row)
        self.next += 1
        return [pending]

    def done(self, row: int) -> None:
        part = row // self.part_rows
        self.open[part].discard(row)
        whole = self.next >= (part + 1) * self.part_rows or self.exhausted
        if not self.open[part] and whole:
            del self.open[part]


def pool_over(window: Rows, most_bytes: int = 1 << 30) -> RowPool:
    return RowPool(
        window,  # type: ignore[arg-type]
        part_rows=window.part_rows,
        most_bytes=most_bytes,
        is_expected=lambda pending: False,
    )


@settings(max_examples=150, deadline=None)
@given(
    texts=st.lists(st.text("ab", max_size=3), min_size=1, max_size=60),
    order=st.sampled_from(["input", "prefix", "length"]),
    part_rows=st.integers(1, 9),
    parts=st.integers(1, 4),
    most_bytes=st.sampled_from([1, 2000, 1 << 30]),
    data=st.data(),
)
def test_every_row_once_whatever_is_put_back(
    texts: list[str], order: str, part_rows: int, parts: int, most_bytes: int, data: st.DataObject
) -> None:
    priorities = data.draw(st.lists(st.integers(-1, 2), min_size=len(texts), max_size=len(texts)))
    window = Rows(texts, order, part_rows, parts, priorities)
    pool = pool_over(window, most_bytes)
    out: list[Pending] = []
    finished: set[int] = set()
    while len(finished) < len(texts):
        pool.fill()
        taken = [p for _ in range(data.draw(st.integers(1, 5))) if (p := pool.take()) is not None]
        out += taken
        assert out or len(pool) == 0
        assert out, "nothing is left to run, and not every row ran"
        if data.draw(st.booleans()) and len(out) > 1:
            back = out.pop()
            pool.put_back([back])
        row = out.pop(0).row
        assert row not in finished
        finished.add(row)
        window.done(row)
    assert pool.take() is None


def drain(pool: RowPool) -> list[int]:
    pool.fill()
    rows = []
    while (pending := pool.take()) is not None:
        rows.append(pending.row)
    return rows


def test_an_order_holds_over_the_whole_window() -> None:
    texts = ["b", "a", "bb", "a", "c", "ab"] * 3
    assert drain(pool_over(Rows(texts, "input", 100, 4, [0] * 18))) == list(range(18))
    by_prefix = [texts[row] for row in drain(pool_over(Rows(texts, "prefix", 100, 4, [0] * 18)))]
    # The last row in twenty of a part is a straggler.
    assert by_prefix[:13] == sorted(texts)[:13]
    by_length = [len(texts[row]) for row in drain(pool_over(Rows(texts, "length", 100, 4, [0] * 18)))]
    assert by_length[:13] == sorted(by_length, reverse=True)[:13]


def test_higher_priority_goes_first_even_where_it_was_read_later() -> None:
    window = Rows([f"{n:02}" for n in range(40)], "prefix", 100, 4, [n // 10 for n in range(40)])
    rows = drain(pool_over(window))
    assert [row // 10 for row in rows[:35]] == [3] * 10 + [2] * 10 + [1] * 10 + [0] * 5


def test_rows_that_lag_do_not_pile_up() -> None:
    """Low priorities that leave as stragglers leave nothing behind."""
    window = Rows(["x"] * 40_000, "input", 100, 3, [0 if n % 100 < 5 else 1 for n in range(40_000)])
    pool = pool_over(window)
    seen = 0
    while seen < 40_000:
        pool.fill()
        pending = pool.take()
        assert pending is not None
        window.done(pending.row)
        seen += 1
        assert len(pool._sweep) + len(pool._next_sweep) < 2_000


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.decimals(allow_nan=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(values=st.dictionaries(st.sampled_from("abc"), VALUES))
def test_packed_values_are_those_of_a_prompt(values: dict[str, Any]) -> None:
    row: Any = SimpleNamespace(values=values, nonfinite=frozenset())
    assert unpack_prompt_values(pack_prompt_values(row, "abd")) == prompt_values(row, "abd")


def job(tmp_path: Path, rows: list[dict[str, Any]], **changes: Any) -> Settings:
    path = tmp_path / "in.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Settings(output=str(tmp_path / "out"), input=str(path), **changes)


def test_gates_decide_the_exit_code_and_say_the_figures(tmp_path: Path) -> None:
    rows = [{"prompt": f"p {n}"} for n in range(20)]
    fault = {"do": "context_length", "rows": [1, 2, 3], "message": "too long"}
    settings_ = job(tmp_path, rows, worker={"faults": [fault]})
    gates = (
        Gate.parse("error", "< 10%"),
        Gate.parse("error.context_length", "<= 3"),
        Gate.parse("ok", ">= 80 %"),
    )
    settings_.options = {"gates": gates}
    for _ in range(2):
        result = run_here(settings_)
        assert result.exit_code == 8
        assert result.reason.endswith("; error is 3 of 20 rows (15%) and run.gates asks for < 10%")
    settings_.options = {"gates": gates[1:]}
    assert run_here(settings_).exit_code == 0
    assert len(read_output(tmp_path / "out")) == 20


@pytest.mark.parametrize(
    ("gate", "passes"),
    [("finish_reason.length <= 25%", True), ("finish_reason.length < 25%", False), ("skipped == 0", True)],
)
def test_gates_count_rows(gate: str, passes: bool) -> None:
    results = [RowResult("ok", "x", "length"), *[RowResult("ok", "x", "stop")] * 2]
    results.append(RowResult("error", error=RowError(ErrorClass.TIMEOUT, "late")))
    summary = summary_of((row, str(row), result) for row, result in enumerate(results))
    measure, _, condition = gate.partition(" ")
    assert (Gate.parse(measure, condition).fault(summary) is None) is passes


@pytest.mark.parametrize(
    ("measure", "condition"), [("error", "few"), ("tokens", "< 3"), ("ok", "5%"), ("ok", 5)]
)
def test_what_is_no_gate_is_refused(measure: str, condition: Any) -> None:
    with pytest.raises(ValueError, match="not a gate"):
        Gate.parse(measure, condition)


def test_a_row_that_stalls_is_timed_out_and_the_others_finish(tmp_path: Path) -> None:
    rows = [{"prompt": f"p {n}"} for n in range(12)]
    worker = {"faults": [{"do": "stall", "rows": [4]}]}
    settings_ = job(tmp_path, rows, worker=worker, row_timeout=0.2, max_tokens=8)
    assert run_here(settings_).exit_code == 0
    done = read_output(tmp_path / "out")
    assert [r["row"] for r in done if r["status"] == "error"] == [4]
    assert done[4]["error"]["class"] == "timeout"
