"""Which files of a model folder hold its weights, and whether they are all there. Needs no torch.

Called by `source.py` and `hub.py`; reads headers, no weights. Names are those that transformers saves and
loads. A safetensors file, by its format's specification: 8 bytes with the header's length, a JSON header with
the byte ranges of all tensors, and their data without gaps.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from pathlib import Path

from batchgen.grammar import counted
from batchgen.types import UsageError

SAFETENSORS = "model.safetensors"
PICKLE = "pytorch_model.bin"
INDEX = ".index.json"
_LONGEST_HEADER = 100_000_000


def wanted_weights(names: Collection[str], allow_pickle: bool, what: str) -> str:
    """The file with the weights, or the index of the files with them.

    Args:
        names: of all files at the top of a model folder or repository.
        allow_pickle: whether `.bin` files may be loaded.
        what: the beginning of a message, such as `model.path: org/name`.

    Raises:
        UsageError: there is none that may be loaded.
    """
    for name in (SAFETENSORS, SAFETENSORS + INDEX):
        if name in names:
            return name
    pickles = [name for name in (PICKLE, PICKLE + INDEX) if name in names]
    if pickles and allow_pickle:
        return pickles[0]
    if pickles:
        raise UsageError(
            f"{what} has its weights only as pickles ({pickles[0]}), which could run code when loaded; "
            "convert them to safetensors, or set model.allow_pickle: true if you trust whoever made them"
        )
    raise UsageError(
        f"{what} holds no weights, neither {SAFETENSORS} nor {SAFETENSORS}{INDEX}; "
        "is the download complete, and is this a whole model and not an adapter?"
    )


def shards(index: str, read: Callable[[str], bytes], what: str) -> list[str]:
    """The files that an index names, each once.

    Raises:
        UsageError: the index is not one.
    """
    try:
        files = sorted(set(json.loads(read(index))["weight_map"].values()))
        if files and all(isinstance(name, str) and Path(name).name == name for name in files):
            return files
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        pass
    raise UsageError(f"{what}: {index} is damaged; download it again")


def weight_files(folder: Path, allow_pickle: bool, what: str) -> list[Path]:
    """The files of a local folder that hold the weights, all there and none cut short.

    Raises:
        UsageError: one is missing or cut, or none may be loaded.
    """
    name = wanted_weights([file.name for file in folder.iterdir()], allow_pickle, what)
    read = (folder / name).read_bytes
    names = shards(name, lambda _: read(), what) if name.endswith(INDEX) else [name]
    missing = [shard for shard in names if not (folder / shard).is_file()]
    if missing:
        raise UsageError(
            f"{what} lacks {len(missing)} of {counted(len(names), 'file')} with weights, such as "
            f"{missing[0]}; finish the download"
        )
    for shard in names:
        if shard.endswith(".safetensors"):
            _check_length(folder / shard, what)
    return [folder / shard for shard in names]


def _check_length(file: Path, what: str) -> None:
    """A file is as long as its header says, so that a cut download is seen before it is loaded."""
    try:
        with file.open("rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            if length > _LONGEST_HEADER:
                raise ValueError("a header of that length")
            header = json.loads(handle.read(length))
        ends = [entry["data_offsets"][1] for key, entry in header.items() if key != "__metadata__"]
        whole = 8 + length + max(ends, default=0)
        found = file.stat().st_size
    except (OSError, ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise UsageError(f"{what}: {file.name} is not a safetensors file; download it again") from error
    if found != whole:
        raise UsageError(
            f"{what}: {file.name} has {counted(found, 'byte')} and its header speaks of {whole:,}; download "
            "it again"
        )
