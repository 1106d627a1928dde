"""`manifest.json`: what an output folder belongs to, and every choice that a resumed job must repeat."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import batchgen
from batchgen.job.changes import Change, latest_drift, now_text, of_epoch
from batchgen.job.files import OS_FILES, anyone, atomic_write, read_file, storage
from batchgen.job.folder import JobFolder
from batchgen.json_problem import json_problem
from batchgen.types import DriftError, StorageError, UsageError

FORMAT = 1
UPGRADES: dict[int, Callable[[dict[str, Any]], dict[str, Any]]] = {}
"""From a format to the next: what a manifest of that format says, as the next one says it.

A change that older versions would misread raises `FORMAT` and adds a function here. The other files
of a folder carry no number of their own: what reads them takes what was written under every format that this
table leads from, as `PartCommit.from_json` fills in fields that came later. A format that cannot be continued
raises a UsageError that says why. `tests/job/data` keeps a folder of each format.
"""


@dataclass(slots=True, kw_only=True)
class Manifest:
    """One job.

    Args:
        job_id: random; part of every journal checksum.
        fingerprints: `Fingerprints.to_dict()` of the first attempt.
        digests: SHA-256 of each fingerprint.
        output_plan: `OutputPlan.to_json()`.
        part_rows: rows in one part.
        compression: of the parts.
        duplicate_ids: `input.duplicate_ids`; once it is not `error`, what became of ids is in parts.
        limit, rows: `input.limit` and `input.rows` of the last attempt; None for all.
        pinned: numeric choices that the first worker reported; empty until then.
        facts: versions and devices that it reported.
        changes: retries and accepted drifts, in order.
        epochs: first epoch and number of the change that attempts from there on run under.
        commits: by `revision_name` of each model of the hub, the commit that it was when it was first used.
    """

    job_id: str
    fingerprints: Mapping[str, Any]
    digests: Mapping[str, str]
    output_plan: Mapping[str, Any]
    part_rows: int
    compression: str
    limit: int | None
    rows: str | None = None
    duplicate_ids: str = "error"
    pinned: Mapping[str, Any] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    epochs: list[Sequence[int]] = field(default_factory=list)
    commits: dict[str, str] = field(default_factory=dict)
    created: str = field(default_factory=now_text)
    batchgen: str = batchgen.__version__
    format: int = FORMAT

    @staticmethod
    def new_id() -> str:
        return uuid.uuid4().hex

    @property
    def has_where(self) -> bool:
        """Whether the number of selected rows is only known when all have been looked at."""
        return self.fingerprints["input"].get("where") is not None

    @property
    def open_retry(self) -> tuple[int, Change] | None:
        """Number and record of the retry that goes on."""
        number = len(self.changes)
        return (number, self.changes[-1]) if number and self.changes[-1].open else None

    def current_change(self) -> int:
        """Number of the change that rows are computed under now."""
        retry = self.open_retry
        return retry[0] if retry is not None else latest_drift(self.changes)

    def enter(self, epoch: int) -> int:
        """Note under which change the attempt `epoch` runs; returns its number."""
        now = self.current_change()
        if of_epoch(self.epochs, epoch) != now:
            self.epochs.append((epoch, now))
        return now

    def require_duplicate_ids(self, now: str, folder: JobFolder) -> None:
        """Raises DriftError where parts hold ids that another `input.duplicate_ids` has made."""
        if self.duplicate_ids not in (now, "error"):
            raise DriftError(
                f"{folder.root}: parts were written with input.duplicate_ids: {self.duplicate_ids}, and it "
                f"is {now} now; set it back, choose another output.path, or start over with --overwrite"
            )

    def save(self, folder: JobFolder, still_owner: Callable[[], None] = anyone) -> None:
        """Replace `manifest.json`. Raises StorageError, and whatever `still_owner` raises."""
        data = asdict(self)
        text = json.dumps({**data, "checksum": checksum(data)}, indent=1, ensure_ascii=False)
        atomic_write(folder.manifest, text.encode(errors="surrogatepass"), OS_FILES, still_owner)


def checksum(data: Mapping[str, Any]) -> str:
    """SHA-256 of everything else in the file, as canonical JSON."""
    text = json.dumps(data, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def revision_name(path: str, revision: str | None) -> str:
    """A model of the hub as a job names it."""
    return path if revision is None else f"{path}@{revision}"


def require_manifest(folder: JobFolder) -> Manifest:
    """The manifest of a folder that must be a job's. Raises UsageError where there is none."""
    manifest = load_manifest(folder)
    if manifest is None:
        raise UsageError(
            f"{folder.root}: no manifest.json, so this is not the output folder of a job; check the path"
        )
    return manifest


def load_manifest(folder: JobFolder) -> Manifest | None:
    """The manifest of a folder; None where there is none.

    Raises:
        UsageError: it was written by a version whose format this one does not know.
        StorageError: it is unreadable.
    """
    try:
        with storage(folder.manifest, action="read"):
            data = json.loads(read_file(OS_FILES, folder.manifest).decode(errors="surrogatepass"))
    except StorageError as error:
        if isinstance(error.__cause__, FileNotFoundError | NotADirectoryError):
            return None
        raise
    except ValueError as error:
        raise StorageError(
            f"{folder.manifest}: not a manifest ({json_problem(error)}); restore it from a copy, or start "
            "over with --overwrite"
        ) from error
    if not isinstance(data, dict) or not isinstance(data.get("format"), int):
        raise StorageError(
            f"{folder.manifest}: not a manifest; restore it from a copy, or start over with --overwrite"
        )
    if data["format"] > FORMAT:
        raise UsageError(
            f"{folder.manifest}: written by batchgen {data.get('batchgen', 'unknown')} in format "
            f"{data['format']}, and this version ({batchgen.__version__}) reads formats up to {FORMAT}; use "
            "that version or a later one, or choose another output.path"
        )
    if data.pop("checksum", None) != checksum(data):
        raise StorageError(
            f"{folder.manifest}: damaged (its checksum does not match); restore it from a copy, or start "
            "over with --overwrite"
        )
    while data["format"] < FORMAT:
        data = UPGRADES[data["format"]](data)
    return Manifest(**{**data, "changes": [Change(**change) for change in data.get("changes", [])]})
