"""A complete folder becomes one commit on the hub, once, and a failure to push loses nothing."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hub_server import Hub
from job_driver import Settings, run_here
from job_inputs import data_bytes, write_jsonl

from batchgen.job.folder import JobFolder
from batchgen.job.push import read_pushed, require_token
from batchgen.types import UsageError

TOKEN = "hf_secret"
PUSH = (
    "import json, sys; from pathlib import Path; from batchgen.job.push import push_folder;"
    "from batchgen.job.spec.hub_target import HubTarget; from batchgen.types import BatchgenError\n"
    "try: push_folder(Path(sys.argv[1]), HubTarget(**json.loads(sys.argv[2])), sys.argv[3], print)\n"
    "except BatchgenError as error: print(error); sys.exit(error.exit_code)"
)


@pytest.fixture
def hub() -> Iterator[Hub]:
    server = Hub()
    yield server
    server.close()


@pytest.fixture(scope="module")
def complete(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("job")
    settings = Settings(
        output=str(root / "out"), input=str(write_jsonl(root / "in.jsonl", 25)), format="parquet"
    )
    assert run_here(settings).exit_code == 0
    return root / "out"


@pytest.fixture
def folder(complete: Path, tmp_path: Path) -> Path:
    shutil.copytree(complete, tmp_path / "out")
    return tmp_path / "out"


def push(hub: Hub, folder: Path, format: str = "parquet", **target: object) -> tuple[int, str]:
    """In a process of its own, because the client reads the environment when it is imported."""
    done = subprocess.run(
        [sys.executable, "-c", PUSH, str(folder), json.dumps({"repo": "org/set", **target}), format],
        env={
            **os.environ,
            "HF_TOKEN": TOKEN,
            "HF_ENDPOINT": hub.url,
            "HF_HUB_OFFLINE": "0",
            # Its storage protocol is a service of its own; without it the client speaks plain LFS.
            "HF_HUB_DISABLE_XET": "1",
            "PYTHONPATH": os.pathsep.join(filter(None, map(os.path.abspath, filter(None, sys.path)))),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout


def test_one_commit_once(hub: Hub, folder: Path) -> None:
    code, said = push(hub, folder)
    assert (code, said) == (0, f"pushed 3 files to the data set org/set, commit {1:040x}\n")
    parts = {f"data/{name}": content for name, content in data_bytes(folder).items()}
    card = hub.files.pop("README.md").decode()
    assert hub.files == parts
    assert 'path: "data/part-*.parquet"' in card
    assert len(hub.commits) == 1
    assert "private" in (hub.created[0].get("visibility"), *hub.created[0]), hub.created
    assert hub.tokens == {f"Bearer {TOKEN}"}
    assert push(hub, folder)[1] == f"already pushed to the data set org/set, commit {1:040x}\n"
    assert len(hub.commits) == 1
    recorded = b"".join(path.read_bytes() for path in folder.rglob("*") if path.is_file())
    assert TOKEN.encode() not in recorded


def test_a_refusal_is_told_and_the_next_run_pushes(hub: Hub, folder: Path) -> None:
    hub.refuse_commits = True
    code, said = push(hub, folder)
    assert code == 5
    assert "output.push_to_hub: org/set: " in said
    assert "all results are in" in said
    assert TOKEN not in said
    assert read_pushed(JobFolder(folder)) is None
    hub.refuse_commits = False
    assert push(hub, folder)[0] == 0
    assert len(hub.commits) == 1


def test_a_card_that_is_there_stays_and_parts_that_are_gone_go(hub: Hub, folder: Path) -> None:
    hub.files["README.md"] = b"mine"
    assert push(hub, folder, path_in_repo="runs/1", private=False)[0] == 0
    assert hub.files["README.md"] == b"mine"
    assert hub.created[0].get("visibility") != "private"
    assert set(hub.files) == {"README.md", *(f"runs/1/{name}" for name in data_bytes(folder))}
    (folder / "data/part-000002.parquet").unlink()
    assert push(hub, folder, path_in_repo="runs/1")[0] == 0
    assert sorted(hub.files) == ["README.md", "runs/1/part-000000.parquet", "runs/1/part-000001.parquet"]


def test_a_hub_that_is_not_there(hub: Hub, folder: Path) -> None:
    hub.close()
    code, said = push(hub, folder)
    assert (code, "running the same command again pushes them" in said) == (5, True)


def test_no_token_is_a_fault_of_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with pytest.raises(UsageError, match="the environment variable HF_TOKEN holds no token"):
        require_token()
