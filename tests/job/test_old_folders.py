"""Folders written by earlier versions are continued and verified, or the reason why not is told."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from job_driver import run_here, setup_of
from job_inputs import data_bytes
from old_folders import DATA, settings_of

from batchgen.job import manifest
from batchgen.job.folder import JobFolder
from batchgen.job.manifest import FORMAT, UPGRADES, checksum, load_manifest
from batchgen.job.status import read_status
from batchgen.job.verify import verify_folder
from batchgen.types import UsageError


def test_every_format_has_a_folder_and_a_way_to_the_present() -> None:
    assert sorted(path.name for path in DATA.iterdir()) == [f"format-{n}" for n in range(1, FORMAT + 1)]
    assert sorted(UPGRADES) == list(range(1, FORMAT))


@pytest.mark.parametrize("number", range(1, FORMAT + 1))
def test_a_folder_of_an_earlier_version_is_continued_and_verified(tmp_path: Path, number: int) -> None:
    shutil.copytree(DATA / f"format-{number}", tmp_path / "job")
    settings = settings_of(tmp_path / "job")
    found = read_status(tmp_path / "job/out")
    assert found.state in ("failed", "dead")
    assert 20 <= found.rows_done < 40
    said: list[str] = []
    assert run_here(settings, said).exit_code == 0
    assert not any("torn or damaged" in s or "quarantine" in s for s in said)
    setup = setup_of(settings)
    report = verify_folder(tmp_path / "job/out", setup.inputs, setup.fingerprints)
    setup.inputs.close()
    assert report.faults == []
    assert any(note.startswith("1 row: retry of 1 row") for note in report.notes)
    calm = settings_of(tmp_path / "job")
    calm.output = str(tmp_path / "calm")
    run_here(calm)
    assert data_bytes(tmp_path / "calm") == data_bytes(tmp_path / "job/out")


def rewrite(folder: JobFolder, **changes: object) -> None:
    data = {**json.loads(folder.manifest.read_text()), **changes}
    del data["checksum"]
    folder.manifest.write_text(json.dumps({**data, "checksum": checksum(data)}))


def test_a_later_format_is_refused_and_an_earlier_one_upgraded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(DATA / f"format-{FORMAT}", tmp_path / "job")
    folder = JobFolder(tmp_path / "job/out")
    rewrite(folder, format=FORMAT + 1, batchgen="9.9")
    with pytest.raises(
        UsageError, match=rf"written by batchgen 9\.9 in format {FORMAT + 1}, and this version"
    ):
        load_manifest(folder)
    rewrite(folder, format=FORMAT, part_rows_of_old=10)
    monkeypatch.setattr(manifest, "FORMAT", FORMAT + 1)
    monkeypatch.setitem(
        UPGRADES,
        FORMAT,
        lambda old: {**{k: v for k, v in old.items() if k != "part_rows_of_old"}, "format": FORMAT + 1},
    )
    upgraded = load_manifest(folder)
    assert upgraded is not None
    assert upgraded.format == FORMAT + 1
