"""Where a job's model and tokenizer lie. For the checks and everything that goes on from them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from batchgen.job.fingerprints import ModelFiles
    from batchgen.job.spec.job import JobSpec
    from batchgen.models.source import ModelSource
    from batchgen.scores import Pooling
    from batchgen.text.tokenizer import Tokenizer


def find_model(spec: JobSpec, commit: str | None = None) -> ModelSource:
    """Where the model lies; fetches no weights.

    Args:
        spec: the job.
        commit: used instead of the job's revision.

    Raises:
        UsageError: nothing is there.
    """
    from batchgen.models.source import find_model

    return find_model(spec.model.path, commit or spec.model.revision, allow_pickle=spec.model.allow_pickle)


def find_tokenizer(spec: JobSpec) -> ModelSource | None:
    """Where the tokenizer lies if it is not the model's own.

    Raises:
        UsageError: nothing is there.
    """
    from batchgen.models.source import find_tokenizer

    return find_tokenizer(spec.model.tokenizer) if spec.model.tokenizer else None


def recorded_commit(spec: JobSpec) -> str | None:
    """The commit at which the output folder's job found this model and revision; a branch may have moved.

    Raises:
        UsageError, StorageError: the folder's manifest cannot be read.
    """
    from batchgen.job.folder import JobFolder
    from batchgen.job.manifest import load_manifest, revision_name

    manifest = load_manifest(JobFolder(spec.output_folder))
    return manifest.commits.get(revision_name(spec.model.path, spec.model.revision)) if manifest else None


def find_pooling(spec: JobSpec, source: ModelSource) -> Pooling:
    """How hidden states become one vector; the last token where what the model's files ask for is a fault."""
    from batchgen.models.pooling import find_pooling
    from batchgen.scores import Pooling
    from batchgen.types import UsageError

    if spec.embedding.pooling != "auto":
        return Pooling(spec.embedding.pooling)
    try:
        return find_pooling(source.tokenizer_folder())
    except UsageError:
        return Pooling.LAST


def model_files(source: ModelSource, tokenizer_source: ModelSource | None) -> ModelFiles:
    """The files that a job's results depend on.

    Raises:
        UsageError: weights are not all there.
    """
    from batchgen.job.fingerprints import ModelFiles

    tokenizer = source.folder if tokenizer_source is None else _place(tokenizer_source)
    return ModelFiles(source.weight_files(), tokenizer)


def _place(source: ModelSource) -> Path:
    place = source.folder or source.gguf_file
    if place is None:
        raise ValueError("a model source is a folder or a GGUF file")
    return place


def load_tokenizer(source: ModelSource) -> Tokenizer:
    """A model's tokenizer, without any weights.

    Raises:
        UsageError: there is none that loads.
    """
    from batchgen.text.tokenizer import Tokenizer

    return Tokenizer.load(str(source.tokenizer_folder()))
