"""Data sets on the Hugging Face hub: `hf://datasets/ORG/NAME[@REVISION][/PATH]`. For `find_files`.

A branch or tag is resolved to its commit first, so that all files of a job come from one state of the
repository. A bare data set stands for the files of its train split.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePosixPath

from batchgen.data.remote import RemoteFile, find_remote, list_folder, with_retries
from batchgen.types import UsageError

_HF_URL = re.compile(
    r"hf://datasets/(?P<repo>[^/@]+/[^/@]+)"
    r"(?:@(?P<revision>refs/(?:convert|pr)/[^/]+|[^/]+))?(?:/(?P<path>.*))?"
)
_SUFFIXES = (".parquet", ".jsonl", ".json", ".csv", ".tsv")
_COMPRESSED = (".gz", ".bz2", ".zst")
_TRAIN = re.compile(r"(?<![A-Za-z0-9])train(?![A-Za-z0-9])")
_SHOWN_FILES = 20


def find_on_hub(url: str) -> list[RemoteFile]:
    """The files that a URL of the hub names, with the commit they are read at.

    Raises:
        UsageError: not the URL of a data set, or a bare one whose train split is not plain to see.
        InputError: there is no such data set, revision or file, or the hub cannot be reached.
    """
    found = _HF_URL.fullmatch(url)
    if found is None:
        raise UsageError(
            f"input.path: {url} is not a data set of the hub; write hf://datasets/ORG/NAME[@REVISION][/PATH]"
        )
    repo, revision, path = found["repo"], found["revision"], (found["path"] or "").strip("/")
    commit = _commit(repo, revision, url)
    pinned = f"hf://datasets/{repo}@{commit}/"
    shown = f"hf://datasets/{repo}{'' if revision is None else '@' + revision}/"
    paths = [path] if path else _train_files(pinned, url)
    files = [file for path in paths for file in find_remote(pinned + path)]
    return [replace(file, shown=shown + _path_in_repo(file.url), commit=commit) for file in files]


def _path_in_repo(url: str) -> str:
    found = _HF_URL.fullmatch(url)
    return url if found is None else found["path"]


def _commit(repo: str, revision: str | None, url: str) -> str:
    from huggingface_hub import HfApi

    api = HfApi(endpoint=os.environ.get("HF_ENDPOINT"))
    info = with_retries(lambda: api.dataset_info(repo, revision=revision), url)
    return str(info.sha)


def _train_files(pinned: str, url: str) -> list[str]:
    """Paths in the repository: of the train split, of the first kind of file in `_SUFFIXES` that it has."""
    paths = [_path_in_repo(found) for found in list_folder(pinned)]
    data = [path for path in paths if _suffix(path) in _SUFFIXES]
    for suffix in _SUFFIXES:
        train = [path for path in data if _suffix(path) == suffix and _TRAIN.search(path)]
        if len({str(PurePosixPath(path).parent) for path in train}) == 1:
            return train
        if train:
            raise UsageError(_choose(url, train, "has train files in several folders"))
    raise UsageError(_choose(url, data, "has no files of a train split"))


def _suffix(path: str) -> str:
    pure = PurePosixPath(path.lower())
    return (pure.with_suffix("") if pure.suffix in _COMPRESSED else pure).suffix


def _choose(url: str, paths: Sequence[str], problem: str) -> str:
    shown = ", ".join(paths[:_SHOWN_FILES]) or "no data files"
    more = f" and {len(paths) - _SHOWN_FILES} more" if len(paths) > _SHOWN_FILES else ""
    return f"input.path: {url} {problem}; name files, such as {url}/PATH/*.parquet; it has {shown}{more}"
