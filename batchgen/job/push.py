"""`output.push_to_hub`: a complete output folder as one commit to a data set of the Hugging Face hub.

Called when a run has ended well. What was pushed is recorded in the folder, so that running the job again
does nothing, and a job that was killed before it pushed does. The token comes from HF_TOKEN and goes nowhere.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from batchgen.grammar import how_many
from batchgen.job.files import atomic_write
from batchgen.job.folder import JobFolder
from batchgen.job.parts import PartCommit, recognise_parts
from batchgen.job.spec.hub_target import HubTarget
from batchgen.types import StorageError, UsageError

TOKEN = "HF_TOKEN"
CARD = "README.md"


@dataclass(frozen=True, slots=True)
class Pushed:
    """What was pushed.

    Args:
        repo, path_in_repo, revision: where to.
        content: hash over names and checksums of the parts.
        files: names of the parts in the repository.
        commit: of the repository.
    """

    repo: str
    path_in_repo: str
    revision: str | None
    content: str
    files: Sequence[str]
    commit: str

    def goes_to(self, target: HubTarget) -> bool:
        """Whether it was pushed to this place."""
        place = target.repo, target.path_in_repo, target.revision
        return (self.repo, self.path_in_repo, self.revision) == place


def require_token() -> str:
    """The token of the environment. Raises UsageError where there is none."""
    token = os.environ.get(TOKEN, "").strip()
    if not token:
        raise UsageError(
            f"output.push_to_hub: the environment variable {TOKEN} holds no token; set it to one that may "
            "write to the data set, or remove output.push_to_hub"
        )
    return token


def push_folder(root: Path, target: HubTarget, format: str, say: Callable[[str], None]) -> Pushed:
    """Push the parts of a complete folder, unless they are there already.

    Args:
        root: the output folder.
        target: where to.
        format: of the parts.
        say: gets a sentence.

    Raises:
        UsageError: there is no token.
        StorageError: the hub refused or could not be reached; the folder is complete all the same.
    """
    folder = JobFolder(root)
    parts = [commit for commit in recognise_parts(folder).values() if commit.rows]
    content = _content(parts)
    last = read_pushed(folder)
    if last is not None and last.goes_to(target) and last.content == content:
        say(f"already pushed to the data set {target.repo}, commit {last.commit}")
        return last
    token = require_token()
    files = [f"{target.path_in_repo}/{commit.file}" for commit in parts]
    gone = set(last.files) - set(files) if last is not None and last.goes_to(target) else set()
    try:
        commit = _commit(folder, target, token, dict(zip(files, parts, strict=True)), sorted(gone), format)
    except Exception as error:
        # What the client lets through depends on its HTTP library, which changed with its versions.
        raise StorageError(
            f"output.push_to_hub: {target.repo}: {_said(error, token)}; all results are in {folder.data}, "
            "and running the same command again pushes them"
        ) from error
    pushed = Pushed(target.repo, target.path_in_repo, target.revision, content, files, commit)
    atomic_write(_record(folder), json.dumps(asdict(pushed), indent=1).encode())
    say(f"pushed {how_many(len(files), 'file')} to the data set {target.repo}, commit {commit}")
    return pushed


def read_pushed(folder: JobFolder) -> Pushed | None:
    """What the folder says was pushed last; None for nothing, or where the record cannot be read."""
    try:
        return Pushed(**json.loads(_record(folder).read_bytes()))
    except (OSError, ValueError, TypeError):
        return None


def _record(folder: JobFolder) -> Path:
    return folder.internal / "pushed.json"


def _content(parts: Sequence[PartCommit]) -> str:
    return sha256(json.dumps([[part.file, part.digest] for part in parts]).encode()).hexdigest()


def _commit(
    folder: JobFolder,
    target: HubTarget,
    token: str,
    files: dict[str, PartCommit],
    gone: Sequence[str],
    format: str,
) -> str:
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, HfApi
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()
    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"), token=token, library_name="batchgen")
    api.create_repo(target.repo, repo_type="dataset", private=target.private, exist_ok=True)
    place: dict[str, Any] = {"repo_id": target.repo, "repo_type": "dataset", "revision": target.revision}
    operations: list[Any] = [
        CommitOperationAdd(path_in_repo=name, path_or_fileobj=str(folder.data / part.file))
        for name, part in files.items()
    ]
    operations += [
        CommitOperationDelete(path_in_repo=name) for name in gone if api.file_exists(filename=name, **place)
    ]
    if not api.file_exists(filename=CARD, **place):
        card = _card(target, format).encode()
        operations.append(CommitOperationAdd(path_in_repo=CARD, path_or_fileobj=card))
    rows = sum(part.rows for part in files.values())
    message = f"Results of a batchgen job: {how_many(rows, 'row')}"
    return str(api.create_commit(operations=operations, commit_message=message, **place).oid)


def _card(target: HubTarget, format: str) -> str:
    """So that `datasets.load_dataset` finds the parts, and nothing else, by itself."""
    pattern = f"{target.path_in_repo}/part-*.{'parquet' if format == 'parquet' else 'jsonl*'}"
    return (
        "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: train\n"
        f"    path: {json.dumps(pattern)}\n---\n\n# {target.repo.partition('/')[2]}\n\n"
        "Made with batchgen. Each row has `status`, and `error` where it has no result.\n"
    )


def _said(error: BaseException, token: str) -> str:
    """What the hub or the network said, in one line and without the token."""
    text = " ".join((str(error) or type(error).__name__).split())
    return text.replace(token, "***")[:300]
