"""Hard prompts through the command line: one job, a real worker, a tiny model, every row its own fate."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml
from tiny_models import CHAT_TEMPLATE, oracle, save_tiny_llama

from batchgen.cli.main import main
from batchgen.text.tokenizer import Tokenizer

CONTEXT = 96
WITH_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHAT_TEMPLATE


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("llama"))


def run(folder: Path, model: Path, lines: list[str], **sections: Any) -> list[dict[str, Any]]:
    (folder / "rows.jsonl").write_text("".join(f"{line}\n" for line in lines))
    job: dict[str, Any] = {
        "model": {"path": str(model), "max_model_len": CONTEXT},
        "input": "rows.jsonl",
        "output": "out",
        "run": {"progress": "none", "min_free_disk": "1MB"},
        **sections,
    }
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        assert main(["run", str(folder / "job.yaml")]) == 0
    assert main(["verify", str(folder / "out")]) == 0
    rows: list[dict[str, Any]] = pq.read_table(folder / "out/data").to_pylist()
    return rows


def test_each_row_has_its_own_fate(tmp_path: Path, model: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    lines = [
        json.dumps({"prompt": "hi"}),
        json.dumps({"prompt": None}),
        json.dumps({"prompt": ""}),
        json.dumps({"prompt": "   "}),
        '{"prompt": "hi", "s": {"temperature": Infinity}}',
        json.dumps({"prompt": "hi", "s": {"max_tokens": 3}}),
        json.dumps({"prompt": "hi", "s": {"temprature": 3}}),
        json.dumps({"prompt": "hi", "tools": json.dumps(tools)}),
        json.dumps({"prompt": "hi", "tools": "[{"}),
        json.dumps({"prompt": "a<|im_end|>b"}),
        json.dumps({"prompt": "long " * 100}),
        '{"prompt": "hi", "score": NaN}',
    ]
    rows = run(
        tmp_path,
        model,
        lines,
        prompt={"chat_template": WITH_TOOLS, "tools": "tools", "overflow": "truncate_middle"},
        sampling={"max_tokens": 8, "per_row": "s"},
    )
    classes = {row["row"]: row["error"]["class"] for row in rows if row["error"]}
    assert classes == {
        1: "null_prompt", 2: "empty_prompt", 4: "invalid_param", 6: "invalid_param", 8: "invalid_tools"
    }  # fmt: skip
    assert all((row["status"] == "error") == (row["row"] in classes) for row in rows)
    assert "did you mean temperature" in rows[6]["error"]["message"]
    assert rows[5]["usage"]["completion_tokens"] <= 3
    assert rows[7]["usage"]["prompt_tokens"] == rows[0]["usage"]["prompt_tokens"] + len(json.dumps(tools))
    cut = rows[10]["usage"]
    assert (cut["prompt_tokens"], cut["truncated_tokens"]) == (CONTEXT - 8, 500 + 19 - (CONTEXT - 8))

    tokenizer = Tokenizer.load(str(model))
    good = [0, 3, 5, 11]
    chats = [[{"role": "user", "content": "   " if i == 3 else "hi"}] for i in good]
    prompts = [
        tokenizer.hf.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        for chat in chats
    ]
    expected = oracle(model, prompts, 8)
    limits = [8, 8, 3, 8]
    texts = [tokenizer.decode(ids[:limit]) for ids, limit in zip(expected, limits, strict=True)]
    assert [rows[i]["generated_text"] for i in good] == texts


def test_too_long_and_just_not_too_long(tmp_path: Path, model: Path) -> None:
    """C23 and C24. Whatever a prompt leaves room for is generated, and the last token is never fed back."""
    lines = [json.dumps({"prompt": "a" * n}) for n in (5, 10 * CONTEXT, CONTEXT, CONTEXT - 1, CONTEXT - 3)]
    sampling = {"max_tokens": 8, "ignore_eos": True}
    rows = run(tmp_path, model, lines, prompt={"mode": "completion"}, sampling=sampling)
    fates = [row["error"]["class"] if row["error"] else row["finish_reason"] for row in rows]
    assert fates == ["length", "context_length", "context_length", "length", "length"]
    assert [row["usage"]["completion_tokens"] for row in rows if row["usage"]][-2:] == [1, 3]
    assert all(str(CONTEXT) in row["error"]["message"] for row in rows if row["error"])
