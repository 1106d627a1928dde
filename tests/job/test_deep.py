"""`verify --deep`: rows that are computed again and compared with what the folder holds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_engine import launcher
from job_driver import Settings, run_here, setup_of
from job_inputs import write_jsonl

from batchgen.job.deep import recompute
from batchgen.job.folder import JobFolder
from batchgen.job.manifest import require_manifest
from batchgen.job.run_options import JobSetup
from batchgen.job.verify import VerifyReport
from batchgen.types import EngineError


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """60 rows, of which 57 are ok; rows 20 and 21 were retried under another seed."""
    root = tmp_path_factory.mktemp("deep")
    settings = Settings(output=str(root / "out"), input=str(write_jsonl(root / "in.jsonl", 60)))
    run_here(settings)
    settings.seed, settings.retry = 2, {"where": "row=20:22", "temperature": 0.5}
    run_here(settings)
    settings.seed, settings.retry = 1, None
    return settings


def deep(settings: Settings, count: int, seed: int = 1, worker: dict[str, Any] | None = None) -> VerifyReport:
    report = VerifyReport(settings.output)
    opened: list[JobSetup] = []

    def configure(sets: Sequence[str]) -> JobSetup:
        retried = Settings(output=settings.output, input=settings.input, seed=2 if sets else settings.seed)
        opened.append(setup_of(retried))
        return opened[-1]

    try:
        recompute(Path(settings.output), count, configure, launcher(worker or {}), report, seed)
    finally:
        for setup in opened:
            setup.inputs.close()
    return report


def test_every_row_is_the_same_under_its_own_settings(complete: Settings) -> None:
    report = deep(complete, 100)
    assert report.faults == []
    assert "55 rows computed again, 55 of them the same" in report.notes
    assert "2 rows computed again, 2 of them the same" in report.notes


def test_rows_that_differ_are_named(complete: Settings) -> None:
    other = Settings(output=complete.output, input=complete.input, seed=3)
    report = deep(other, 3)
    assert len(report.faults) >= 3
    assert all(fault.startswith("row ") for fault in report.faults)
    assert any("the text differs from character 0 on: '" in fault for fault in report.faults)
    assert "3 rows computed again, 0 of them the same" in report.notes


def test_an_engine_that_fails_is_no_fault_of_the_folder(complete: Settings) -> None:
    with pytest.raises(EngineError, match=r"exit code 11; .*its last words:\s+the fake engine chokes"):
        deep(complete, 5, worker={"faults": [{"do": "exit", "at_start": True}]})


def test_another_machine_is_noted(complete: Settings) -> None:
    assert not any("differs from the first attempt" in note for note in deep(complete, 1).notes)
    folder = JobFolder(Path(complete.output))
    manifest = require_manifest(folder)
    manifest.facts = {**manifest.facts, "device": "abacus"}
    manifest.save(folder)
    notes = "\n".join(deep(complete, 1).notes)
    assert "what runs the model differs from the first attempt:" in notes
    assert "- 'abacus'" in notes
