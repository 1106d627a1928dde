"""What an output folder says of the run that would continue it. For `plan`; reads only."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from batchgen.job.attempts import read_attempts
from batchgen.job.drift import find_drift
from batchgen.job.fingerprints import Fingerprints
from batchgen.job.folder import JobFolder
from batchgen.job.manifest import load_manifest
from batchgen.job.parts import Counts, recognise_parts
from batchgen.job.progress import read_progress
from batchgen.job.status import read_status


@dataclass(slots=True)
class FolderOutlook:
    """A folder that holds a job already.

    Args:
        state: as `status` says.
        rows_done: that are final or in the journal.
        rows_input: of the whole input, where an earlier attempt has read it to its end.
        differences: of the job from the folder's, that block.
        max_model_len: pinned by the first attempt.
        output_tokens_per_row, bytes_per_row: means of what is there; None where nothing is.
        tokens_per_second: prompt and output tokens of earlier attempts over their working time.
    """

    state: str
    rows_done: int
    rows_input: int | None
    differences: list[str] = field(default_factory=list)
    max_model_len: int | None = None
    output_tokens_per_row: float | None = None
    bytes_per_row: float | None = None
    tokens_per_second: float | None = None


def look_at_folder(root: Path, fingerprints: Fingerprints | None) -> FolderOutlook | None:
    """What a resume would find; None where the folder holds no job.

    Args:
        root: the output folder.
        fingerprints: of the job as it is now; None where they cannot be known without the weights.

    Raises:
        UsageError, StorageError: it cannot be read.
    """
    from batchgen.job.index import InputIndex

    folder = JobFolder(root)
    manifest = load_manifest(folder)
    if manifest is None:
        return None
    status = read_status(root)
    counts, size = Counts(), 0
    for commit in recognise_parts(folder).values():
        counts.add(commit.counts)
        size += commit.bytes
    drift = None if fingerprints is None else find_drift(manifest.fingerprints, fingerprints, manifest.pinned)
    return FolderOutlook(
        state=status.state,
        rows_done=status.rows_done,
        rows_input=InputIndex(folder).end,
        differences=[] if drift is None else drift.differences,
        max_model_len=manifest.pinned.get("max_model_len"),
        output_tokens_per_row=counts.completion_tokens / counts.ok if counts.ok else None,
        bytes_per_row=size / counts.rows if counts.rows else None,
        tokens_per_second=_speed(folder),
    )


def _speed(folder: JobFolder) -> float | None:
    tokens, seconds = 0, 0.0
    for attempt in read_attempts(folder):
        progress = read_progress(folder, attempt.number)
        if progress is not None:
            tokens, seconds = tokens + progress.tokens, seconds + progress.working_seconds
    return tokens / seconds if seconds > 0 and tokens else None
