"""OpenAI batch files: what becomes of the members of a line, and which are refused instead of dropped."""

import json
from pathlib import Path
from typing import Any

import pytest
from data_files import classes, write

from batchgen.data.row import Row
from batchgen.data.source import open_input
from batchgen.types import UsageError

CHAT = [{"role": "user", "content": "hi"}]


def line(custom_id: str = "a", url: str = "/v1/chat/completions", **body: Any) -> dict[str, Any]:
    if url.endswith("chat/completions"):
        body = {"model": "m", "messages": CHAT, **body}
    return {"custom_id": custom_id, "method": "POST", "url": url, "body": body}


def read(tmp_path: Path, *lines: Any, **options: Any) -> list[Row]:
    text = "".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in lines)
    with open_input(write(tmp_path, "in.jsonl", text), **options) as inputs:
        assert inputs.format == "openai_batch"
        return list(inputs.rows())


def test_chat(tmp_path: Path) -> None:
    body = {
        "temperature": 0.5, "max_completion_tokens": 7, "stop": "x", "seed": 3, "user": "u", "n": 1,
        "metadata": {"a": "b"}, "tools": None, "stream": False, "response_format": {"type": "text"},
        "logit_bias": {"50256": -100}, "top_p": None, "presence_penalty": 0,
    }  # fmt: skip
    first, second = read(tmp_path, line(**body), line("b"))
    assert first.error is None
    assert first.id == "a"
    assert dict(first.values) == {
        "custom_id": "a",
        "url": "/v1/chat/completions",
        "model": "m",
        "messages": CHAT,
        "sampling": {
            "temperature": 0.5,
            "max_tokens": 7,
            "stop": ["x"],
            "seed": 3,
            "n": 1,
            "logit_bias": {"50256": -100},
            "presence_penalty": 0,
        },
    }
    assert second.id == "b"
    assert second.values["sampling"] == {}


def test_completions_and_responses(tmp_path: Path) -> None:
    rows = read(
        tmp_path,
        line("a", "/v1/completions", model="m", prompt="p", max_tokens=3),
        line("b", "https://api.openai.com/v1/completions", prompt=["p"]),
        line("c", "/v1/completions", prompt=["p", "q"]),
        line("d", "/v1/responses", input="hi", instructions="be brief", max_output_tokens=4),
        line("e", "/v1/responses", input=CHAT),
        line("f", "/v1/responses", input=None),
    )
    assert classes(rows) == [None, None, "invalid_param", None, None, "null_prompt"]
    assert [row.values["prompt"] for row in rows[:2]] == ["p", "p"]
    assert rows[0].values["sampling"] == {"max_tokens": 3}
    assert rows[3].values["messages"] == [{"role": "system", "content": "be brief"}, *CHAT]
    assert rows[4].values["messages"] == CHAT


@pytest.mark.parametrize(
    ("member", "value"),
    [
        ("tools", [{"type": "function"}]),
        ("response_format", {"type": "json_object"}),
        ("top_logprobs", 3),
        ("reasoning_effort", "high"),
        ("something_new", 1),
        ("stream", True),
        ("max_tokens", 9),
    ],
)
def test_what_would_change_the_answer_is_never_dropped(tmp_path: Path, member: str, value: Any) -> None:
    rows = read(tmp_path, line("a", max_completion_tokens=8, **{member: value}), line("b"))
    assert classes(rows) == ["invalid_param", None]
    assert rows[0].error is not None
    assert f"in.jsonl line 1: body.{member}" in rows[0].error.message
    assert rows[0].values == {}
    assert [row.id for row in rows] == ["a", "b"]


def test_lines_that_are_not_requests(tmp_path: Path) -> None:
    good = line("a")
    rows = read(
        tmp_path,
        good,
        {**good, "custom_id": None},
        {**good, "body": []},
        {**good, "method": "GET"},
        {**good, "url": "/v1/moderations"},
        line("b", messages=None),
        json.dumps(line("c", temperature=float("nan"))),
        json.dumps(line("d", temperature=1)).replace("1}", "1e999}"),
        "broken",
    )
    missing, param = "missing_column", "invalid_param"
    expected = [None, missing, missing, param, param, "null_prompt", param, "number_out_of_range"]
    assert classes(rows) == [*expected, "invalid_json"]


def test_embeddings_are_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"in.jsonl line 1: url '/v1/embeddings' asks for embeddings"):
        read(tmp_path, line("a", "/v1/embeddings", input="x"))


def test_another_id_column(tmp_path: Path) -> None:
    assert [row.id for row in read(tmp_path, line("a"), id_column="model")] == ["m"]
