"""`output.push_to_hub` of a job file."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import AfterValidator

from batchgen.job.spec.section import Rule, Section
from batchgen.job.spec.values import Text

REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)
HUB = "null, a data set such as org/name, or a map of repo, private, path_in_repo and revision"


def _repository(value: str) -> str:
    if not REPOSITORY.fullmatch(value) or len(value) > 96 or "--" in value or ".." in value:
        raise ValueError("not the name of a data set")
    return value


def _path_in_repo(value: str) -> str:
    parts = value.split("/")
    if not value.isprintable() or any(part in ("", ".", "..") for part in parts):
        raise ValueError("not a relative path without . and ..")
    return value


class HubTarget(Section):
    """Where results are pushed when the job is complete: a data set of the Hugging Face hub."""

    repo: Annotated[str, AfterValidator(_repository), Rule("a data set such as org/name")]
    private: Annotated[bool, Rule("true or false")] = True
    path_in_repo: Annotated[Text, AfterValidator(_path_in_repo), Rule("a folder such as data")] = "data"
    revision: Annotated[Text | None, Rule("null or a branch that exists")] = None
