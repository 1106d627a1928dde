"""What can be wrong with where a job writes and the columns it writes. For `checks`, `plan` and `run`."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import TYPE_CHECKING

from batchgen.grammar import counted
from batchgen.job.folder import TEMPORARY
from batchgen.types import StorageError, Task, UsageError

if TYPE_CHECKING:
    from batchgen.data.source import InputSet
    from batchgen.job.spec.job import JobSpec


def check_output_writable(spec: JobSpec) -> None:
    """What `run` will find out by writing: the output folder can be written or made, and has room.

    Raises:
        StorageError: no permission, or less space than `run.min_free_disk`.
    """
    check_output_permission(spec)
    existing = _existing_part(spec.output_folder)
    if not existing.is_dir():
        return
    free = shutil.disk_usage(existing).free
    if free < spec.run.min_free_disk:
        raise StorageError(
            f"output.path: {existing} has {counted(free, 'byte')} free and run.min_free_disk asks for "
            f"{spec.run.min_free_disk:,}; free some space or lower run.min_free_disk"
        )


def check_output_permission(spec: JobSpec) -> None:
    """Whether the output folder can be written or made; before weights are fetched or hashed.

    Raises:
        StorageError: no permission, a file system that is mounted read-only, or one that takes no files.
    """
    existing = _existing_part(spec.output_folder)
    if not existing.is_dir():
        return
    system = os.statvfs(existing)
    if system.f_flag & os.ST_RDONLY:
        raise StorageError(
            f"output.path: {existing} is on a read-only file system; mount it for writing or choose another "
            "output.path"
        )
    if not os.access(existing, os.W_OK | os.X_OK):
        raise StorageError(
            f"output.path: no permission to write in {existing}; allow it or choose another output.path"
        )
    if system.f_blocks == 0:
        _try_to_create(existing)


def _try_to_create(folder: Path) -> None:
    """Of a file system without blocks, such as /proc, the permissions do not say whether it takes files."""
    try:
        with NamedTemporaryFile(dir=folder, prefix=TEMPORARY):
            pass
    except OSError as error:
        raise StorageError(
            f"output.path: no file can be created in {folder} ({error.strerror}); choose another output.path"
        ) from error


def _existing_part(folder: Path) -> Path:
    return next(path for path in (folder, *folder.parents) if os.path.lexists(path))


def check_is_folder(folder: Path, key: str = "output.path") -> None:
    """Whether there is a folder, or one can be made.

    Args:
        folder: absolute.
        key: how messages name it.

    Raises:
        UsageError: something else is in its place.
    """
    try:
        folder.stat()
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        pass
    except OSError as error:
        raise UsageError(f"{key}: {folder} cannot be a folder ({error.strerror}); choose another") from error
    existing = _existing_part(folder)
    if existing.is_symlink() and not existing.exists():
        raise UsageError(f"{key}: {existing} is a symbolic link to nothing; make the folder it leads to")
    if not existing.is_dir():
        raise UsageError(f"{key}: {existing} is a file; give a folder")


def check_store(url: str) -> None:
    """Whether the object store's package is there; asks nothing over the network."""
    from batchgen.job.object_store import ObjectStore

    ObjectStore(url)


def check_output_columns(spec: JobSpec, inputs: InputSet) -> list[str]:
    from batchgen.data.results import plan_output

    plan = plan_output(
        inputs,
        format=spec.output.format,
        columns=spec.input.columns,
        renames=spec.output.columns,
        include=spec.output.include,
        reasoning=spec.sampling.reasoning_column,
        task=Task(spec.task),
    )
    return plan.notes()
