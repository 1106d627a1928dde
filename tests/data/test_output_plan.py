"""Our own columns: names, order, types, renaming, and refusals that say what to write instead."""

from pathlib import Path

import pyarrow as pa
import pytest
from data_files import jsonl, parquet

from batchgen.data.prompt_values import prompt_values
from batchgen.data.results import RowResult, plan_output
from batchgen.data.source import open_input
from batchgen.types import ErrorClass, RowError, UsageError


def test_the_stable_schema(tmp_path: Path) -> None:
    schema = plan_output(open_input(parquet(tmp_path, pa.table({"a": ["x"]})))).schema()
    assert schema == pa.schema(
        [
            ("row", pa.int64()),
            ("id", pa.string()),
            ("a", pa.string()),
            ("generated_text", pa.string()),
            ("finish_reason", pa.string()),
            ("stop_reason", pa.string()),
            ("status", pa.string()),
            ("error", pa.struct([("class", pa.string()), ("message", pa.string())])),
            (
                "usage",
                pa.struct(
                    [
                        ("prompt_tokens", pa.int64()),
                        ("completion_tokens", pa.int64()),
                        ("truncated_tokens", pa.int64()),
                    ]
                ),
            ),
        ]
    )


@pytest.mark.parametrize(
    ("include", "absent"),
    [([], {"usage", "finish_reason", "stop_reason"}), (["usage"], {"finish_reason", "stop_reason"})],
)
def test_include(tmp_path: Path, include: list[str], absent: set[str]) -> None:
    names = plan_output(jsonl(tmp_path, "{}"), include=include).schema().names
    full = plan_output(jsonl(tmp_path, "{}")).schema().names
    assert set(full) - set(names) == absent


def test_renaming(tmp_path: Path) -> None:
    inputs = jsonl(tmp_path, '{"generated_text": "old"}')
    plan = plan_output(inputs, renames={"generated_text": "summary", "row": "n"})
    assert plan.schema().names[:5] == ["n", "id", "generated_text", "extra", "summary"]


@pytest.mark.parametrize(
    ("line", "options", "message"),
    [
        (
            '{"usage": 1}',
            {},
            r"'usage' has the name .* rename ours with output.columns: {usage: batchgen_usage}",
        ),
        ('{"a": 1}', {"renames": {"status": "a"}}, r"input column 'a' .* {status: batchgen_status}"),
        (
            "{}",
            {"renames": {"prompt": "p"}},
            r"output.columns: 'prompt' is not written; add prompt to output.include, or leave it alone",
        ),
        (
            "{}",
            {"include": ["usage"], "renames": {"stop_reason": "s"}},
            r"output.columns: 'stop_reason' is not written; add finish_reason to output.include",
        ),
        (
            '{"prompt": "x"}',
            {"include": ["prompt"]},
            r"input column 'prompt' .* output.columns: {prompt: batchgen_prompt}",
        ),
        (
            "{}",
            {"format": "openai_batch", "include": ["usage", "seed"]},
            r"output.include: output.format: openai_batch has its own members and no place for others; "
            "remove output.include, or use the format jsonl",
        ),
        (
            "{}",
            {"format": "openai_batch", "renames": {"id": "x"}},
            "output.columns: output.format: openai_batch",
        ),
        (
            '{"text": 1}',
            {"columns": ["txt"]},
            r"no column 'txt' in its first 1,000 rows; did you mean 'text'",
        ),
        (
            '{"reasoning": 1}',
            {"reasoning": "reasoning"},
            r"sampling.reasoning.column: 'reasoning' is a column of the input; use .* batchgen_reasoning",
        ),
        (
            "{}",
            {"reasoning": "id"},
            r"sampling.reasoning.column: 'id' is the name of another column of the output; choose another",
        ),
        ('{"text": 1}', {"columns": ["zzz"]}, r"no column 'zzz' .*; there are text"),
    ],
)
def test_refusals(tmp_path: Path, line: str, options: dict, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        plan_output(jsonl(tmp_path, line), **options)


def test_columns_left_out_do_not_collide(tmp_path: Path) -> None:
    plan = plan_output(jsonl(tmp_path, '{"usage": 1, "a": 2}'), columns=["a"])
    assert plan.schema().names.count("usage") == 1


def test_results_from_the_journal() -> None:
    values = ["ok", "x", "stop", 2, None, [1, 2, 0]]
    assert RowResult.of(*values) == RowResult("ok", "x", "stop", "2", None, (1, 2, 0))
    result = RowResult.of("error", None, None, None, ["timeout", "late"], None)
    assert result.error == RowError(ErrorClass.TIMEOUT, "late")
    assert result.usage is None


def test_prompt_values_are_portable(tmp_path: Path) -> None:
    members = '"big": 123456789012345678901234567890, "f": 1.50, "l": [18446744073709551616, {"b": true}]'
    (row,) = jsonl(tmp_path, f'{{{members}, "n": null}}').rows()
    values = prompt_values(row, ["big", "f", "l", "n", "absent"])
    assert values == {
        "big": "123456789012345678901234567890",
        "f": 1.5,
        "l": ["18446744073709551616", {"b": True}],
        "n": None,
    }
    assert type(values["f"]) is float
