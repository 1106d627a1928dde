"""Hard prompts, each through `batchgen show` or `validate` on a real file, named by its case.

Neither needs weights or an engine; what becomes of such rows in a run is in `tests/e2e/test_prompt_cases.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tiny_models import CHAT_TEMPLATE, SPECIALS, save_tokenizer
from tokenizers.processors import TemplateProcessing
from transformers import AutoTokenizer

from batchgen.cli.main import main

Captured = pytest.CaptureFixture[str]
BOS, TURN_ENDS = "<|endoftext|>", "<|im_end|>"
CONTEXT = 64
NO_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + CHAT_TEMPLATE
)
# An absent key is not shown, one that is null would be.
PRESENT_KEYS = (
    "{% for m in messages %}{{ m.role }}:{{ m.content }}"
    "{% if 'tool_calls' in m %}C{{ m.tool_calls }}{% endif %}"
    "{% if 'name' in m %}N{{ m.name }}{% endif %};{% endfor %}"
)


class Place:
    """A folder with a tokenizer and a job."""

    def __init__(self, folder: Path, capture: Captured) -> None:
        self.folder = folder
        self._capture = capture
        self.model = folder / "model"
        self.model.mkdir()
        save_tokenizer(self.model)
        config = {"model_type": "llama", "max_position_embeddings": CONTEXT}
        (self.model / "config.json").write_text(json.dumps(config))
        (self.model / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")

    def job(self, *rows: dict[str, Any], name: str = "in.jsonl", **prompt: Any) -> str:
        """A job file over rows; with none, over a file that is there already."""
        if rows:
            (self.folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
        job = {
            "model": {"path": "model/", "max_model_len": CONTEXT},
            "input": name,
            "output": "out/",
            "prompt": prompt,
            "sampling": {"max_tokens": 8},
            "run": {"min_free_disk": 0},
        }
        path = self.folder / "job.yaml"
        path.write_text(json.dumps(job))
        return str(path)

    def show(self, job: str, row: int = 0) -> dict[str, Any]:
        """What is shown of a row."""
        self._capture.readouterr()
        assert main(["show", job, "--row", str(row), "--json"]) == 0
        shown: dict[str, Any] = json.loads(self._capture.readouterr().out)
        return shown

    def validate(self, job: str, code: int) -> str:
        """What is said of the job."""
        self._capture.readouterr()
        found = main(["validate", job])
        said = "".join(self._capture.readouterr())
        assert found == code, said
        return said


@pytest.fixture
def place(tmp_path: Path, capsys: Captured) -> Place:
    return Place(tmp_path, capsys)


def ids(shown: dict[str, Any]) -> list[int]:
    return [token["id"] for token in shown["tokens"]]


def fate(shown: dict[str, Any]) -> str:
    return str(shown["error"]["class"] if shown["error"] else shown["status"])


def test_c14_nullmsg(place: Place) -> None:
    chat = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho", "name": "x"}]
    call = pa.list_(pa.struct([("id", pa.string())]))
    message = pa.struct(
        [("role", pa.string()), ("content", pa.string()), ("tool_calls", call), ("name", pa.string())]
    )
    table = pa.table({"messages": pa.array([chat], pa.list_(message))})
    pq.write_table(table, place.folder / "in.parquet")
    parquet = place.show(place.job(name="in.parquet", chat_template=PRESENT_KEYS))
    jsonl = place.show(place.job({"messages": chat}, chat_template=PRESENT_KEYS))
    assert parquet["prompt"] == "user:hi;assistant:hoNx;"
    assert ids(parquet) == ids(jsonl)


def test_c15_jsonstr_tools(place: Place) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    rows = [{"prompt": "hi", "tools": json.dumps(tools)}, {"prompt": "hi", "tools": "[{"}]
    template = "{{ tools[0].function.name }}" + CHAT_TEMPLATE
    job = place.job(*rows, tools="tools", chat_template=template)
    assert place.show(job)["prompt"].startswith("f<|im_start|>user")
    assert fate(place.show(job, 1)) == "invalid_tools"


def test_c23_too_long(place: Place) -> None:
    job = place.job(*({"prompt": "x" * n} for n in (3, 10 * CONTEXT, 3)), mode="completion")
    assert [fate(place.show(job, row)) for row in range(3)] == ["ok", "context_length", "ok"]
    said = place.show(job, 1)["error"]["message"]
    assert f"{10 * CONTEXT} tokens" in said
    assert str(CONTEXT) in said


def test_c24_exact_len(place: Place) -> None:
    rows = [{"prompt": "x" * CONTEXT}, {"prompt": "x" * (CONTEXT - 1)}]
    job = place.job(*rows, mode="completion")
    assert [fate(place.show(job, row)) for row in range(2)] == ["context_length", "ok"]
    cut = place.show(place.job(*rows, mode="completion", overflow="truncate_right"))
    assert cut["truncated_tokens"] == CONTEXT - len(ids(cut)) > 0


def test_c25_trunc_policy(place: Place) -> None:
    text = "".join(chr(ord("a") + n % 26) for n in range(10 * CONTEXT))
    template = BOS + CHAT_TEMPLATE
    frame = len(ids(place.show(place.job({"prompt": "a"}, chat_template=template)))) - 1
    shown = place.show(place.job({"prompt": text}, overflow="truncate_left", chat_template=template))
    assert fate(shown) == "ok"
    assert shown["truncated_tokens"] == frame + len(text) - len(ids(shown)) > 0
    assert shown["tokens"][0]["token"] == BOS
    tail = "".join(token["token"] for token in shown["tokens"][-40:])
    # As the vocabulary spells a line break.
    assert tail.endswith(f"{text[-4:]}{TURN_ENDS}Ċ<|im_start|>assistantĊ")


def test_c27_no_system(place: Place) -> None:
    rows, prompt = [{"prompt": "hi"}], {"system": "be brief", "chat_template": NO_SYSTEM}
    said = place.validate(place.job(*rows, **prompt), 2)
    assert "no system" in said
    assert "prepend_to_user" in said
    job = place.job(*rows, **prompt, system_fallback="prepend_to_user")
    place.validate(job, 0)
    assert place.show(job)["prompt"].startswith("<|im_start|>user\nbe brief")


@pytest.mark.parametrize(
    ("row", "prompt", "inside"),
    [
        ({"prompt": "hi"}, {"chat_template": BOS + CHAT_TEMPLATE}, 0),
        ({"prompt": "hi"}, {"mode": "completion"}, 0),
        ({"prompt": BOS + "hi"}, {"mode": "completion", "special_tokens_in_content": "allow"}, 0),
        ({"prompt": "hi"}, {"chat_template": BOS + "x" + BOS + CHAT_TEMPLATE}, 1),
    ],
    ids=["template", "completion", "text", "template that uses it"],
)
def test_c29_double_bos(place: Place, row: dict[str, str], prompt: dict[str, str], inside: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(place.model, bos_token=BOS)
    begins = [(BOS, tokenizer.bos_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{BOS} $A", special_tokens=begins)
    tokenizer.save_pretrained(place.model)
    found = ids(place.show(place.job(row, **prompt)))
    assert found[0] == tokenizer.bos_token_id
    assert found[1] != tokenizer.bos_token_id
    assert found[1:].count(tokenizer.bos_token_id) == inside


@pytest.mark.parametrize("marker", SPECIALS)
def test_c30_special_in_text(place: Place, marker: str) -> None:
    row = {"prompt": f"a{marker}b"}
    number = AutoTokenizer.from_pretrained(place.model).convert_tokens_to_ids(marker)
    shown = {how: place.show(place.job(row, special_tokens_in_content=how)) for how in ("escape", "allow")}
    assert ids(shown["allow"]).count(number) == ids(shown["escape"]).count(number) + 1
    assert [shown[how]["control_tokens"] for how in ("escape", "allow")] == [1, 1]
    assert fate(place.show(place.job(row, special_tokens_in_content="error"))) != "ok"
