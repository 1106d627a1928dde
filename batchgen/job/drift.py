"""What differs between a job and the folder that it is to continue, and what becomes of the difference.

Recovery and `verify` call `find_drift`. Where a file lies and when it was written are no part of what it is:
a project may be copied to another machine, and a file touched or restored. Where only these differ, the rows
that were read before are compared with their digests in the input index.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from batchgen.data.fingerprint import compare_inputs
from batchgen.data.row import PartIndexEntry, PartIndexer, Position
from batchgen.data.source import InputSet
from batchgen.job.faults import dotted, show_value
from batchgen.job.fingerprints import Fingerprints
from batchgen.job.index import InputIndex
from batchgen.types import DriftError

SHOWN = 100
MOST_DIFFERENCES = 12


@dataclass(frozen=True, slots=True)
class Drift:
    """Differences, three lines each or one for a file.

    Args:
        input: of the input's files and of how they are read.
        result: of what decides results.
        layout: of what decides how the output looks; parts of one output must look alike.
        engine: of what changes no result.
        doubtful: input files that are where or as old as they were not, and otherwise the same.
        moved: whether an input file lies elsewhere.
        growth: those of `input` that only say that the input is longer than it was.
    """

    input: list[str]
    result: list[str]
    layout: list[str]
    engine: list[str]
    doubtful: list[str]
    moved: bool
    growth: list[str]

    @property
    def differences(self) -> list[str]:
        """All that block."""
        return [*self.input, *self.layout, *self.result]

    def refusal(self, folder: Path | str, *, accept: bool = False) -> DriftError:
        """The error that shows the differences and what to do.

        Args:
            folder: the output folder.
            accept: whether the user has asked to go on in spite of them.
        """
        shown = self.differences[:MOST_DIFFERENCES]
        if len(self.differences) > len(shown):
            shown.append(f"… and {len(self.differences) - len(shown)} more")
        remedy = (
            "Undo the change to continue, choose another output.path to keep both, "
            "or start this folder over with --overwrite."
        )
        if self.growth:
            remedy += " To take in what was added to the input, set input.grow: append."
        elif not self.layout:
            remedy += " To keep what is finished and compute the other rows this way, add --accept-drift."
        elif accept:
            remedy = f"--accept-drift cannot mix these, because all parts must look alike. {remedy}"
        return DriftError(
            f"{folder} belongs to a job that differs from this one:\n" + "\n".join([*shown, remedy])
        )


def find_drift(old: Mapping[str, Any], new: Fingerprints, pinned: Mapping[str, Any]) -> Drift:
    """Compare with what an output folder belongs to.

    Args:
        old: `Fingerprints.to_dict()` from the manifest.
        new: of the job as it is now.
        pinned: numeric choices made at the first attempt, which fill what either side left open.
    """
    files = compare_inputs(old["input"]["files"], new.input["files"])
    reading, layout = zip(*map(_split_input, (old["input"], new.input)), strict=True)
    before, after = _filled(old["result"], pinned), _filled(new.result, pinned)
    outputs = [{"output": side.pop("output", {})} for side in (before, after)]
    return Drift(
        input=[f"  {change}" for change in files.changes] + diff(*reading),
        result=diff(before, after),
        layout=diff(*layout) + diff(*outputs),
        engine=diff(old["engine"], new.engine),
        doubtful=files.doubtful,
        moved=files.moved,
        growth=[f"  {change}" for change in files.changes] if files.grown else [],
    )


def check_drift(
    old: Mapping[str, Any], new: Fingerprints, pinned: Mapping[str, Any], folder: Path | str
) -> list[str]:
    """Arguments as of `find_drift`; returns differences in the engine's part, as notes.

    Raises:
        DriftError: anything else differs for certain.
    """
    drift = find_drift(old, new, pinned)
    if drift.differences:
        raise drift.refusal(folder)
    return drift.engine


@dataclass(frozen=True, slots=True)
class Reread:
    """The rows that were read before, read again.

    Args:
        entries: of the parts, with where the row after each begins.
        changed: the first of these parts that is not what it was; None where all are.
    """

    entries: list[tuple[PartIndexEntry, Position]]
    changed: PartIndexEntry | None


def reread(inputs: InputSet, index: InputIndex, parts: Container[int], *, exact: bool = True) -> Reread:
    """Read the input up to the last of the parts and compare.

    Args:
        inputs: the input as it is now.
        index: what it was.
        parts: which to compare.
        exact: whether each must also begin where it did.

    Raises:
        InputError: it cannot be read.
    """
    wanted = [entry for entry in index if entry.part in parts]
    rows = inputs.rows()
    found: list[tuple[PartIndexEntry, Position]] = []
    position = Position()
    try:
        for known in wanted:
            while position.ordinal < known.start.ordinal:
                position = next(rows).next_position
            indexer = PartIndexer(known.part, position)
            while indexer.rows < known.rows:
                row = next(rows)
                position = row.next_position
                indexer.add(row)
            entry = indexer.entry()
            if entry.digest != known.digest or (exact and entry != known):
                return Reread(found, known)
            found.append((entry, position))
    except StopIteration:
        return Reread(found, known)
    finally:
        # Only a generator has something to close; an `InputSet` parks its reader then.
        getattr(rows, "close", lambda: None)()
    return Reread(found, None)


def _split_input(part: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """How rows are read, and what of the input the output shows: which rows, and which of their columns."""
    shown = ("id", "columns", "where", "schema")
    reading = {key: value for key, value in part.items() if key not in ("files", *shown)}
    return {"input": reading}, {"input": {key: part.get(key) for key in shown}}


def diff(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Readable differences, three lines each: the field, the old and the new value.

    Null and absent are the same, so that a key added by a later version, and left alone, is no difference.
    """
    before, after = dict(_leaves(old, ())), dict(_leaves(new, ()))
    paths = [path for path in {**before, **after} if before.get(path) != after.get(path)]
    return [_difference(path, before.get(path), after.get(path)) for path in paths]


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(inner, (*path, str(key)))
    else:
        yield path, value


def _difference(path: tuple[str, ...], old: Any, new: Any) -> str:
    start = 0
    if isinstance(old, str) and isinstance(new, str):
        start = _common_prefix(old, new)
    return f"  {dotted(path)}\n    - {_window(old, start)}\n    + {_window(new, start)}"


def _common_prefix(a: str, b: str) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _window(value: Any, difference: int) -> str:
    """A value in one line; of a long text the surroundings of the first difference."""
    if not isinstance(value, str) or len(value) <= SHOWN:
        return show_value(value)
    start = max(0, min(difference - SHOWN // 4, len(value) - SHOWN))
    head, tail = "…" if start else "", "…" if start + SHOWN < len(value) else ""
    return f"{head}{value[start : start + SHOWN]!r}{tail}"


def _filled(result: Mapping[str, Any], pinned: Mapping[str, Any]) -> dict[str, Any]:
    """A result part with open choices (`auto`, null) replaced by what the first attempt pinned."""
    filled = {
        section: {
            key: pinned.get(key, value) if value in ("auto", None) else value
            for key, value in result.get(section, {}).items()
        }
        for section in ("model", "engine")
    }
    return {**result, **filled}
