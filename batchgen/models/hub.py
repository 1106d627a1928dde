"""Snapshots of models on the Hugging Face hub, or a server that speaks like it. Called by `source.py`.

A branch or tag is resolved to a commit once; everything after that asks for the commit, so that a branch that
moves in between mixes nothing. Where the hub cannot be reached, what the local cache holds is used.
`HF_ENDPOINT`, `HF_HOME`, `HF_TOKEN` and `HF_HUB_OFFLINE` are those of huggingface_hub.
"""

from __future__ import annotations

import glob
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from batchgen.models.weights import weight_files
from batchgen.types import UsageError

METADATA = ("*.json", "*.model", "*.jinja", "tokenizer*", "merges.txt", "vocab*", "*.tiktoken")
"""Configuration and tokenizer. Weights match none of these; the index of their files does."""
_DEEPER = ("[!1]*/*", "1[!_]*/*")
"""Folders of other formats, that is all but 1_Pooling, where sentence-transformers says how to pool."""
_TEMPLATES = "additional_chat_templates/"
_COMMIT = re.compile(r"[0-9a-f]{40}")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One commit of a repository.

    Args:
        repo: its name.
        commit: 40 hexadecimal digits.
        folder: in the local cache; holds what was fetched so far.
        names: files of the repository; None where the hub was not or could not be asked.
    """

    repo: str
    commit: str
    folder: Path
    names: tuple[str, ...] | None


def is_commit(revision: str | None) -> bool:
    """Whether a revision can never mean anything else."""
    return revision is not None and _COMMIT.fullmatch(revision) is not None


def find_snapshot(repo: str, revision: str | None, key: str) -> Snapshot:
    """Resolve a revision and fetch configuration and tokenizer, but no weights.

    Args:
        repo: such as `org/name`.
        revision: branch, tag or commit; None is the main branch.
        key: of the job file, which names the repository; for messages.

    Raises:
        UsageError: there is none, or neither the hub nor the cache can give it.
    """
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError, RevisionNotFoundError

    if is_commit(revision):
        # A commit never changes, so that a job which is continued needs no hub.
        folder = _cached(repo, revision)
        if folder is not None and _whole(folder):
            return Snapshot(repo, folder.name, folder, None)
    try:
        with _no_progress_bar():
            folder = _download(repo, revision, allow_patterns=[*METADATA], ignore_patterns=[*_DEEPER])
    except RevisionNotFoundError as error:
        raise UsageError(
            f"model.revision: {repo} has no branch, tag or commit {revision!r}; check it on the model's page"
        ) from error
    except GatedRepoError as error:
        raise UsageError(
            f"{key}: {repo} asks for consent before it can be downloaded; accept its terms on its page, "
            "then log in with `hf auth login` or set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise UsageError(
            f"{key}: there is neither a folder {repo} here nor a model of that name on the hub that you may "
            "read; check the name, or log in with `hf auth login` if it is private"
        ) from error
    except Exception as error:
        folder = _cached(repo, revision)
        if folder is None:
            _unreachable(repo, key, error)
    return _with_names(Snapshot(repo, folder.name, folder, None), key)


def _with_names(snapshot: Snapshot, key: str) -> Snapshot:
    """The snapshot with the names of its files, where the hub tells them, and with all its chat templates."""
    from huggingface_hub import HfApi

    try:
        names = HfApi().list_repo_files(snapshot.repo, revision=snapshot.commit)
    except Exception:
        # Offline, or a hub that does not answer: what the cache holds must do.
        return snapshot
    with _no_progress_bar():
        fetch_files(snapshot, [name for name in names if name.startswith(_TEMPLATES)], key)
    return replace(snapshot, names=tuple(names))


def fetch_files(snapshot: Snapshot, names: Sequence[str], key: str) -> None:
    """Bring files of a snapshot into its folder, those that are not there yet.

    Raises:
        UsageError: they cannot be had.
    """
    missing = [name for name in names if not (snapshot.folder / name).exists()]
    if not missing:
        return
    try:
        _download(snapshot.repo, snapshot.commit, allow_patterns=[glob.escape(name) for name in missing])
    except Exception as error:
        _unreachable(snapshot.repo, key, error)


def _download(repo: str, revision: str | None, **options: Any) -> Path:
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(repo, revision=revision, **options))


@contextmanager
def _no_progress_bar() -> Iterator[None]:
    """Configuration and tokenizer are there at once."""
    from huggingface_hub.utils import (  # type: ignore[attr-defined]
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    disabled = are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if not disabled:
            enable_progress_bars()


def _cached(repo: str, revision: str | None) -> Path | None:
    """The folder of a snapshot that the cache holds, perhaps not whole; None if it holds nothing of it."""
    try:
        folder = _download(repo, revision, allow_patterns=["config.json"], local_files_only=True)
    except Exception:
        # Its client raises many things for "not in the cache"; the hub is asked next.
        return None
    return folder if any(folder.iterdir()) else None


def _whole(folder: Path) -> bool:
    try:
        return bool(weight_files(folder, True, ""))
    except UsageError:
        return False


def _unreachable(repo: str, key: str, error: Exception) -> NoReturn:
    why = (str(error).strip() or "no reason given").splitlines()[0][:200]
    raise UsageError(
        f"{key}: {repo} is not a local folder, is not in the cache, and could not be had from the hub "
        f"({type(error).__name__}: {why}); download it where there is a network, or give a folder"
    ) from error
