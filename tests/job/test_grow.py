"""`input.grow: append`: an input that is longer than it was is taken in; any other change is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from job_driver import Settings
from job_inputs import data_bytes, read_output
from test_selection_machine import run

from batchgen.data.fingerprint import compare_inputs
from batchgen.data.source import open_input
from batchgen.job.verify import verify_folder
from batchgen.types import DriftError


def lines(first: int, stop: int) -> str:
    return "".join(json.dumps({"prompt": f"p{i}", "id": f"i{i % 7}"}) + "\n" for i in range(first, stop))


def job(tmp_path: Path, **changes: Any) -> Settings:
    (tmp_path / "a.jsonl").write_text(lines(0, 10))
    (tmp_path / "b.jsonl").write_text(lines(10, 14))
    given: dict[str, Any] = {"part_rows": 4, "duplicate_ids": "suffix", "grow": "append", **changes}
    return Settings(output=str(tmp_path / "out"), input=str(tmp_path / "*.jsonl"), **given)


def check(settings: Settings, rows: int) -> None:
    """Every row once, and the bytes are those of a job that saw it all at once."""
    out = Path(settings.output)
    assert [row["row"] for row in read_output(out)] == list(range(rows))
    once = Settings(**{**vars(settings), "output": str(out.with_name(f"once-{rows}"))})
    run(once)
    assert data_bytes(out) == data_bytes(Path(once.output))
    with open_input([settings.input]) as inputs:
        assert verify_folder(out, inputs).faults == []


def test_rows_at_the_end_are_taken_in(tmp_path: Path) -> None:
    settings = job(tmp_path)
    run(settings)
    with (tmp_path / "b.jsonl").open("a") as file:
        file.write(lines(14, 17))
    assert sorted(run(settings)) == [14, 15, 16]
    check(settings, 17)
    (tmp_path / "c.jsonl").write_text(lines(17, 25))
    assert sorted(run(settings)) == list(range(17, 25))
    check(settings, 25)
    assert run(settings) == []


def test_it_must_be_asked_for(tmp_path: Path) -> None:
    settings = job(tmp_path, grow="refuse")
    run(settings)
    (tmp_path / "c.jsonl").write_text(lines(14, 15))
    with pytest.raises(DriftError, match=r"c\.jsonl: was not in the input\n.*set input\.grow: append"):
        run(settings)


@pytest.mark.parametrize("change", ["middle", "front", "rewritten", "joined line", "shorter"])
def test_any_other_change_is_refused(tmp_path: Path, change: str) -> None:
    settings = job(tmp_path)
    (tmp_path / "b.jsonl").write_text(lines(10, 14).removesuffix("\n"))
    run(settings)
    match change:
        case "middle":
            (tmp_path / "a.jsonl").write_text(lines(0, 12))
        case "front":
            (tmp_path / "0.jsonl").write_text(lines(0, 1))
        case "rewritten":
            (tmp_path / "b.jsonl").write_text(lines(20, 26))
        case "joined line":
            (tmp_path / "b.jsonl").write_text(lines(10, 14).removesuffix("\n") + "  " + lines(14, 15))
        case "shorter":
            (tmp_path / "b.jsonl").write_text(lines(10, 12))
    before = data_bytes(tmp_path / "out")
    with pytest.raises(DriftError, match="belongs to a job that differs"):
        run(settings)
    assert data_bytes(tmp_path / "out") == before
    assert (tmp_path / "out/_SUCCESS").exists()


def test_what_growth_is() -> None:
    def inputs(*sizes: int, format: str = "jsonl", compression: str = "none") -> dict[str, Any]:
        files = [
            {"path": f"{i}", "compression": compression, "size": size, "mtime_ns": 1, "footer": None}
            for i, size in enumerate(sizes)
        ]
        return {"version": 1, "format": format, "files": files}

    assert compare_inputs(inputs(1, 2), inputs(1, 2, 3)).grown
    assert compare_inputs(inputs(1, 2), inputs(1, 5, 3)).grown
    assert not compare_inputs(inputs(1, 2), inputs(1, 2)).grown
    assert not compare_inputs(inputs(1, 2), inputs(5, 2, 3)).grown
    assert not compare_inputs(inputs(1, 2), inputs(1, 1, 3)).grown
    assert not compare_inputs(inputs(1), inputs(5, compression="gzip")).grown
    assert compare_inputs(inputs(1, format="parquet"), inputs(1, 2, format="parquet")).grown
    assert not compare_inputs(inputs(1, format="parquet"), inputs(2, format="parquet")).grown
