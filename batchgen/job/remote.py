"""A run whose output folder lies in an object store: a working copy on this machine, sent there as it grows.

`run_remote` takes the job over (a heartbeat object, and an epoch that only one process can create), makes the
working copy what the store holds, runs there as in any local folder, and has the store follow. What a machine
that is lost had not sent yet is computed again: at most `SEND_SECONDS` of work. Readers use `fetched`.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from batchgen.job.files import atomic_write, storage
from batchgen.job.folder import JobFolder
from batchgen.job.journal import SegmentName
from batchgen.job.lease import LeaseRecord, Owner, acquire_lease
from batchgen.job.mirror import (
    COMPLETE,
    Mirror,
    Stamp,
    parse_chunk,
    state_folder,
)
from batchgen.job.object_store import ObjectStore
from batchgen.job.run import run_job
from batchgen.job.run_options import JobSetup, RunHooks, RunOptions, RunResult
from batchgen.types import BatchgenError, OwnershipError, StorageError, UsageError

SEND_SECONDS = 30.0
MAX_FAILURES = 3
LONGEST_BEAT_SECONDS = 5.0
_CLAIMS, _LEASE = ".batchgen/claims/", ".batchgen/lease.json"
_FETCHES_AT_ONCE = 8
_FOLLOW_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class _Claim:
    """One epoch in the store: which chunks of earlier epochs its owner accepted."""

    epoch: int
    accepted: frozenset[str]


def run_job_anywhere(setup: JobSetup, options: RunOptions, hooks: RunHooks) -> RunResult:
    """`run_job` where the output folder is local, `run_remote` where it is in an object store."""
    if setup.url is None:
        return run_job(setup, options, hooks)
    return run_remote(setup, setup.url, options, hooks)


def run_remote(setup: JobSetup, url: str, options: RunOptions, hooks: RunHooks) -> RunResult:
    """As `run_job`, for an output folder in an object store.

    Args:
        setup: the job; its `output` is the working copy.
        url: of the output folder.
        options: as `run_job`.
        hooks: as `run_job`, but for `beside`; sentences name the URL, not the working copy.

    Raises:
        OwnershipError: another run lives.
        StorageError: the store cannot be reached or written.
        BatchgenError: as `run_job`.
    """
    store = ObjectStore(url)
    copy = setup.output
    named = _Naming(copy, url)
    say = named.saying(hooks.say)
    (copy / ".batchgen").mkdir(parents=True, exist_ok=True)
    # On this machine the kernel knows who works in the copy; it is theirs until they end.
    here = acquire_lease(JobFolder(copy), options.lease_seconds, say)
    here.release()
    with named.errors(), _remote_lease(store, options.lease_seconds, hooks.say) as lease:
        mirror = _take_over(store, copy, hooks.say, overwrite=options.overwrite)
        sender = _Sender(mirror, lease)
        try:
            result = run_job(setup, options, replace(hooks, say=say, beside=sender.beside))
        except OwnershipError:
            raise
        except BatchgenError:
            # What was finished is worth keeping, and the report says what happened.
            with contextlib.suppress(BatchgenError):
                mirror.push()
            raise
        mirror.push()
    return replace(result, reason=named.name(result.reason))


@contextlib.contextmanager
def fetched(url: str) -> Iterator[Path]:
    """A temporary local copy of an output folder, for those who only read.

    Raises:
        UsageError: there is none.
        StorageError: the store cannot be read.
    """
    store = ObjectStore(url)
    objects = store.sizes()
    latest = _latest_claim(store, objects)
    if latest is None:
        raise UsageError(
            f"{url}: this is not the output folder of a job, or its run has not begun; check the URL"
        )
    with tempfile.TemporaryDirectory(prefix="batchgen-") as place:
        copy = Path(place)
        _pull(store, copy, objects, latest, _accepted(objects, latest))
        with _following_lease(store, copy):
            yield copy


@contextlib.contextmanager
def _following_lease(store: ObjectStore, copy: Path) -> Iterator[None]:
    """The owner's heartbeat, in the copy too: `status` watches it to tell the living from the dead."""
    end = threading.Event()

    def follow() -> None:
        while not end.is_set():
            with contextlib.suppress(StorageError):
                data = store.read(_LEASE)
                if data is not None:
                    atomic_write(JobFolder(copy).lease, data)
            end.wait(_FOLLOW_SECONDS)

    thread = threading.Thread(target=follow, name="lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def _take_over(store: ObjectStore, copy: Path, say: Callable[[str], None], *, overwrite: bool) -> Mirror:
    """Claim the next epoch, and make the working copy what the store holds."""
    objects = store.sizes()
    latest = _latest_claim(store, objects)
    # What a new job replaces counts no more, also where this machine is lost before it is removed.
    accepted = frozenset() if latest is None or overwrite else _accepted(objects, latest)
    epoch = 1 if latest is None else latest.epoch + 1
    owner = Owner.myself(locked=False)
    record = {"epoch": epoch, "accepted": sorted(accepted), "host": owner.host, "pid": owner.pid}
    if not store.create(f"{_CLAIMS}{epoch:06d}.json", json.dumps(record).encode()):
        raise OwnershipError(
            f"{store.url}: another process takes over this run at this moment; wait for it, then run the "
            "same command again"
        )
    lengths: dict[str, int] = {}
    present: dict[str, Stamp] = {}
    if latest is None or overwrite:
        _empty(copy)
        if latest is not None:
            _write_claim(copy, latest.epoch, {})
    else:
        say(f"{store.url}: bringing the copy on this machine up to date")
        _empty(copy)
        lengths, present = _pull(store, copy, objects, latest, accepted)
    removable = [name for name in objects if not name.startswith((_CLAIMS, _LEASE))]

    old_claims = [f"{_CLAIMS}{old:06d}.json" for old in _epochs(objects) if old < epoch - 1]
    store.delete(old_claims)
    return Mirror(copy, store, epoch, partial(_check_claim, store, epoch), lengths, present, removable)


def _check_claim(store: ObjectStore, epoch: int) -> None:
    """Raises OwnershipError when `epoch` is no longer the highest."""
    now = max(_epochs(store.sizes(_CLAIMS)), default=0)
    if now != epoch:
        raise OwnershipError(
            f"{store.url}: another run took over (claim {now} follows {epoch}) while this process was "
            "stopped or cut off; nothing that it wrote since counts, let the other one finish"
        )


def _epochs(objects: Mapping[str, int]) -> list[int]:
    names = [name.removeprefix(_CLAIMS) for name in objects if name.startswith(_CLAIMS)]
    return [int(name.removesuffix(".json")) for name in names if name.removesuffix(".json").isdecimal()]


def _latest_claim(store: ObjectStore, objects: Mapping[str, int]) -> _Claim | None:
    epoch = max(_epochs(objects), default=0)
    data = store.read(f"{_CLAIMS}{epoch:06d}.json") if epoch else None
    if data is None:
        return None
    record = json.loads(data)
    return _Claim(record["epoch"], frozenset(record["accepted"]))


def _accepted(objects: Mapping[str, int], latest: _Claim) -> frozenset[str]:
    """Chunks that count: what the latest owner accepted of earlier ones, and all of its own."""
    accepted = set()
    for name in objects:
        chunk = parse_chunk(name)
        if chunk is not None and (name in latest.accepted or _epoch_of(chunk[0]) == latest.epoch):
            accepted.add(name)
    return frozenset(accepted)


def _epoch_of(path: str) -> int:
    """The epoch that stands in the name of a growing file: a letter, then six digits or more."""
    digits = "".join(c for c in Path(path).name.partition("-")[0].partition(".")[0] if c.isdecimal())
    return int(digits or 0)


def _pull(
    store: ObjectStore,
    copy: Path,
    objects: Mapping[str, int],
    latest: _Claim,
    accepted: frozenset[str],
) -> tuple[dict[str, int], dict[str, Stamp]]:
    """Make an empty folder what the store holds.

    Returns:
        Bytes of each growing file, and the stamps of the parts.
    """
    JobFolder(copy).create()
    lengths = _pull_growing(store, copy, objects, accepted)
    segments = {Path(name).name: size for name, size in lengths.items() if SegmentName.parse(Path(name).name)}
    _write_claim(copy, latest.epoch, segments)
    whole = _whole_objects(objects, latest.epoch)
    parts = {name: name for name in objects if name.startswith("data/")}
    with ThreadPoolExecutor(_FETCHES_AT_ONCE) as threads:
        for done in [
            threads.submit(_fetch, store, name, copy / path) for path, name in (whole | parts).items()
        ]:
            done.result()
    stamps = {}
    for path in parts:
        stat = (copy / path).stat()
        stamps[path] = (stat.st_size, stat.st_mtime_ns)
    return lengths, stamps


def _pull_growing(
    store: ObjectStore, copy: Path, objects: Mapping[str, int], accepted: frozenset[str]
) -> dict[str, int]:
    lengths: dict[str, int] = {}
    for name in sorted(accepted):
        chunk = parse_chunk(name)
        # A gap is the end: what follows was accepted by nobody who had seen the middle.
        if chunk is None or chunk[1] != lengths.get(chunk[0], 0):
            continue
        path = copy / chunk[0]
        path.parent.mkdir(parents=True, exist_ok=True)
        data = store.read(name)
        if data is not None:
            with storage(path, len(data)), path.open("ab") as file:
                file.write(data)
            lengths[chunk[0]] = chunk[1] + len(data)
    return lengths


def _whole_objects(objects: Mapping[str, int], epoch: int) -> dict[str, str]:
    """Files of the latest epoch that had sent all of them once, by path."""
    for candidate in range(epoch, 0, -1):
        folder = state_folder(candidate)
        if folder + COMPLETE in objects:
            names = [n.removeprefix(folder) for n in objects if n.startswith(folder)]
            return {name: folder + name for name in names if name != COMPLETE}
    return {}


def _fetch(store: ObjectStore, name: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    store.fetch(name, path)


def _write_claim(copy: Path, epoch: int, accepted: Mapping[str, int]) -> None:
    """The claim that the run in the working copy follows, so that its own gets the number of the store's."""
    place = copy / ".batchgen" / "claims" / f"{epoch:06d}"
    place.mkdir(parents=True, exist_ok=True)
    record = {"epoch": epoch, "accepted": dict(accepted), "owner": {}}
    (place / "claim.json").write_text(json.dumps(record))


def _empty(copy: Path) -> None:
    if copy.exists():
        shutil.rmtree(copy)
    copy.mkdir(parents=True)


class _RemoteLease:
    """The heartbeat in the store, from one process."""

    def __init__(self, store: ObjectStore, lease_seconds: float) -> None:
        self._store = store
        self.beat_seconds = min(lease_seconds / 4, LONGEST_BEAT_SECONDS)
        owner = Owner.myself(locked=False)
        self._record = LeaseRecord(owner, 1, self.beat_seconds, lease_seconds, released=False)
        self._store.write(_LEASE, self._record.encode())

    def beat(self) -> None:
        """Show life. What cannot be written now is written with the next beat."""
        self._write(released=False)

    def release(self) -> None:
        """Let the next run start at once, unless it has begun."""
        with contextlib.suppress(StorageError):
            now = _read_lease(self._store)
            if now is not None and now.owner == self._record.owner:
                self._write(released=True)

    def _write(self, *, released: bool) -> None:
        self._record = replace(self._record, beat=self._record.beat + 1, released=released)
        self._store.write(_LEASE, self._record.encode())


@contextlib.contextmanager
def _remote_lease(
    store: ObjectStore, lease_seconds: float, say: Callable[[str], None]
) -> Iterator[_RemoteLease]:
    _wait_for_lapse(store, lease_seconds, say)
    lease = _RemoteLease(store, lease_seconds)
    try:
        yield lease
    finally:
        lease.release()


def _read_lease(store: ObjectStore) -> LeaseRecord | None:
    data = store.read(_LEASE)
    if data is None:
        return None
    try:
        record = json.loads(data)
        return LeaseRecord(**{**record, "owner": Owner(**record["owner"])})
    except (ValueError, TypeError, KeyError):
        return None


def _wait_for_lapse(store: ObjectStore, lease_seconds: float, say: Callable[[str], None]) -> None:
    """Return once nobody owns the folder. Raises OwnershipError when the owner shows life."""
    first = _read_lease(store)
    if first is None or first.released or first.owner.is_dead(have_lock=False):
        return
    who = f"process {first.owner.pid} on host {first.owner.host}"
    say(f"{store.url} is owned by {who}; waiting up to {lease_seconds:g} s to see whether it still lives")
    deadline = time.monotonic() + lease_seconds
    while time.monotonic() < deadline:
        time.sleep(min(1.0, lease_seconds / 10))
        now = _read_lease(store)
        if now is None or now.released:
            return
        if (now.owner, now.beat) != (first.owner, first.beat):
            raise OwnershipError(
                f"{store.url}: process {now.owner.pid} on host {now.owner.host} is running this job; wait "
                "until it ends, or stop it first (kill it with SIGTERM) and run the same command again"
            )
    say(f"{who} has shown no life for {lease_seconds:g} s; taking over")


class _Sender:
    """Has the store follow while the run goes on, from a thread of its own."""

    def __init__(self, mirror: Mirror, lease: _RemoteLease) -> None:
        self._mirror = mirror
        self._lease = lease
        self._end = threading.Event()

    @contextlib.contextmanager
    def beside(self, stop: Callable[[BatchgenError], None]) -> Iterator[None]:
        """Send within the body; `stop` is called once when that is no longer possible."""
        threads = [
            threading.Thread(target=work, args=(stop,), name=name, daemon=True)
            for name, work in (("send", self._send), ("remote-lease", self._beat))
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._end.set()
            for thread in threads:
                thread.join()

    def _send(self, stop: Callable[[BatchgenError], None]) -> None:
        failures = 0
        while not self._end.wait(SEND_SECONDS):
            try:
                self._mirror.push()
                failures = 0
            except OwnershipError as error:
                stop(error)
                return
            except BatchgenError as error:
                failures += 1
                if failures >= MAX_FAILURES:
                    stop(error)
                    return

    def _beat(self, stop: Callable[[BatchgenError], None]) -> None:
        while not self._end.wait(self._lease.beat_seconds):
            # Ownership that moved is noticed by the claim; a beat that fails is tried again.
            with contextlib.suppress(StorageError):
                self._lease.beat()


class _Naming:
    """Says the URL where a sentence names the working copy."""

    def __init__(self, copy: Path, url: str) -> None:
        self._copy = str(copy)
        self._url = url.rstrip("/")

    def name(self, sentence: str) -> str:
        return sentence.replace(self._copy, self._url)

    def saying(self, say: Callable[[str], None]) -> Callable[[str], None]:
        return lambda sentence: say(self.name(sentence))

    @contextlib.contextmanager
    def errors(self) -> Iterator[None]:
        try:
            yield
        except BatchgenError as error:
            if self._copy not in str(error):
                raise
            raise type(error)(self.name(str(error))) from error
