"""`batchgen init`: what it writes fits the input, and `validate` accepts it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from batchgen.cli.main import main
from batchgen.job.load import load_job
from batchgen.job.scaffold import propose_prompt, quoted
from batchgen.job.yaml_loader import parse_document

Write = Callable[..., str]
Captured = pytest.CaptureFixture[str]
CHAT = [{"role": "user", "content": "hi"}]


def _jsonl(rows: list[dict[str, Any]]) -> str:
    Path("in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return "in.jsonl"


def _init(*arguments: str) -> None:
    assert main(["init", "new.yaml", "--model", "./model", *arguments]) == 0
    assert main(["validate", "new.yaml"]) == 0


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([{"prompt": "a", "id": "x"}], {}),
        ([{"messages": CHAT, "task_id": 1}, {"messages": CHAT, "task_id": 2}], {"id": "task_id"}),
        ([{"conversation": CHAT, "n": 1}], {"messages": "conversation"}),
        ([{"chat": json.dumps(CHAT), "text": "x"}], {"messages": "chat"}),
        ([{"title": "t", "question": "q", "body": "b"}], {"user": "{{ question }}\n{{ body }}"}),
        ([{"a": "x", "long one": "xxxxxx", "b": "xxx"}], {"user": "{{ b }}"}),
        ([{"prompt_token_ids": [1, 2]}], {"mode": "tokens"}),
        ([{"key": 1, "text": "x"}, {"key": 1, "text": "y"}], {"user": "{{ text }}"}),
    ],
)
def test_a_job_for_jsonl(write_job: Write, rows: list[dict[str, Any]], expected: dict[str, str]) -> None:
    write_job()
    _init("--input", _jsonl(rows))
    spec = load_job("new.yaml")
    assert (spec.prompt.mode, spec.prompt.messages, spec.prompt.user, spec.input.id) == (
        expected.get("mode", "chat"),
        expected.get("messages"),
        expected.get("user"),
        expected.get("id", "auto"),
    )


def test_a_job_for_parquet(write_job: Write) -> None:
    write_job()
    pq.write_table(pa.table({"doc_id": ["a", "b"], "conv": [CHAT, CHAT]}), "in.parquet")
    _init("--input", "in.parquet")
    spec = load_job("new.yaml")
    assert (spec.prompt.messages, spec.input.id) == ("conv", "doc_id")


def test_a_model_without_a_chat_template(write_job: Write, tokenizer_folder: Path) -> None:
    write_job()
    Path("base").mkdir()
    for file in tokenizer_folder.iterdir():
        if not file.name.startswith("chat_template"):
            (Path("base") / file.name).write_bytes(file.read_bytes())
    given = _jsonl([{"question": "q"}])
    assert main(["init", "b.yaml", "--input", given, "--model", "base"]) == 0
    assert load_job("b.yaml").prompt.mode == "completion"
    assert main(["validate", "b.yaml"]) == 0


def test_paths_are_seen_from_the_job_file(write_job: Write, capsys: Captured) -> None:
    write_job()
    given = _jsonl([{"prompt": "p"}])
    assert main(["init", "jobs/", "--input", given, "--model", "model", "--output", "../out"]) == 0
    spec = load_job("jobs/job.yaml")
    here = Path.cwd()
    assert spec.input.path == (str(here / "in.jsonl"),)
    assert (spec.model.path, spec.output_folder) == (str(here / "model"), here / "out")
    assert (
        "wrote jobs/job.yaml; look it over, then: batchgen validate jobs/job.yaml" in capsys.readouterr().err
    )


def test_it_never_overwrites(write_job: Write, capsys: Captured) -> None:
    before = Path(write_job()).read_text()
    assert main(["init"]) == 2
    assert "job.yaml: is there already; choose another name" in capsys.readouterr().err
    assert Path("job.yaml").read_text() == before
    assert main(["init", "job.yaml/x.yaml"]) == 5


def test_without_an_input_it_is_a_job_to_fill_in(tmp_path: Path) -> None:
    assert main(["init", str(tmp_path)]) == 0
    assert load_job(tmp_path / "job.yaml").model.path == "org/name"


@pytest.mark.parametrize(
    "text", ["a", "a b", "no", "1e3", "üñ 😀", "a: b", "# x", "x\ny", "{{ a }}", "", "~", "true"]
)
def test_any_text_can_be_written(text: str) -> None:
    assert parse_document(f"k: {quoted(text)}  # c\n", "f").data == {"k": text}


def test_columns_that_a_template_cannot_name_are_left_out() -> None:
    rows = [{"class": "xxxx", "dict": "xxxx", "none": "xxxx", "a-b": "xxxx", "ok": "x"}]
    assert propose_prompt(rows, chat=True).user == "{{ ok }}"
    assert propose_prompt([], chat=True).user is None
