"""The cheap check, at every start, that the input is still the one that the output folder belongs to.

The manifest keeps `input_fingerprint`; on resume the job calls `compare_inputs`. The content itself is
guarded by the digests of the input index.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

from batchgen.data.input_file import InputFile
from batchgen.grammar import counted

_WHEN = ("mtime_ns", "version")
_LINES = ("jsonl", "csv", "openai_batch")


def input_fingerprint(files: Sequence[InputFile]) -> dict[str, Any]:
    """JSON-able: the ordered files with path as given (without credentials), size, mtime in nanoseconds, what
    the store of a remote file tells of its version, and Parquet footer hash.
    """
    return {"version": 1, "format": files[0].format, "files": [_entry(file) for file in files]}


@dataclass(frozen=True, slots=True)
class Comparison:
    """An input against what it was.

    Args:
        changes: what differs for certain, one sentence for each file or fact.
        doubtful: paths of files of the same name and size that were written at another time: only their
            content tells.
        moved: whether a file lies elsewhere.
        grown: whether all that changed is that files came behind the last, or that the last, plain text, is
            longer; whether what was there is the same, only its content tells.
    """

    changes: list[str]
    doubtful: list[str]
    moved: bool
    grown: bool = False


def compare_inputs(old: Mapping[str, Any], new: Mapping[str, Any]) -> Comparison:
    """Tell a changed input from one that was moved or touched.

    A file of the same name, size and time, at the same place in the list, is the same file wherever it lies:
    its rows are guarded by their digests when they are read again.
    """
    facts = [
        (side["version"], side["format"], [_lasting(file) for file in side["files"]]) for side in (old, new)
    ]
    pairs = list(zip(old["files"], new["files"], strict=False))
    doubtful = [b["path"] for a, b in pairs if any(a.get(key) != b.get(key) for key in _WHEN)]
    moved = any(a["path"] != b["path"] for a, b in pairs)
    if facts[0] == facts[1]:
        return Comparison([], doubtful, moved)
    if _has_grown(old, new):
        return Comparison(describe_changes(old, new), doubtful, moved, grown=True)
    return Comparison(describe_changes(old, new), [], moved=False)


def _has_grown(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    before, after = old["files"], new["files"]
    if (old["version"], old["format"]) != (new["version"], new["format"]) or len(after) < len(before):
        return False
    *rest, last = [(_lasting(a), _lasting(b)) for a, b in zip(before, after, strict=False)]
    longer = (
        new["format"] in _LINES and last[1]["compression"] == "none" and last[1]["size"] > last[0]["size"]
    )
    same_last = last[0] == ({**last[1], "size": last[0]["size"]} if longer else last[1])
    return same_last and all(a == b for a, b in rest)


def _lasting(file: Mapping[str, Any]) -> dict[str, Any]:
    """What stays of a file that is copied or touched; its name may be part of its rows' ids."""
    stays = {key: value for key, value in file.items() if key not in ("path", "commit", *_WHEN)}
    return {**stays, "name": PurePosixPath(file["path"]).name}


def describe_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """What differs, one sentence for each file or fact; empty when nothing does."""
    if old["version"] != new["version"]:
        return [f"the fingerprint has version {new['version']}, the recorded one {old['version']}"]
    changes = []
    if old["format"] != new["format"]:
        changes.append(f"input.format: was {old['format']}, is {new['format']}")
    before, after = ({f["path"]: f for f in side["files"]} for side in (old, new))
    changes += [f"{path}: no longer in the input" for path in before if path not in after]
    changes += [f"{path}: was not in the input" for path in after if path not in before]
    common = [path for path in before if path in after]
    if common != [path for path in after if path in before]:
        changes.append("input.path: the same files come in another order")
    for path in common:
        changes += _file_changes(path, before[path], after[path])
    return changes


def _entry(file: InputFile) -> dict[str, Any]:
    footer = None
    if file.format == "parquet":
        from batchgen.data.table_file import footer_hash

        footer = footer_hash(file)
    entry: dict[str, Any] = {
        "path": file.path,
        "compression": file.compression,
        "size": file.size,
        "mtime_ns": file.mtime_ns,
        "footer": footer,
    }
    # The commit is for whoever reads the manifest; the same file in a later commit is the same input.
    more = {"version": file.version, "commit": file.commit}
    return {**entry, **{key: value for key, value in more.items() if value is not None}}


def _file_changes(path: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    keys = ("compression", "size", "footer", "mtime_ns", "version")
    changed = [key for key in keys if old.get(key) != new.get(key)]
    words = {
        "compression": f"compression was {old['compression']}, is {new['compression']}",
        "size": f"size was {counted(old['size'], 'byte')}, is {new['size']:,}",
        "footer": "the Parquet footer (schema or row groups) differs",
        "mtime_ns": "was modified since (its time stamp differs)",
        "version": f"version (etag or time stamp) was {old.get('version')}, is {new.get('version')}",
    }
    return [f"{path}: {', '.join(words[key] for key in changed)}"] if changed else []
