"""The format openai_batch: the documented shape, nothing that depends on when, and a way back."""

import json
from pathlib import Path

import pytest
from data_files import jsonl

from batchgen.data.results import BatchLabels, OutputPlan, RowResult, plan_output
from batchgen.data.sink import write_part
from batchgen.job.part_reader import read_part
from batchgen.types import ErrorClass, RowError

CHAT = BatchLabels("0123456789abcdef", "org/mo%del", chat=True)


def written(tmp_path: Path, labels: BatchLabels) -> tuple[Path, OutputPlan, list[RowResult]]:
    inputs = jsonl(tmp_path, '{"id": "a"}', '{"id": 2}', '{"id": "\u2028"}', '{"id": "d"}')
    plan = plan_output(inputs, format="openai_batch", batch=labels)
    results = [
        RowResult("ok", "Caf\u00e9\n", "stop", "</s>", None, (3, 2, 0)),
        RowResult("error", error=RowError(ErrorClass.CONTEXT_LENGTH, 'too "long"')),
        RowResult("ok", "", "length", None, None, (3, 2, 9)),
        RowResult("skipped"),
    ]
    path = tmp_path / "part-000000.jsonl"
    write_part(path, zip(inputs.rows(), results, strict=True), plan, compression="none")
    return path, plan, results


def test_the_documented_shape(tmp_path: Path) -> None:
    path, _, _ = written(tmp_path, CHAT)
    first, second, third, fourth = map(json.loads, path.read_text().split("\n")[:-1])
    assert first == {
        "id": "batch_req_0123456789abcdef_0",
        "custom_id": "a",
        "response": {
            "status_code": 200,
            "request_id": "req_0123456789abcdef_0",
            "body": {
                "id": "chatcmpl-0123456789abcdef-0",
                "object": "chat.completion",
                "created": 0,
                "model": "org/mo%del",
                "choices": [
                    {
                        "index": 0,
                        "message": {"role": "assistant", "content": "Caf\u00e9\n"},
                        "logprobs": None,
                        "finish_reason": "stop",
                        "stop_reason": "</s>",
                    }
                ],
                "usage": {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5},
            },
        },
        "error": None,
    }
    assert second["response"] is None
    assert second["error"] == {"code": "context_length", "message": 'too "long"'}
    assert second["custom_id"] == "2"
    assert third["response"]["body"]["usage"]["truncated_tokens"] == 9
    assert (fourth["response"], fourth["error"]["code"]) == (None, "skipped")


def test_completions_are_texts(tmp_path: Path) -> None:
    path, _, _ = written(tmp_path, BatchLabels("0" * 16, "m", chat=False))
    body = json.loads(path.read_text().split("\n")[0])["response"]["body"]
    assert (body["object"], body["choices"][0]["text"]) == ("text_completion", "Caf\u00e9\n")
    assert "message" not in body["choices"][0]


@pytest.mark.parametrize("chat", [True, False])
def test_the_way_back(tmp_path: Path, chat: bool) -> None:
    path, plan, results = written(tmp_path, BatchLabels("0" * 16, "m", chat=chat))
    rows = list(read_part(path, plan.to_json()))
    assert [(row.row, row.id) for row in rows] == [(0, "a"), (1, "2"), (2, "\u2028"), (3, "d")]
    assert [row.result for row in rows] == results


def test_a_pinned_plan_keeps_its_labels(tmp_path: Path) -> None:
    inputs = jsonl(tmp_path, "{}")
    plan = plan_output(inputs, format="openai_batch", batch=CHAT)
    assert OutputPlan.from_json(json.loads(json.dumps(plan.to_json())), inputs) == plan
