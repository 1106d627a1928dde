"""A job that is not quite the one its folder belongs to: refused, recognised, or accepted and recorded."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from fake_engine import answer, prompt_ids, text_of
from job_driver import Settings, run_here, setup_of
from job_inputs import data_bytes, read_output, write_jsonl, write_parquet

from batchgen.job.attempts import read_attempts
from batchgen.job.folder import JobFolder
from batchgen.job.manifest import require_manifest
from batchgen.job.parts import recognise_parts
from batchgen.job.status import read_status
from batchgen.job.verify import verify_folder
from batchgen.types import DriftError, InputError


def fatal(after_tokens: int) -> dict[str, Any]:
    """An engine that ends the run after so many tokens."""
    fault = {"do": "fatal", "after_tokens": after_tokens, "exit_code": 3, "message": "the card fell out"}
    return {"faults": [fault]}


FATAL = fatal(300)


def begun(tmp_path: Path, **changes: Any) -> Settings:
    """A job of 60 rows that ended half-way, with some parts, some rows in the journal, some begun."""
    path = tmp_path / "in.jsonl"
    if not path.exists():
        write_jsonl(path, 60)
    settings = Settings(output=str(tmp_path / "out"), input=str(path), limit=20, **changes)
    run_here(settings)
    settings.limit, settings.worker = None, FATAL
    with pytest.raises(InputError, match="the card fell out"):
        run_here(settings)
    settings.worker = {}
    return settings


@pytest.fixture
def calm(tmp_path: Path) -> dict[str, bytes]:
    """The data/ of the job when nothing happens to it."""
    path = write_jsonl(tmp_path / "in.jsonl", 60)
    run_here(Settings(output=str(tmp_path / "calm"), input=str(path)))
    return data_bytes(tmp_path / "calm")


def accepting(settings: Settings, said: list[str] | None = None) -> Any:
    settings.options = {"accept_drift": True}
    return run_here(settings, said)


def seeds_used(settings: Settings) -> dict[int, int]:
    """By which of the seeds 1 and 2 each row was computed."""
    used = {}
    for r in read_output(Path(settings.output)):
        if r["status"] == "ok":
            prompt = prompt_ids(f"prompt {r['row']}")
            texts = {text_of(answer(seed, r["row"], prompt, settings.max_tokens)): seed for seed in (1, 2)}
            used[r["row"]] = texts[r["generated_text"]]
    return used


def test_accepted_drift_keeps_finished_rows_and_is_recorded(tmp_path: Path) -> None:
    settings = begun(tmp_path)
    settings.temperature, settings.seed = 0.5, 2
    with pytest.raises(DriftError, match=r"sampling.temperature\n    - 0.0\n    \+ 0.5\n.*--accept-drift"):
        run_here(settings)
    said: list[str] = []
    assert accepting(settings, said).exit_code == 0
    assert any("accepted drift, by " in s and "+ 0.5" in s for s in said)
    used = seeds_used(settings)
    assert set(used.values()) == {1, 2}
    folder = JobFolder(Path(settings.output))
    recorded = {
        row
        for commit in recognise_parts(folder).values()
        for first, count, number in commit.settings
        for row in range(first, first + count)
        if number == 1
    }
    assert recorded == {row for row, seed in used.items() if seed == 2}
    report = verify_folder(folder.root, None, setup_of(settings).fingerprints)
    assert report.faults == []
    assert any(note.startswith(f"{len(recorded)} rows: accepted drift") for note in report.notes)
    assert any("rows: accepted drift, by " in message for message in read_status(folder.root).messages)
    assert [a.change for a in read_attempts(folder)] == [0, 0, 1]
    settings.options = {}
    assert "already complete" in run_here(settings).reason
    settings.temperature = 0.0
    with pytest.raises(DriftError):
        run_here(settings)


def test_a_second_drift_has_a_number_of_its_own(tmp_path: Path) -> None:
    settings = begun(tmp_path)
    settings.temperature, settings.worker = 0.5, fatal(20)
    with pytest.raises(InputError):
        accepting(settings)
    settings.temperature, settings.worker = 0.7, {}
    accepting(settings)
    folder = JobFolder(Path(settings.output))
    assert [c.differences[0].split()[-1] for c in require_manifest(folder).changes] == ["0.5", "0.7"]
    assert verify_folder(folder.root).ok


def test_an_accepted_model_pins_its_own_choices(tmp_path: Path) -> None:
    settings = begun(tmp_path)
    settings.weights = {"model.safetensors": "other"}
    settings.worker = {"pinned": {"dtype": "bfloat16"}}
    accepting(settings)
    manifest = require_manifest(JobFolder(Path(settings.output)))
    assert manifest.pinned["dtype"] == "bfloat16"
    assert manifest.changes[0].pinned_before


def test_the_look_of_the_output_cannot_drift(tmp_path: Path) -> None:
    settings = begun(tmp_path)
    settings.layout = {"format": "csv"}
    with pytest.raises(DriftError, match=r"output.format\n.*\n.*\n--accept-drift cannot mix these"):
        accepting(settings)


def test_a_touched_input_is_the_same_input(tmp_path: Path, calm: dict[str, bytes]) -> None:
    settings = begun(tmp_path)
    os.utime(settings.input, ns=(1, 1))
    said: list[str] = []
    assert run_here(settings, said).exit_code == 0
    assert any("written again since this job began; comparing" in s for s in said)
    assert data_bytes(Path(settings.output)) == calm
    os.utime(settings.input, ns=(2, 2))
    assert run_here(settings).exit_code == 0
    assert "already complete" in run_here(settings).reason


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_a_project_is_continued_where_it_was_copied_to(tmp_path: Path, kind: str) -> None:
    home = tmp_path / "home"
    home.mkdir()
    path = (write_jsonl if kind == "jsonl" else write_parquet)(home / f"in.{kind}", 60)
    settings = Settings(output=str(home / "out"), input=str(path), worker=FATAL)
    with pytest.raises(InputError):
        run_here(settings)
    away = tmp_path / "away"
    shutil.copytree(home, away, copy_function=shutil.copyfile)
    settings.worker = {}
    run_here(settings)
    settings.output, settings.input = str(away / "out"), str(away / path.name)
    assert run_here(settings).exit_code == 0
    assert data_bytes(away / "out") == data_bytes(home / "out")
    assert verify_folder(away / "out", None, setup_of(settings).fingerprints).ok


def test_a_change_of_the_same_size_is_found_before_anything_runs(tmp_path: Path) -> None:
    settings = begun(tmp_path)
    path = Path(settings.input)
    content = path.read_bytes()
    path.write_bytes(content.replace(b'"prompt 3"', b'"prompt E"'))
    with pytest.raises(DriftError, match=r"in.jsonl: rows 0 to 9 are not what they were"):
        run_here(settings)
    path.write_bytes(content)
    assert run_here(settings).exit_code == 0


def test_a_renamed_input_is_another_input(tmp_path: Path) -> None:
    """Ids are made of the name where no column holds them."""
    settings = begun(tmp_path)
    shutil.copy2(settings.input, tmp_path / "other.jsonl")
    settings.input = str(tmp_path / "other.jsonl")
    with pytest.raises(DriftError, match="no longer in the input"):
        run_here(settings)


def test_a_corrected_row_behind_the_finished_ones_is_accepted(tmp_path: Path) -> None:
    settings = begun(tmp_path)
    path = Path(settings.input)
    path.write_text(path.read_text().replace('{"prompt": "broken 50\n', '{"prompt": "prompt 50", "n": 50}\n'))
    with pytest.raises(DriftError, match="size was"):
        run_here(settings)
    assert accepting(settings).exit_code == 0
    rows = read_output(Path(settings.output))
    assert [r["row"] for r in rows] == list(range(60))
    assert [r["row"] for r in rows if r["status"] == "error"] == [16, 33]
    assert rows[50]["generated_text"] == text_of(answer(1, 50, prompt_ids("prompt 50"), settings.max_tokens))
    setup = setup_of(settings)
    report = verify_folder(Path(settings.output), setup.inputs, setup.fingerprints)
    setup.inputs.close()
    assert report.faults == []


def test_a_change_of_finished_rows_is_not_accepted(tmp_path: Path) -> None:
    settings = begun(tmp_path)
    path = Path(settings.input)
    path.write_text(path.read_text().replace('"prompt 3"', '"prompt three"'))
    index = [p.read_bytes() for p in JobFolder(Path(settings.output)).index.iterdir()]
    with pytest.raises(DriftError, match="rows 0 to 9 are finished, and are not in the input any more"):
        accepting(settings)
    assert [p.read_bytes() for p in JobFolder(Path(settings.output)).index.iterdir()] == index
    assert json.loads((tmp_path / "out/manifest.json").read_text())["changes"] == []
