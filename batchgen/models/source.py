"""Find a model: a hub id, a local folder, a GGUF file or a dummy, and turn it into a local folder.

Called by the engine worker before loading, and by `validate`, `run` and `show`. Finding a model fetches
configuration and tokenizer only; its weights are fetched, or converted from GGUF, when they are asked for.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from batchgen.models import dummy, gguf
from batchgen.models.hub import Snapshot, fetch_files, find_snapshot
from batchgen.models.weights import INDEX, shards, wanted_weights, weight_files
from batchgen.types import UsageError

CONTEXT_LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
"""Keys of a configuration that hold the context length, in order."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model's files lie.

    Args:
        name: as the job file has it.
        key: of the job file, which names it; for messages.
        folder: configuration and tokenizer as transformers reads them, and weights once they were asked for;
            None for a GGUF file.
        gguf_file: the GGUF file, or None.
        snapshot: of the hub, or None for local files.
        allow_pickle: whether weights may be pickles.
        is_dummy: whether there are no weights, because the engine makes them.
    """

    name: str
    key: str
    folder: Path | None
    gguf_file: Path | None = None
    snapshot: Snapshot | None = None
    allow_pickle: bool = False
    is_dummy: bool = False

    @property
    def commit(self) -> str | None:
        """What the revision was resolved to; None for local files."""
        return self.snapshot.commit if self.snapshot else None

    def tokenizer_folder(self) -> Path:
        """A folder with the tokenizer and configuration, without touching weights."""
        return self.folder if self.folder is not None else gguf.tokenizer_folder(self._gguf(), self.key)

    def fetch_weights(self) -> None:
        """Download the weights of a hub id, those that are not in the cache yet.

        Raises:
            UsageError: there are none, or they cannot be had.
        """
        if self.snapshot is not None:
            fetch_files(self.snapshot, self._remote_weights(self.snapshot), self.key)

    def weights_folder(self) -> Path:
        """A folder with weights; downloads them, or converts a GGUF file, the first time.

        Of a dummy its configuration alone, which says how to make them.

        Raises:
            UsageError: they are not all there and cannot be had.
        """
        if self.folder is None:
            return gguf.weights_folder(self._gguf(), self.key)
        if self.is_dummy:
            return self.folder
        self.fetch_weights()
        weight_files(self.folder, self.allow_pickle, self._what)
        return self.folder

    def weight_files(self) -> tuple[Path, ...]:
        """The local files that decide results: the GGUF file, or weights and configuration.

        Raises:
            UsageError: weights are not all there.
        """
        if self.folder is None:
            return (self._gguf(),)
        if self.is_dummy:
            return (self.folder / "config.json",)
        found = weight_files(self.folder, self.allow_pickle, self._what)
        return tuple(sorted([*found, self.folder / "config.json"]))

    def check_weights(self) -> None:
        """Make sure that weights are there or can be had, without downloading any.

        Raises:
            UsageError: says what is missing.
        """
        if self.is_dummy:
            return
        if self.snapshot is not None:
            self._remote_weights(self.snapshot)
        if self.folder is not None and (self.snapshot is None or self.snapshot.names is None):
            weight_files(self.folder, self.allow_pickle, self._what)

    @property
    def _what(self) -> str:
        return f"{self.key}: {self.name}"

    def _remote_weights(self, snapshot: Snapshot) -> list[str]:
        """Names of a snapshot's files with weights; what is in the cache where the hub cannot be asked."""
        try:
            names = snapshot.names or [file.name for file in snapshot.folder.iterdir()]
            name = wanted_weights(names, self.allow_pickle, self._what)
        except UsageError as error:
            if snapshot.names is not None:
                raise
            raise UsageError(
                f"{self._what} is in the cache without its weights, and the hub cannot be reached; "
                "run this once where there is a network"
            ) from error
        if not name.endswith(INDEX):
            return [name]
        return shards(name, lambda index: (snapshot.folder / index).read_bytes(), self._what)

    def _gguf(self) -> Path:
        if self.gguf_file is None:
            raise ValueError("a model source is a folder or a GGUF file")
        return self.gguf_file


def find_model(path: str, revision: str | None = None, *, allow_pickle: bool = False) -> ModelSource:
    """Resolve `model.path` and `model.revision`; fetches no weights.

    Args:
        path: hub id, folder, GGUF file, or `dummy:` and a shape.
        revision: of a hub id: branch, tag or commit.
        allow_pickle: whether weights may be `.bin` files.

    Raises:
        UsageError: nothing is there, or it is no model.
    """
    source = _find(path, revision, "model.path", allow_pickle)
    if source.folder is not None and not (source.folder / "config.json").is_file():
        raise UsageError(f"model.path: {path} holds no config.json, so it is not a model; check the path")
    if revision is not None and source.snapshot is None:
        raise UsageError(f"model.revision: {path} is local and has no revisions; remove model.revision")
    return source


def declared_context_length(folder: Path) -> int | None:
    """The longest sequence that a `config.json` says its model was made for; None where it does not say.

    For those who need no more than that; `loader.context_length` also knows each kind of model's default.
    """
    try:
        config = json.loads((folder / "config.json").read_bytes())
        config = {**config, **config.get("text_config", {})}
    except (OSError, ValueError, TypeError):
        return None
    lengths = [config.get(name) for name in CONTEXT_LENGTHS]
    return next((n for n in lengths if type(n) is int and n > 0), None)


def find_tokenizer(path: str) -> ModelSource:
    """Resolve `model.tokenizer`: like a model, but it needs neither configuration nor weights.

    Raises:
        UsageError: nothing is there.
    """
    return _find(path, None, "model.tokenizer", allow_pickle=False)


def _find(path: str, revision: str | None, key: str, allow_pickle: bool) -> ModelSource:
    if path.startswith(dummy.PREFIX):
        return ModelSource(path, key, dummy.folder(path, key), is_dummy=True)
    local = Path(path).expanduser()
    if local.suffix == ".gguf":
        if not local.is_file():
            raise UsageError(f"{key}: there is no file {path}; check the path")
        return ModelSource(local.stem, key, None, local.resolve())
    if local.is_dir():
        return ModelSource(path, key, local.resolve(), allow_pickle=allow_pickle)
    if local.exists() or path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise UsageError(
            f"{key}: {path} is neither a folder, a .gguf file, nor a hub id such as org/name; check the path"
        )
    snapshot = find_snapshot(path, revision, key)
    return ModelSource(path, key, snapshot.folder, snapshot=snapshot, allow_pickle=allow_pickle)
