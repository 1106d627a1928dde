"""The cheap check, at every start, that the input is still the one that the output folder belongs to.

The manifest keeps `input_fingerprint`; on resume the job compares and prints `describe_changes`. The content
itself is guarded by the digests of the input index.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from batchgen.data.input_file import InputFile


def input_fingerprint(files: Sequence[InputFile]) -> dict[str, Any]:
    """JSON-able: the ordered files with path as given, size, mtime in nanoseconds and Parquet footer hash."""
    return {"version": 1, "format": files[0].format, "files": [_entry(file) for file in files]}


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
        from batchgen.data.parquet_reader import footer_hash

        footer = footer_hash(file)
    return {
        "path": file.path,
        "compression": file.compression,
        "size": file.size,
        "mtime_ns": file.mtime_ns,
        "footer": footer,
    }


def _file_changes(path: str, old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    changed = [key for key in ("compression", "size", "footer", "mtime_ns") if old[key] != new[key]]
    words = {
        "compression": f"compression was {old['compression']}, is {new['compression']}",
        "size": f"size was {old['size']} bytes, is {new['size']}",
        "footer": "the Parquet footer (schema or row groups) differs",
        "mtime_ns": "was modified since (its time stamp differs)",
    }
    return [f"{path}: {', '.join(words[key] for key in changed)}"] if changed else []
