"""Job files for the tests of the loader."""

from __future__ import annotations

from pathlib import Path

import pytest
from job_files import Write


@pytest.fixture
def job_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Write a job file and make its folder the current one, so that messages name it `job.yaml`."""
    monkeypatch.chdir(tmp_path)

    def write(text: str) -> Path:
        Path("job.yaml").write_text(text, encoding="utf-8")
        return Path("job.yaml")

    return write
