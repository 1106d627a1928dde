"""`batchgen.Job` and `batchgen.open`, with a real worker on a tiny model."""

import json
from pathlib import Path
from typing import Any

import pytest
from fake_engine import launcher
from tiny_models import save_tiny_llama

import batchgen as bg
from batchgen.job.progress import Progress
from batchgen.types import InputError, StorageError, UsageError

ROWS = 12
BAD = 3


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    save_tiny_llama(folder / "model")
    rows = [{"prompt": None if i == BAD else f"Number {i}", "n": i} for i in range(ROWS)]
    (folder / "in.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "job.yaml").write_text(
        "model: model/\ninput: in.jsonl\noutput: out/\nprompt: {mode: completion}\n"
        "sampling: {max_tokens: 4, ignore_eos: true}\nrun: {progress: none}\n"
    )
    return folder


@pytest.fixture(scope="module")
def finished(place: Path) -> tuple[bg.JobResult, list[Progress]]:
    seen: list[Progress] = []
    return bg.Job.from_yaml(place / "job.yaml").run(on_progress=seen.append), seen


def test_a_run_says_how_it_ended(finished: tuple[bg.JobResult, list[Progress]]) -> None:
    result, seen = finished
    assert (result.exit_code, result.ok) == (0, True)
    assert "complete" in result.reason
    assert (result.counts.ok, result.counts.error) == (ROWS - 1, 1)
    assert seen[-1].rows_done == ROWS
    assert repr(result).endswith(f"{ROWS} rows, {ROWS - 1} ok, 1 error, 0 skipped)")


def test_results_are_read_in_order_with_errors_as_data(
    finished: tuple[bg.JobResult, list[Progress]], place: Path
) -> None:
    results = bg.open(place / "out")
    table = results.table(["row", "n", "generated_text"])
    assert table.column_names == ["row", "n", "generated_text"]
    assert table["n"].to_pylist() == list(range(ROWS))
    assert [row["n"] for row in results] == list(range(ROWS))
    assert [row["row"] for row in results.errors()] == [BAD]
    assert results.errors()[0]["error"]["class"] == "null_prompt"
    assert len(results) == len(results.dataset()) == ROWS
    assert results.status().state == "complete"


@pytest.mark.parametrize("compression", ["zstd", "gzip", "none"])
def test_results_in_jsonl_are_read_as_well(place: Path, compression: str) -> None:
    changes = {
        "output.path": str(place / compression),
        "output.format": "jsonl",
        "output.compression": compression,
    }
    results = bg.Job.from_yaml(place / "job.yaml", overrides=changes).run(launch=launcher())
    assert [row["n"] for row in results] == results.table(["n"])["n"].to_pylist() == list(range(ROWS))
    assert [row["row"] for row in results.errors()] == [BAD]


def test_running_again_computes_nothing(finished: tuple[bg.JobResult, list[Progress]], place: Path) -> None:
    before = (place / "out" / "data" / "part-000000.parquet").stat().st_mtime_ns
    result = bg.Job.from_yaml(place / "job.yaml").run()
    assert "already complete" in result.reason
    assert (place / "out" / "data" / "part-000000.parquet").stat().st_mtime_ns == before


def test_a_push_that_fails_leaves_a_complete_folder(
    finished: tuple[bg.JobResult, list[Progress]], place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = bg.Job.from_yaml(place / "job.yaml", overrides={"output.push_to_hub": "org/answers"})
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(UsageError, match="HF_TOKEN holds no token"):
        job.run()
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    with pytest.raises(StorageError, match=r"output.push_to_hub: org/answers: .* all results are in"):
        job.run()
    assert bg.open(place / "out").status().state == "complete"


def test_a_dict_holds_what_a_job_file_holds(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(place)
    job = bg.Job(
        {"model": "model/", "input": ["in.jsonl"], "output": "other/", "prompt": {"user": "{{ n }}"}}
    )
    assert job.spec.output_folder == place / "other"
    assert job.spec.input.path == (str(place / "in.jsonl"),)
    assert job.validate() == []


def test_overrides_are_values(place: Path) -> None:
    job = bg.Job.from_yaml(
        place / "job.yaml", {"input.limit": 10, "sampling.stop": ["\n", "no"], "prompt.user": "{{ n }}: 'x'"}
    )
    assert job.spec.input.limit == 10
    assert job.spec.sampling.stop == ("\n", "no")
    assert job.spec.prompt.user == "{{ n }}: 'x'"


def test_paths_are_taken_wherever_a_path_is_meant(place: Path, tmp_path: Path) -> None:
    job = bg.Job({"model": place / "model", "input": [place / "in.jsonl"], "output": {"path": tmp_path}})
    assert job.spec.model.path == str(place / "model")
    assert job.spec.input.path == (str(place / "in.jsonl"),)
    assert job.spec.output_folder == tmp_path
    changed = bg.Job.from_yaml(
        place / "job.yaml", {"output.path": tmp_path, "input.path": [place / "in.jsonl"]}
    )
    assert changed.spec.output_folder == tmp_path
    assert changed.spec.input.path == (str(place / "in.jsonl"),)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["input.limit=3"], "overrides: .* is not a dict; use one from dotted keys to values"),
        ("input.limit=3", "overrides: 'input.limit=3' is not a dict"),
        ({3: 3}, "overrides: 3 is not a key; use a dotted one, such as 'input.limit'"),
        ({"": 3}, "overrides: '' is not a key"),
        ({"input..limit": 3}, "overrides: 'input..limit' is not a key"),
        ({"input.limit": {3}}, r"override\.input\.limit: \{3\} is of type set, which a job file cannot hold"),
        ({"input.limit": float("nan")}, r"input\.limit: .* is not allowed"),
        ({"run": {("a",): 3}}, "override.run: .* is a key and not text"),
    ],
)
def test_overrides_that_are_none_are_told(place: Path, overrides: Any, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        bg.Job.from_yaml(place / "job.yaml", overrides)


@pytest.mark.parametrize("values", ["job.yaml", Path("job.yaml"), None, 3, ["a"]], ids=repr)
def test_a_job_that_is_no_dict_is_led_to_from_yaml(values: Any) -> None:
    with pytest.raises(UsageError, match=r"^Job: .* load a job file with bg\.Job\.from_yaml\(path\)$"):
        bg.Job(values)


def test_a_job_that_holds_itself_is_refused() -> None:
    values: dict[str, Any] = {}
    values["model"] = values
    with pytest.raises(UsageError, match="the job is nested too deep for a job file, or holds itself"):
        bg.Job(values)


@pytest.mark.parametrize("path", [None, 3, "", "a\0b"], ids=repr)
def test_what_is_no_path_is_told(path: Any) -> None:
    with pytest.raises(UsageError, match=r"^path: "):
        bg.Job.from_yaml(path)
    with pytest.raises(UsageError, match=r"^folder: "):
        bg.open(path)


@pytest.mark.parametrize("format", ["parquet", "jsonl"])
def test_columns_that_no_row_has_are_refused(
    finished: tuple[bg.JobResult, list[Progress]], place: Path, tmp_path: Path, format: str
) -> None:
    results: bg.Results = finished[0]
    if format == "jsonl":
        changes = {"output.path": tmp_path / "out", "output.format": format}
        results = bg.Job.from_yaml(place / "job.yaml", overrides=changes).run(launch=launcher())
    for read in (results.table, lambda columns: list(results.batches(columns))):
        with pytest.raises(
            UsageError, match=r"columns: the output has no column 'nope'; there are row, .*, usage"
        ):
            read(["row", "nope"])
        with pytest.raises(UsageError, match="the output has no column 3; there are row"):
            read([3])
        with pytest.raises(UsageError, match="columns: 'row' is not a list of names"):
            read("row")
    assert results.table(["error"]).num_rows == ROWS
    assert results.table([]).num_columns == 0
    if format == "parquet":
        assert results.table(["usage.prompt_tokens"]).num_columns == 1


def test_faults_are_found_without_running(place: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"job:\d+:\d+: sampling.temperatur is not a known key"):
        bg.Job({"model": "m", "input": "x.jsonl", "output": "o", "sampling": {"temperatur": 1}})
    with pytest.raises(UsageError, match="model: b'm' is of type bytes, which a job file cannot hold"):
        bg.Job({"model": b"m"})
    job = bg.Job(
        {"model": str(place / "model"), "input": str(tmp_path / "no.jsonl"), "output": str(tmp_path)}
    )
    assert [type(fault) for fault in job.validate()] == [InputError]
    with pytest.raises(InputError):
        job.run()
    with pytest.raises(UsageError):
        bg.open(tmp_path)
