"""Logprobs in every format of the output, and back out of it."""

from __future__ import annotations

import json
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_files import jsonl
from hypothesis import given
from hypothesis import strategies as st

from batchgen.data.exact_json import Decoded
from batchgen.data.openai_batch import unwrap
from batchgen.data.packed_logprobs import PackedLogprobs, shortest
from batchgen.data.record_columns import LOGPROBS_TYPE
from batchgen.data.results import BatchLabels, RowResult, plan_output
from batchgen.data.sink import part_suffix, write_part
from batchgen.job.part_reader import read_part
from batchgen.scores import TokenLogprob, TokenScores
from batchgen.types import ErrorClass, RowError, RowFailure

TEXTS = {5: b"Hi", 6: b" \xc3", 7: b"\xa9", 9: b"<|x|>"}
SCORES = TokenScores(
    array("q", [5, 6, 7]),
    array("d", np.float32([-0.1, -1e-8, -12.345678]).tolist()),
    array("q", [1, 3, 70_000]),
    [
        (TokenLogprob(5, -0.10000000149011612, 1), TokenLogprob(9, -2.5, 2)),
        (TokenLogprob(7, -0.5, 1), TokenLogprob(6, -0.75, 2)),
        (TokenLogprob(9, 0.0, 1), TokenLogprob(5, -3.0, 2)),
    ],
)


def packed(top_k: int = 2) -> list[Any]:
    return PackedLogprobs.of(SCORES.part(slice(None), top_k), TEXTS.__getitem__).pack()


def results(top_k: int = 2) -> list[RowResult]:
    ok = RowResult("ok", "Hi \u00e9", "stop", None, None, (3, 2, 0))
    empty = PackedLogprobs.of(TokenScores(), TEXTS.__getitem__).pack()
    return [
        ok._replace(included={"logprobs": packed(top_k)}),
        RowResult("error", error=RowError(ErrorClass.NULL_PROMPT, "null")),
        ok._replace(included={"logprobs": empty}),
        ok,
    ]


def written(tmp_path: Path, format: str, rows: list[RowResult], *, chat: bool = True) -> tuple[Path, Any]:
    inputs = jsonl(tmp_path, *['{"id": "a"}'] * len(rows))
    batch = BatchLabels("0" * 16, "m", chat=chat) if format == "openai_batch" else None
    include = ("usage", "finish_reason", *(() if batch else ("logprobs",)))
    plan = plan_output(inputs, format=format, include=include, batch=batch)
    path = tmp_path / f"part-000000{part_suffix(format, 'none')}"
    write_part(path, zip(inputs.rows(), rows, strict=True), plan, compression="none")
    return path, plan.to_json()


@pytest.mark.parametrize("top_k", [0, 2])
@pytest.mark.parametrize("format", ["parquet", "jsonl", "openai_batch"])
@pytest.mark.parametrize("chat", [True, False], ids=["chat", "text"])
def test_there_and_back(tmp_path: Path, format: str, top_k: int, chat: bool) -> None:
    path, plan = written(tmp_path, format, results(top_k), chat=chat)
    back = [row.result for row in read_part(path, plan)]
    again = tmp_path / "again"
    again.mkdir()
    second, _ = written(again, format, back, chat=chat)
    assert second.read_bytes() == path.read_bytes()
    found = PackedLogprobs.unpack((back[0].included or {})["logprobs"])
    expected = PackedLogprobs.unpack(packed(top_k))
    for name in ("ids", "logprobs", "ranks", "top_k", "top_ids", "top_logprobs"):
        assert getattr(found, name) == getattr(expected, name), name
    assert [(r.included or {}).keys() for r in back[1:]] == [set(), {"logprobs"}, set()]


def test_the_column(tmp_path: Path) -> None:
    path, _ = written(tmp_path, "parquet", results())
    table = pq.read_table(path)
    assert table.schema.field("logprobs").type == LOGPROBS_TYPE
    first, *others = table["logprobs"].to_pylist()
    assert others == [None, [], None]
    assert [(t["token"], t["id"], t["rank"]) for t in first] == [
        ("Hi", 5, 1),
        (" \ufffd", 6, 3),
        ("\ufffd", 7, 70_000),
    ]
    assert [(t["token"], t["id"]) for t in first[0]["top"]] == [("Hi", 5), ("<|x|>", 9)]
    assert pa.array([t["logprob"] for t in first], pa.float32()).equals(
        pa.array([-0.1, -1e-8, -12.345678], pa.float32())
    )


def test_lines_have_as_few_digits_as_tell_the_number(tmp_path: Path) -> None:
    path, _ = written(tmp_path, "jsonl", results())
    first = json.loads(path.read_text().splitlines()[0])["logprobs"]
    assert [t["logprob"] for t in first] == [-0.1, -1e-08, -12.345678]
    assert first[0]["top"] == [
        {"token": "Hi", "id": 5, "logprob": -0.1},
        {"token": "<|x|>", "id": 9, "logprob": -2.5},
    ]


def test_chat_and_completion_lines_are_openais(tmp_path: Path) -> None:
    path, _ = written(tmp_path, "openai_batch", results())
    choices = [json.loads(line)["response"] for line in path.read_text().splitlines()]
    first = choices[0]["body"]["choices"][0]["logprobs"]
    assert first["refusal"] is None
    assert [t["bytes"] for t in first["content"]] == [[72, 105], [32, 195], [169]]
    assert [t["token"] for t in first["content"][0]["top_logprobs"]] == ["Hi", "<|x|>"]
    assert choices[3]["body"]["choices"][0]["logprobs"] is None
    (tmp_path / "text").mkdir()
    path, _ = written(tmp_path / "text", "openai_batch", results(), chat=False)
    first = json.loads(path.read_text().splitlines()[0])["response"]["body"]["choices"][0]["logprobs"]
    assert first["tokens"] == ["Hi", " \ufffd", "\ufffd"]
    assert first["token_logprobs"] == [-0.1, -1e-08, -12.345678]
    assert first["top_logprobs"][0] == {"Hi": -0.1, "<|x|>": -2.5}
    assert first["text_offset"] == [0, 2, 3]


@given(st.floats(width=32, allow_nan=False, allow_infinity=False, max_value=0))
def test_shortest_tells_the_number(value: float) -> None:
    found = shortest(value)
    assert np.float32(found) == np.float32(value)
    assert len(repr(found)) <= len(repr(float(f"{value:.9g}")))


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"logprobs": True}, {"logprobs": 0}),
        ({"logprobs": True, "top_logprobs": 5}, {"logprobs": 5}),
        ({"logprobs": 3}, {"logprobs": 3}),
        ({"logprobs": False, "top_logprobs": 0}, {}),
        ({"logprobs": None}, {}),
        ({"top_logprobs": 2}, "body.top_logprobs needs body.logprobs: true; add it"),
        (
            {"logprobs": 2, "top_logprobs": 2},
            "body.top_logprobs has no meaning beside a number in body.logprobs",
        ),
    ],
)
def test_a_line_of_a_batch_may_ask(body: dict[str, Any], expected: Any) -> None:
    line = {
        "custom_id": "a",
        "url": "/v1/chat/completions",
        "body": {"messages": [{"role": "user", "content": "x"}], **body},
    }
    if isinstance(expected, str):
        with pytest.raises(RowFailure, match=expected):
            unwrap(Decoded(line, (), ()))
    else:
        assert unwrap(Decoded(line, (), ())).values["sampling"] == expected
