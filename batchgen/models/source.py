"""Find a model: a hub id, a local folder, or a GGUF file, and turn it into a local folder.

Called by the engine worker before loading, and by `validate` and `show`, which need the tokenizer
but no weights. Nothing here loads weights except the one-time conversion of a GGUF file.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from batchgen.models import gguf
from batchgen.types import UsageError

NEEDED = ["*.json", "*.safetensors", "*.model", "*.jinja", "tokenizer*", "merges.txt", "vocab*"]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model's files lie; `folder` holds them as transformers reads them, or `gguf_file` does."""

    name: str
    folder: Path | None
    gguf_file: Path | None

    def tokenizer_folder(self) -> Path:
        """A folder with the tokenizer and configuration, without touching weights."""
        return self.folder if self.folder is not None else gguf.tokenizer_folder(self._gguf())

    def weights_folder(self) -> Path:
        """A folder with safetensors weights; converts a GGUF file the first time."""
        return self.folder if self.folder is not None else gguf.weights_folder(self._gguf())

    def _gguf(self) -> Path:
        if self.gguf_file is None:
            raise ValueError("a model source is a folder or a GGUF file")
        return self.gguf_file


def find_model(path: str) -> ModelSource:
    """Resolve `model.path`.

    Raises:
        UsageError: nothing is there, or the folder holds no model.
    """
    local = Path(path).expanduser()
    if local.suffix == ".gguf":
        if not local.is_file():
            raise UsageError(f"model.path: there is no file {path}")
        return ModelSource(local.stem, None, local.resolve())
    if local.is_dir():
        if not (local / "config.json").is_file():
            raise UsageError(f"model.path: {path} holds no config.json, so it is not a model folder")
        return ModelSource(local.resolve().name, local.resolve(), None)
    if local.exists() or path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise UsageError(
            f"model.path: {path} is neither a model folder, a .gguf file, nor a hub id such as org/name"
        )
    return ModelSource(path, _from_hub(path), None)


def _from_hub(repo_id: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        return Path(snapshot_download(repo_id, allow_patterns=NEEDED))
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError, OSError, ValueError) as error:
        raise UsageError(
            f"model.path: {repo_id} is not a local folder and could not be had from the hub "
            f"({type(error).__name__}: {str(error).splitlines()[0][:200]}); "
            "download it first or give a folder"
        ) from error
