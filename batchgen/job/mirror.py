"""Keeps an object store equal to the working copy of an output folder, in an order that is safe at any cut.

Files that only grow are sent in chunks, each an object of its own; parts are one object each; everything else
is sent whole, under the epoch of the run that wrote it:

    data/part-NNNNNN.*                      as in a local output folder
    manifest.json, job.resolved.yaml, report.*, _SUCCESS       copies for people
    .batchgen/claims/NNNNNN.json            who took which epoch, and which earlier chunks it accepted
    .batchgen/lease.json                    the owner's heartbeat
    .batchgen/logs/PATH@OFFSET              a chunk of a file that grows
    .batchgen/state/eNNNNNN/PATH            any other file; `COMPLETE` once all have been sent once
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from batchgen.job.folder import TEMPORARY, JobFolder
from batchgen.job.object_store import ObjectStore

LOGS, STATE, COMPLETE = ".batchgen/logs/", ".batchgen/state/", "COMPLETE"
CHUNK_BYTES = 64 * 1024 * 1024
_GROWING = ("commits", "index", "stats", "journal")
# What belongs to this machine, or has an object of its own.
_NOT_SENT = ("claims", "lock", "lease.json")
_INDEX, _SUCCESS = ".batchgen/index/", "_SUCCESS"
_COPIES = ("manifest.json", "job.resolved.yaml", "report.html", "report.json", _SUCCESS)
_CHUNK = re.compile(r"(.+)@(\d{20})")

Stamp = tuple[int, int]


def chunk_name(path: str, offset: int) -> str:
    """Object of the chunk that begins at byte `offset` of a growing file."""
    return f"{LOGS}{path}@{offset:020d}"


def parse_chunk(name: str) -> tuple[str, int] | None:
    """File and offset of a chunk's object; None for another object."""
    match = _CHUNK.fullmatch(name.removeprefix(LOGS)) if name.startswith(LOGS) else None
    return (match[1], int(match[2])) if match else None


def state_folder(epoch: int) -> str:
    """Where the run of an epoch keeps the files that are sent whole."""
    return f"{STATE}e{epoch:06d}/"


@dataclass(slots=True)
class _Snapshot:
    """Files of the working copy by what they are, relative to its root."""

    journal: dict[str, Stamp] = field(default_factory=dict)
    logs: dict[str, Stamp] = field(default_factory=dict)
    parts: dict[str, Stamp] = field(default_factory=dict)
    whole: dict[str, Stamp] = field(default_factory=dict)


class Mirror:
    """Sends what has changed since the last time. One thread at a time.

    Args:
        root: the working copy.
        store: where to.
        epoch: under which this run writes.
        check: raises OwnershipError when another run has taken over.
        accepted: chunks that the working copy was made from, by file: bytes that need not be sent.
        present: parts that are in the store already, with their stamps in the working copy.
        old: objects that this run may remove when their file is gone.
    """

    def __init__(
        self,
        root: Path,
        store: ObjectStore,
        epoch: int,
        check: Callable[[], None],
        accepted: dict[str, int],
        present: dict[str, Stamp],
        old: Iterable[str],
    ) -> None:
        self._folder = JobFolder(root)
        self._store = store
        self._epoch = epoch
        self._check = check
        self._sent_bytes = dict(accepted)
        self._parts = dict(present)
        self._whole: dict[str, Stamp] = {}
        self._objects = set(old)
        self._complete = False

    def push(self) -> None:
        """Make the store hold everything that the working copy holds at this moment.

        What supersedes is sent before what it supersedes is removed, and in the order of a local run: where
        rows lie in the input, the manifest, the record of a part, the part. So a run that dies anywhere in
        here leaves a folder that can be continued.

        Raises:
            OwnershipError: another run has taken over.
            StorageError: the store cannot be written; what was sent stays.
        """
        self._check()
        now = self._snapshot()
        if _SUCCESS not in now.whole:
            self._forget({_SUCCESS, f"{state_folder(self._epoch)}{_SUCCESS}"} & self._objects)
        index = {name: stamp for name, stamp in now.logs.items() if name.startswith(_INDEX)}
        last = {name: stamp for name, stamp in now.whole.items() if name == _SUCCESS}
        self._push_growing(index)
        self._push_whole({name: stamp for name, stamp in now.whole.items() if name not in last})
        self._push_growing({name: stamp for name, stamp in now.logs.items() if name not in index})
        self._push_parts(now.parts)
        self._push_growing(now.journal)
        # It says that the rest is there.
        self._push_whole(last)
        self._remove_gone(now)

    def _snapshot(self) -> _Snapshot:
        """The journal is looked at first: a segment that is gone by then is in a part that is seen later."""
        found = _Snapshot()
        internal = self._folder.internal
        found.journal = self._files(self._folder.journal)
        for name in _GROWING:
            if name != "journal":
                found.logs |= self._files(internal / name)
        found.parts = self._files(self._folder.data)
        for path in sorted(internal.iterdir()):
            if path.is_dir() and path.name not in (*_GROWING, *_NOT_SENT):
                found.whole |= self._files(path)
        found.whole |= self._files(internal, skip=_NOT_SENT)
        found.whole |= self._files(self._folder.root)
        return found

    def _files(self, folder: Path, skip: tuple[str, ...] = ()) -> dict[str, Stamp]:
        found = {}
        with contextlib.suppress(FileNotFoundError):
            for entry in os.scandir(folder):
                if entry.name in skip or entry.name.startswith(TEMPORARY):
                    continue
                with contextlib.suppress(FileNotFoundError):
                    if entry.is_file(follow_symlinks=False):
                        stat = entry.stat()
                        name = os.path.relpath(entry.path, self._folder.root)
                        found[name] = (stat.st_size, stat.st_mtime_ns)
        return dict(sorted(found.items()))

    def _push_parts(self, parts: dict[str, Stamp]) -> None:
        for name, stamp in parts.items():
            if self._parts.get(name) == stamp:
                continue
            self._check()
            path = self._folder.root / name
            with contextlib.suppress(FileNotFoundError):
                if not self._store.upload(name, path, new=name not in self._objects):
                    self._check()
                    # Left by an owner that had lost the job: this run's claim is the later one.
                    self._store.upload(name, path, new=False)
                self._parts[name] = stamp
                self._objects.add(name)

    def _push_growing(self, files: dict[str, Stamp]) -> None:
        for name in files:
            with contextlib.suppress(FileNotFoundError), (self._folder.root / name).open("rb") as file:
                sent = self._sent_bytes.get(name, 0)
                file.seek(sent)
                while data := file.read(CHUNK_BYTES):
                    target = chunk_name(name, sent)
                    self._store.write(target, data)
                    self._objects.add(target)
                    sent += len(data)
                    self._sent_bytes[name] = sent

    def _push_whole(self, files: dict[str, Stamp]) -> None:
        for name in [name for name, stamp in files.items() if self._whole.get(name) != stamp]:
            with contextlib.suppress(FileNotFoundError):
                data = (self._folder.root / name).read_bytes()
                self._put(f"{state_folder(self._epoch)}{name}", data)
                if name in _COPIES:
                    self._check()
                    self._put(name, data)
                self._whole[name] = files[name]
        if not self._complete:
            self._put(state_folder(self._epoch) + COMPLETE, b"")
            self._complete = True

    def _put(self, name: str, data: bytes) -> None:
        self._store.write(name, data)
        self._objects.add(name)

    def _remove_gone(self, now: _Snapshot) -> None:
        """Objects whose file was gone when the snapshot was taken, and the state of earlier epochs."""
        growing = now.journal.keys() | now.logs.keys()
        own = state_folder(self._epoch)
        gone = set()
        for name in self._objects:
            chunk = parse_chunk(name)
            if chunk is not None:
                # Beyond what was accepted, or sent since, lies what an owner wrote that had lost the job.
                void = chunk[1] >= self._sent_bytes.get(chunk[0], 0)
                gone |= {name} if void or chunk[0] not in growing else set()
            elif name.startswith(STATE):
                kept = name.startswith(own) and name.removeprefix(own) in (*now.whole, COMPLETE)
                gone |= set() if kept else {name}
            elif name.startswith("data/"):
                gone |= {name} if name not in now.parts else set()
            elif name in _COPIES and name not in now.whole:
                gone.add(name)
        self._forget(gone)

    def _forget(self, names: set[str]) -> None:
        if names:
            self._check()
            self._store.delete(sorted(names))
            self._objects -= names
            for name in names:
                self._parts.pop(name, None)
                self._whole.pop(name.removeprefix(state_folder(self._epoch)), None)
