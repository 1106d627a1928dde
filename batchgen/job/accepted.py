"""Settles the difference between a job and the folder that it continues: refuse it, look closer, or record
that the user accepted it. Called by recovery, before anything is written.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from typing import TYPE_CHECKING

from batchgen.grammar import counted
from batchgen.job.changes import DRIFT, Change
from batchgen.job.drift import Drift, find_drift, reread
from batchgen.job.ids import forget_ids
from batchgen.types import DriftError

if TYPE_CHECKING:
    from batchgen.data.source import InputSet
    from batchgen.job.folder import JobFolder
    from batchgen.job.index import InputIndex
    from batchgen.job.manifest import Manifest
    from batchgen.job.run_options import JobSetup


class _Every:
    """Contains every part."""

    def __contains__(self, part: object) -> bool:
        return True


def settle_drift(
    setup: JobSetup,
    folder: JobFolder,
    manifest: Manifest,
    index: InputIndex,
    committed: Container[int],
    epoch: int,
    say: Callable[[str], None],
    *,
    accept: bool,
) -> None:
    """Bring the manifest up to the job as it is now; the caller saves it.

    Args:
        setup: the job.
        folder: its output folder.
        manifest: of the folder.
        index: of the input as it was; forgets what changed behind the finished parts.
        committed: parts that are final.
        epoch: of this attempt.
        say: told of what was looked at, accepted, or differs and does not matter.
        accept: go on in spite of differences.

    Raises:
        DriftError: the job differs, and that was not accepted or cannot be.
        InputError: the input cannot be read.
    """
    drift = find_drift(manifest.fingerprints, setup.fingerprints, manifest.pinned)
    grows = bool(drift.growth) and setup.grow == "append"
    if grows:
        _take_growth(drift, setup, index, say)
    if drift.doubtful and not drift.differences:
        _look_closer(drift, setup.inputs, index, say)
    if drift.differences:
        if drift.layout or not accept:
            raise drift.refusal(folder.root, accept=accept)
        if drift.input:
            _keep_finished(folder, setup.inputs, index, committed)
        _record(drift, setup, manifest, epoch, say)
    elif drift.engine:
        say("settings that change no result differ from the first attempt:\n" + "\n".join(drift.engine))
    if grows and setup.retry is not None:
        return
    manifest.fingerprints = {**manifest.fingerprints, "input": setup.fingerprints.input}
    manifest.digests = {**manifest.digests, "input": setup.fingerprints.digests()["input"]}


def _take_growth(drift: Drift, setup: JobSetup, index: InputIndex, say: Callable[[str], None]) -> None:
    """Take what was added to the input for no difference, if what was there is what it was.

    A retry, whose settings are for its own rows, leaves it to the next run.
    """
    others = len(drift.input)
    if drift.doubtful:
        _look_closer(drift, setup.inputs, index, say)
    if len(drift.input) == others:
        later = "; `batchgen run` takes that in, after this retry" if setup.retry is not None else ""
        say(f"the input has grown at its end (input.grow: append){later}:\n" + "\n".join(drift.growth))
        del drift.input[: len(drift.growth)]
        drift.doubtful.clear()
        if setup.retry is None:
            index.forget_end()


def _look_closer(drift: Drift, inputs: InputSet, index: InputIndex, say: Callable[[str], None]) -> None:
    rows = sum(entry.rows for entry in index)
    if not rows:
        return
    names = ", ".join(drift.doubtful[:3]) + (" …" if len(drift.doubtful) > 3 else "")
    say(f"{names}: written again since this job began; comparing {counted(rows, 'row')} with what they were")
    changed = reread(inputs, index, _Every()).changed
    if changed is not None:
        first = changed.start.ordinal
        drift.input.append(f"  {names}: rows {first} to {first + changed.rows - 1} are not what they were")


def _keep_finished(folder: JobFolder, inputs: InputSet, index: InputIndex, committed: Container[int]) -> None:
    """Find the finished parts in the changed input, and forget what followed them."""
    again = reread(inputs, index, committed, exact=False)
    if again.changed is not None:
        first = again.changed.start.ordinal
        raise DriftError(
            f"{folder.root}: rows {first} to {first + again.changed.rows - 1} are finished, and are not in "
            "the input any more as they were; --accept-drift only takes changes behind finished parts: "
            "restore these rows, choose another output.path, or start over with --overwrite"
        )
    index.reset(again.entries)
    forget_ids(folder.index)


def _record(
    drift: Drift, setup: JobSetup, manifest: Manifest, epoch: int, say: Callable[[str], None]
) -> None:
    new = setup.fingerprints
    before = manifest.fingerprints["result"]
    change = Change(
        kind=DRIFT,
        epoch=epoch,
        differences=drift.differences,
        result=new.result,
        before=before,
        pinned_before=manifest.pinned,
    )
    manifest.changes.append(change)
    if any(new.result.get(key) != before.get(key) for key in ("weights", "model")):
        # The first worker decides again what the job file leaves open.
        manifest.pinned, manifest.facts = {}, {}
    manifest.fingerprints, manifest.digests = new.to_dict(), new.digests()
    say(
        f"{change.describe()}: finished rows stay, the others are computed this way:\n"
        + "\n".join(drift.differences)
    )
