"""Every file of a folder against a model, under crashes in any operation, at any byte of a write.

A crash is the end of a process: the operation is cut off, nothing after it happens, no clean-up either.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from folder_machine import JOB, FolderMachine
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from batchgen.data.row import PartIndexer, Position
from batchgen.data.row_result import RowResult
from batchgen.job.claims import Claims
from batchgen.job.files import OS_FILES, FileOps, atomic_write
from batchgen.job.folder import JobFolder
from batchgen.job.index import InputIndex
from batchgen.job.journal import JournalWriter, Kind, PartialRecord
from batchgen.job.live_segments import LiveSegments
from batchgen.job.manifest import Manifest, load_manifest
from batchgen.job.parts import PartStore
from batchgen.job.replay import replay

ROWS, PART_ROWS = 9, 3
# Nothing here depends on a real disk, which would take most of the time.
FAST = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
OPERATIONS = ("create", "write", "fsync", "fsync_folder", "open", "listdir", "replace")


class Crash(BaseException):
    """The process is gone."""


class Plan(NamedTuple):
    """Crash in operation `at` (0: never), with this share of a write done, after or before any other."""

    at: int
    share: float
    after: bool


plans = st.builds(Plan, st.integers(0, 14), st.floats(0, 1), st.booleans())


@contextlib.contextmanager
def crashing(plan: Plan) -> Iterator[None]:
    """Let this process crash by plan within the body."""
    count, dead = [0], [False]

    def guarded(name: str, real: Any) -> Any:
        def operate(*arguments: Any) -> Any:
            if dead[0]:
                raise Crash
            count[0] += 1
            if count[0] != plan.at:
                return real(*arguments)
            dead[0] = True
            if name == "write":
                files, fd, data = arguments
                real(files, fd, bytes(data)[: int(len(data) * plan.share)])
            elif plan.after:
                real(*arguments)
            raise Crash

        return operate

    def unlink(*arguments: Any, **options: Any) -> None:
        if dead[0]:
            raise Crash
        real_unlink(*arguments, **options)

    real_unlink = os.unlink
    with pytest.MonkeyPatch.context() as patched:
        for name in OPERATIONS:
            patched.setattr(FileOps, name, guarded(name, getattr(FileOps, name)))
        patched.setattr(os, "unlink", unlink)
        yield


class Owner:
    """One process that has recovered the folder."""

    def __init__(self, folder: JobFolder) -> None:
        self.claims = Claims(folder)
        self.claim = self.claims.take({})
        folder.remove_temporaries()
        for path in self.claims.void_segments(self.claim):
            folder.quarantined(path)
        self.claims.forget_before(self.claim.epoch)
        self.manifest = load_manifest(folder)
        self.parts = PartStore(folder, ".jsonl", self.claim.epoch)
        self.parts.recognise(lambda _: None, self.still_owner)
        self.index = InputIndex(folder, self.claim.epoch)
        self.found = replay(folder.journal, JOB, self.claim.accepted, PART_ROWS, self.parts.committed)
        self.journal = JournalWriter(folder.journal, JOB, self.claim.epoch, segment_bytes=600)
        self.live = LiveSegments(folder.journal, JOB, self.journal, self.found, PART_ROWS)

    def commit(self) -> None:
        self.live.note(self.journal.commit())

    def drop(self) -> None:
        self.live.drop(self.parts.committed, self.still_owner)

    def still_owner(self) -> None:
        self.claims.check(self.claim.epoch)

    def close(self) -> None:
        for thing in (self.journal, self.parts, self.index):
            thing.close()


class CrashMachine(FolderMachine):
    """Of each thing the values that it may have now; one value once an operation has returned."""

    def __init__(self) -> None:
        super().__init__(ROWS, FAST)
        self.limits: set[int | None] = {None}
        self.results: dict[int, set[str | None]] = {row: {None} for row in range(ROWS)}
        self.indexed: set[int] = set()
        self.whole: dict[int, list[str]] = {}
        self.tokens: dict[int, set[tuple[int, ...]]] = {row: {()} for row in range(ROWS)}
        self.epochs = [0]
        self.owner = Owner(self.folder)

    def teardown(self) -> None:
        self.owner.close()
        super().teardown()

    def perform(self, plan: Plan, again: Plan, operation: Callable[[], None]) -> bool:
        """Whether it returned; after a crash another process recovers, maybe at the second try."""
        try:
            with crashing(plan):
                operation()
            return True
        except Crash:
            self.owner.close()
            self.recover(again)
            return False

    def recover(self, plan: Plan) -> None:
        try:
            with crashing(plan):
                self.owner = Owner(self.folder)
        except Crash:
            self.owner = Owner(self.folder)
        self.epochs.append(self.owner.claim.epoch)
        assert self.epochs[-1] > self.epochs[-2]
        self.settle()

    def settle(self) -> None:
        """What is there now is one of what may be, and stays."""
        owner = self.owner
        limit = None if owner.manifest is None else owner.manifest.limit
        assert limit in self.limits
        self.limits = {limit}
        assert self.indexed <= {entry.part for entry in owner.index}
        for entry in owner.index:
            assert entry == self.entry(entry.part)
        for part, texts in self.whole.items():
            if part in owner.parts.committed:
                assert self.part(part) == texts
        texts = self.texts(owner.found)
        for row, allowed in self.results.items():
            part = row // PART_ROWS
            if part not in owner.parts.committed:
                assert texts.get(row) in allowed
                self.results[row] = {texts.get(row)}
                if row not in texts:
                    found = owner.found.partials.get(row)
                    tokens = () if found is None else tuple(found.samples[0])
                    assert tokens in self.tokens[row]
                    self.tokens[row] = {tokens}
        assert list(self.root.rglob(".tmp-*")) == []

    def entry(self, part: int) -> Any:
        start = self.rows[part * PART_ROWS - 1].next_position if part else Position()
        indexer = PartIndexer(part, start)
        for row in self.rows[part * PART_ROWS :][:PART_ROWS]:
            indexer.add(row)
        return indexer.entry()

    def part(self, part: int) -> list[str]:
        return [text for row, text in self.stored().items() if row // PART_ROWS == part]

    def unanswered(self, rows: list[int]) -> list[int]:
        committed = self.owner.parts.committed
        return [row for row in rows if self.results[row] == {None} and row // PART_ROWS not in committed]

    @rule(plan=plans, again=plans, limit=st.integers(1, 9))
    def save_manifest(self, plan: Plan, again: Plan, limit: int) -> None:
        owner = self.owner

        def save() -> None:
            old = owner.manifest
            plan_json = self.plan.to_json()
            made = Manifest(
                job_id=JOB,
                fingerprints={},
                digests={},
                output_plan=plan_json,
                part_rows=PART_ROWS,
                compression="none",
                limit=limit,
            )
            made.created = made.created if old is None else old.created
            made.save(self.folder, owner.still_owner)
            owner.manifest = made

        self.limits.add(limit)
        if self.perform(plan, again, save):
            self.limits = {limit}

    @rule(
        plan=plans, again=plans, rows=st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=4, unique=True)
    )
    def write_rows(self, plan: Plan, again: Plan, rows: list[int]) -> None:
        owner = self.owner
        rows = self.unanswered(rows)
        texts = {}
        for row in rows:
            self.serial += 1
            texts[row] = f"{row} #{self.serial}"
            owner.journal.append(Kind.RESULT, row, self.result(row, texts[row]))
            self.results[row].add(texts[row])
        if self.perform(plan, again, owner.commit):
            for row in rows:
                self.results[row] = {texts[row]}

    @rule(
        plan=plans,
        again=plans,
        rows=st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=3, unique=True),
        count=st.integers(1, 60),
        dropping=st.booleans(),
    )
    def sample_tokens(self, plan: Plan, again: Plan, rows: list[int], count: int, dropping: bool) -> None:
        """Rows go on; where they are `dropping`, tokens are moved while those wait for the same commit."""
        owner = self.owner
        longer = {}
        for row in self.unanswered(rows):
            (known,) = self.tokens[row]
            self.serial += 1
            ids = [self.serial] * count
            record = PartialRecord(self.rows[row].digest, len(known), ids)
            owner.journal.append(Kind.PARTIAL, row, record.pack())
            longer[row] = (*known, *ids)
            self.tokens[row].add(longer[row])

        def go_on() -> None:
            if dropping:
                owner.drop()
            owner.commit()

        if self.perform(plan, again, go_on):
            self.tokens |= {row: {tokens} for row, tokens in longer.items()}

    @rule(plan=plans, again=plans)
    def drop_segments(self, plan: Plan, again: Plan) -> None:
        """Afterwards no segment but the last is kept by tokens alone."""
        owner = self.owner

        def drop() -> None:
            for action in (owner.drop, owner.commit, owner.drop):
                action()

        if self.perform(plan, again, drop):
            found = replay(
                self.folder.journal, JOB, owner.claims.accepted_now(), PART_ROWS, owner.parts.committed
            )
            parts_of = {name: parts - owner.parts.committed.keys() for name, parts in found.parts_of.items()}
            assert {name for name, parts in parts_of.items() if not parts} <= {owner.journal.current_segment}

    @rule(plan=plans, again=plans, part=st.integers(0, 2))
    def index(self, plan: Plan, again: Plan, part: int) -> None:
        owner = self.owner

        def record() -> None:
            last = self.rows[part * PART_ROWS + PART_ROWS - 1]
            owner.index.record(self.entry(part), last.next_position)
            owner.index.sync()

        if self.perform(plan, again, record):
            self.indexed.add(part)

    @rule(plan=plans, again=plans, part=st.integers(0, 2))
    def assemble(self, plan: Plan, again: Plan, part: int) -> None:
        owner = self.owner
        rows = range(part * PART_ROWS, (part + 1) * PART_ROWS)
        if part in owner.parts.committed or any(None in self.results[row] for row in rows):
            return
        texts = [next(iter(self.results[row])) or "" for row in rows]
        records = [
            (self.rows[row], RowResult("ok", text, "stop", None, None, (1, 2, 0)))
            for row, text in zip(rows, texts, strict=True)
        ]
        self.whole[part] = texts

        def commit() -> None:
            owner.parts.commit(part, records, self.plan, "none", owner.still_owner)

        if self.perform(plan, again, commit):
            assert self.part(part) == texts

    @rule(plan=plans, again=plans)
    def promise_success(self, plan: Plan, again: Plan) -> None:
        owner = self.owner
        data = b'{"rows": 9}\n'
        self.perform(
            plan, again, lambda: atomic_write(self.folder.success, data, OS_FILES, owner.still_owner)
        )
        if self.folder.success.exists():
            assert self.folder.success.read_bytes() == data

    @rule(again=plans)
    def crash_at_rest(self, again: Plan) -> None:
        self.owner.close()
        self.recover(again)

    @invariant()
    def a_part_once_committed_stays(self) -> None:
        for part in self.owner.parts.committed:
            assert self.part(part) == self.whole[part]


CrashMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
TestCrashes = CrashMachine.TestCase
