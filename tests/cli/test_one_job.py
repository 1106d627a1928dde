"""One job on a tiny model, run once, then looked at by every verb that takes its folder."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from tiny_models import save_tiny_llama

import batchgen
from batchgen.cli.main import main
from batchgen.types import StorageError

Captured = pytest.CaptureFixture[str]
JOB = (
    "model: ./model\ninput: rows.jsonl\noutput: out\nsampling: {max_tokens: 4}\n"
    "run: {progress: json, min_free_disk: 0}\nengine: {kv_cache_memory: 4MB, attention: reference}\n"
)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a job that has run."""
    folder = tmp_path_factory.mktemp("job")
    save_tiny_llama(folder / "model")
    rows = [json.dumps({"prompt": f"row {i}", "n": i}) + "\n" for i in range(5)]
    (folder / "rows.jsonl").write_text("".join(rows))
    (folder / "job.yaml").write_text(JOB)
    root = Path(batchgen.__file__).parent.parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{root}:{root / 'kernels'}")
        assert main(["run", str(folder / "job.yaml")]) == 0
    return folder


@pytest.fixture
def job(finished: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder as the current one, with an output folder that the test may spoil."""
    monkeypatch.chdir(finished)
    shutil.copytree("out", "kept")
    yield finished
    shutil.rmtree("out")
    Path("kept").rename("out")


def test_the_rows_are_there(job: Path) -> None:
    table = pq.read_table("out/data/part-000000.parquet").to_pydict()
    assert table["n"] == [0, 1, 2, 3, 4]
    assert table["status"] == ["ok"] * 5
    assert "max_tokens: 4" in Path("out/job.resolved.yaml").read_text()


def test_running_again_does_nothing(job: Path, capsys: Captured) -> None:
    assert main(["run", "job.yaml"]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    notes = [json.loads(line) for line in captured.err.splitlines()]
    assert len(notes) == 1
    assert "already complete" in notes[0]["note"]


def test_another_job_is_refused_with_a_diff(job: Path, capsys: Captured) -> None:
    assert main(["run", "job.yaml", "--set", "sampling.max_tokens=5"]) == 4
    assert "  sampling.max_tokens\n    - 4\n    + 5\n" in capsys.readouterr().err


def test_status_of_a_finished_job(job: Path, capsys: Captured) -> None:
    assert main(["status", "out"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("out: complete\nrows      5 of 5: 5 ok, 0 failed\n")
    assert main(["status", "out", "--json"]) == 0
    status = json.loads(capsys.readouterr().out)
    assert (status["state"], status["ok"], status["eta_seconds"]) == ("complete", 5, None)


def test_the_report_has_what_only_an_engine_knows(job: Path, capsys: Captured) -> None:
    report = json.loads(Path("out/report.json").read_text())
    assert report["verdict"]["good"]
    assert report["times"]["decode_seconds"]["count"] == 5
    assert report["times"]["decode_seconds"]["max"] > 0
    assert report["lengths"]["output_tokens"]["max"] == 4
    assert report["work"]["prompt_tokens"] > report["work"]["output_tokens"] > 0
    assert max(point["pool_share"] or 0 for point in report["course"]["points"]) <= 1
    assert main(["report", "out", "--compare", "kept"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(
        "Complete, exit code 0. 5 of 5 rows done.\nOf 5 rows that both have, 5 have the same output and 0 "
    )
    assert text.endswith("report: out/compare.html\n")
    assert main(["report", "out", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == report["rows"]


def test_a_report_that_cannot_be_put_there_goes_to_standard_output(
    job: Path, monkeypatch: pytest.MonkeyPatch, capsys: Captured
) -> None:
    def refuse(path: Path, data: bytes) -> None:
        raise StorageError(f"{path}: cannot be written")

    monkeypatch.setattr("batchgen.job.report.write.atomic_write", refuse)
    assert main(["report", "out"]) == 5
    assert "add --json to have it on standard output" in capsys.readouterr().err


def test_verify_finds_nothing_wrong(job: Path, capsys: Captured) -> None:
    assert main(["verify", "out"]) == 0
    assert capsys.readouterr().out == "out: 5 rows in 1 part, nothing is wrong\n"


def test_verify_finds_a_damaged_part(job: Path, capsys: Captured) -> None:
    part = Path("out/data/part-000000.parquet")
    data = bytearray(part.read_bytes())
    data[100] ^= 1
    part.write_bytes(data)
    assert main(["verify", "out", "--json"]) == 8
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    assert "part-000000.parquet: its checksum is not the recorded one" in report["faults"][0]


def test_verify_does_without_input_and_model(job: Path, capsys: Captured) -> None:
    for name, note in (
        ("model", "the model was not compared"),
        ("rows.jsonl", "input and model were not compared"),
    ):
        Path(name).rename("away")
        try:
            assert main(["verify", "out"]) == 0
        finally:
            Path("away").rename(name)
        assert f"note: {note}: " in capsys.readouterr().out


@pytest.mark.parametrize("verb", ["status", "verify"])
def test_a_folder_without_a_job(job: Path, capsys: Captured, verb: str) -> None:
    assert main([verb, "model"]) == 2
    assert "model: no manifest.json, so this is not the output folder of a job" in capsys.readouterr().err
