"""`retry`: compute failed rows of a complete folder anew. The `retry` verb calls it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from batchgen.api.job import JobResult, RunRequest, drive, setup_of
from batchgen.data.urls import is_url
from batchgen.job.condition import Condition
from batchgen.job.folder import JobFolder
from batchgen.job.load import Override, load_job
from batchgen.job.manifest import require_manifest
from batchgen.types import UsageError

if TYPE_CHECKING:
    from batchgen.api.checks import Prepared
    from batchgen.api.progress import Display
    from batchgen.job.run_options import JobSetup, Launcher
    from batchgen.job.spec.job import JobSpec

PLACES = ("input.path", "model.path", "model.tokenizer")
"""Where files lie now; what is in them is compared with what the folder belongs to."""

SECTIONS = ("sampling", "prompt", "engine", "run")


def retry(
    folder: str | Path,
    where: str | None = None,
    sets: Sequence[str] = (),
    *,
    display: Display | None = None,
    launch: Launcher | None = None,
) -> JobResult:
    """Compute rows of a complete output folder anew; all others stay as they are.

    The job is the one in the folder's job.resolved.yaml. A retry that was stopped is continued.

    Args:
        folder: the output folder, or the URL of one in an object store.
        where: which rows, see `batchgen.job.condition`; None: those that failed with a class that another
            attempt can change.
        sets: `section.key=value`: other settings for these rows, or where input and model lie now.
        display, launch: as of `Job.run`.

    Raises:
        BatchgenError: as of `Job.run`.
    """
    if where is not None:
        # Before anything is read or locked; what the output lacks is found when it is open.
        Condition.parse(where)
    places, changes = _split(sets)
    place = str(folder) if is_url(str(folder)) else str(Path(folder).absolute())
    with _at_hand(place) as here:
        resolved, begun = _begun(here)
        changes = changes or begun
        overrides = [f"output.path={place}", *places]
        base = load_job(resolved, overrides)
        changed = load_job(resolved, [*overrides, *changes])
    request = RunRequest(display=display, launch=launch)
    return drive(changed, lambda found: _setup(base, changed, found, where, changes), request)


def _at_hand(place: str) -> AbstractContextManager[Path]:
    """An output folder, or a copy of one in an object store."""
    if not is_url(place):
        return nullcontext(Path(place))
    from batchgen.job.remote import fetched

    return fetched(place)


def _split(sets: Sequence[str]) -> tuple[list[str], list[str]]:
    """Settings that say where files lie, and those for the retried rows. Raises UsageError for any other."""
    places, changes = [], []
    for text in sets:
        key = Override.parse(text).key
        if key in PLACES:
            places.append(text)
        elif key.partition(".")[0] in SECTIONS:
            changes.append(text)
        else:
            raise UsageError(
                f"--set {key}: a retry can change {', '.join(f'{name}.*' for name in SECTIONS)}, and say "
                f"with {', '.join(PLACES)} where files lie now; anything else would not fit the other rows"
            )
    return places, changes


def _begun(folder: Path) -> tuple[Path, list[str]]:
    """The job of the folder, and the settings of a retry that goes on."""
    job_folder = JobFolder(folder)
    manifest = require_manifest(job_folder)
    return job_folder.resolved_job, [] if manifest.open_retry is None else list(manifest.open_retry[1].sets)


def _setup(
    base: JobSpec, changed: JobSpec, found: Prepared, where: str | None, changes: Sequence[str]
) -> JobSetup:
    from batchgen.job.retry import Retry

    if base.samples != changed.samples:
        raise UsageError(
            f"--set sampling.n: {changed.sampling.n} is not allowed in a retry of a job with "
            f"n: {base.sampling.n}, as all rows of an output have one answer or all have lists of them; "
            f"use {'1' if base.samples is None else '2 or more'}"
        )
    ordinary = setup_of(base, found)
    retried = setup_of(changed, found)
    retry = Retry(where=where, sets=tuple(changes), result=retried.fingerprints.result)
    return replace(retried, fingerprints=ordinary.fingerprints, retry=retry)
