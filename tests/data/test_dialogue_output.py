"""Rows with several answers, and rows that were left out for a reason, in every format and back."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from data_files import jsonl

from batchgen.data.results import BatchLabels, OutputPlan, RowResult, plan_output
from batchgen.data.sink import part_suffix, write_part
from batchgen.job.export import Exporter, ExportOptions
from batchgen.job.part_reader import read_part
from batchgen.types import ErrorClass, RowError, Status, UsageError

REFUSED = RowError(ErrorClass.CONTEXT_LENGTH, "turn 2: too long: by far", Status.SKIPPED)
RESULTS = [
    RowResult("ok", ["one", "zwei \u00fc", ""], "stop", None, None, (3, 2, 0)),
    RowResult("error", error=RowError(ErrorClass.NULL_PROMPT, "null")),
    RowResult("skipped", error=REFUSED),
    RowResult("ok", ["x"], "length", None, None, (3, 2, 9)),
]


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_answers_are_a_list(tmp_path: Path, format: str) -> None:
    inputs = jsonl(tmp_path, *['{"id": "a"}'] * 4)
    plan = plan_output(inputs, format=format, dialogues=True)
    assert OutputPlan.from_json(plan.to_json(), inputs).dialogues
    path = tmp_path / f"part-000000{part_suffix(format, 'none')}"
    write_part(path, zip(inputs.rows(), RESULTS, strict=True), plan, compression="none")
    if format == "parquet":
        table = pq.read_table(path)
        assert table.schema.field("generated_text").type == pa.list_(pa.string())
        assert table["generated_text"].to_pylist() == [r.generated_text for r in RESULTS]
        assert table.schema == plan.schema()
    back = [row.result for row in read_part(path, plan.to_json())]
    assert [r.generated_text for r in back] == [r.generated_text for r in RESULTS]
    assert [(r.status, r.error and r.error.message) for r in back] == [
        (r.status, r.error and r.error.message) for r in RESULTS
    ]


THOUGHT = [
    RESULTS[0]._replace(included={"reasoning": ["a", None, "\u00fc"]}),
    RESULTS[1],
    RESULTS[3]._replace(included={"reasoning": [""]}),
]


@pytest.mark.parametrize("format", ["parquet", "jsonl", "openai_batch"])
@pytest.mark.parametrize("dialogues", [False, True], ids=["single", "dialogues"])
def test_reasoning_has_a_column_of_its_own(tmp_path: Path, format: str, dialogues: bool) -> None:
    if dialogues and format == "openai_batch":
        pytest.skip("a line of this format holds one answer")
    results = THOUGHT
    if not dialogues:
        single = RowResult("ok", "x", "stop", None, None, (3, 2, 0))
        results = [single, RESULTS[1], single._replace(included={"reasoning": "why"})]
    inputs = jsonl(tmp_path, *['{"id": "a"}'] * 3)
    labels = BatchLabels("0" * 16, "m", chat=True) if format == "openai_batch" else None
    plan = plan_output(inputs, format=format, dialogues=dialogues, reasoning="thoughts", batch=labels)
    path = tmp_path / f"part-000000{part_suffix(format, 'none')}"
    write_part(path, zip(inputs.rows(), results, strict=True), plan, compression="none")
    assert [row.result.included for row in read_part(path, plan.to_json())] == [r.included for r in results]
    if format == "parquet":
        kept = [r.included and r.included["reasoning"] for r in results]
        assert pq.read_table(path)["thoughts"].to_pylist() == kept
    if format == "openai_batch":
        assert path.read_text().splitlines()[2].count('"content": "x", "reasoning_content": "why"') == 1


def test_a_plan_of_an_older_version_has_one_answer(tmp_path: Path) -> None:
    inputs = jsonl(tmp_path, '{"id": "a"}')
    data = plan_output(inputs).to_json()
    del data["dialogues"]
    assert not OutputPlan.from_json(data, inputs).dialogues


def test_a_row_left_out_says_why_in_a_batch_file(tmp_path: Path) -> None:
    inputs = jsonl(tmp_path, '{"id": "a"}')
    plan = plan_output(inputs, format="openai_batch", batch=BatchLabels("0" * 16, "m", chat=True))
    path = tmp_path / "part-000000.jsonl"
    write_part(path, zip(inputs.rows(), RESULTS[2:3], strict=True), plan, compression="none")
    (row,) = read_part(path, plan.to_json())
    assert row.result == RowResult("skipped", error=RowError(REFUSED.error_class, REFUSED.message))


def test_row_groups_end_by_the_characters_of_all_answers(tmp_path: Path) -> None:
    inputs = jsonl(tmp_path, *['{"id": "a"}'] * 4)
    plan = plan_output(inputs, dialogues=True)
    results = [RowResult("ok", ["x" * 600, "y" * 600], "stop", None, None, (3, 2, 0))] * 4
    path = tmp_path / "part-000000.parquet"
    write_part(path, zip(inputs.rows(), results, strict=True), plan, group_bytes=2000)
    assert pq.ParquetFile(path).num_row_groups == 2


def test_export_of_several_answers(tmp_path: Path) -> None:
    inputs = jsonl(tmp_path, *['{"x": "a"}'] * 4)

    class Source:
        plan = plan_output(inputs, format="jsonl", dialogues=True).to_json()

        def numbers(self) -> list[int]:
            return [0]

        def records(self, _: int) -> Any:
            return zip(inputs.rows(), RESULTS, strict=True)

    source: Any = Source()
    with (tmp_path / "x.parquet").open("wb") as file:
        assert Exporter(source, ExportOptions(format="parquet")).write(file, "none") == 4
    answers = pq.read_table(tmp_path / "x.parquet")["generated_text"].to_pylist()
    assert answers == [r.generated_text for r in RESULTS]
    with pytest.raises(UsageError, match="one answer, and rows of this job have several"):
        Exporter(source, ExportOptions(format="openai_batch"))
