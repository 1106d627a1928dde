"""The place of each test of the hard cases."""

from __future__ import annotations

from pathlib import Path

import pytest
from job_place import Place


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)
