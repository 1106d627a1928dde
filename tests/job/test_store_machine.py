"""Journal, claims and parts against a model of what was promised, under crashes, takeovers and zombies."""

from __future__ import annotations

import contextlib
import errno
import random
from typing import Any

from failing_files import FailingFiles
from folder_machine import JOB, FolderMachine, text_of
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, precondition, rule

from batchgen.data.results import OutputPlan, RowResult
from batchgen.job.claims import Claim, Claims
from batchgen.job.folder import JobFolder
from batchgen.job.journal import JournalReader, JournalWriter, Kind
from batchgen.job.parts import PartStore
from batchgen.job.replay import replay
from batchgen.types import OwnershipError, StorageError

ROWS, PART_ROWS = 12, 4
outcomes = st.lists(st.sampled_from([None, None, errno.EIO, errno.ENOSPC, -5]), max_size=6)
rows_written = st.lists(st.integers(0, ROWS - 1), min_size=1, max_size=4)


class Owner:
    """One process that owns, or once owned, the folder."""

    def __init__(self, folder: JobFolder, plan: OutputPlan) -> None:
        self.verdicts: dict[int, int] = {}
        files = FailingFiles(lambda _, number: self.verdicts.get(number))
        self.files = files
        self.claims = Claims(folder)
        self.claim: Claim = self.claims.take({})
        self.parts = PartStore(folder, ".jsonl", self.claim.epoch)
        self.parts.recognise(lambda _: None, lambda: None)
        self.writer = JournalWriter(folder.journal, JOB, self.claim.epoch, segment_bytes=2000, files=files)
        self.pending: list[tuple[int, str]] = []
        self.found = replay(folder.journal, JOB, self.claim.accepted, PART_ROWS, self.parts.committed)
        self.plan = plan


class StoreMachine(FolderMachine):
    """`promised` is what a commit has returned; `maybe` what a failed or unfinished commit may have left."""

    def __init__(self) -> None:
        super().__init__(ROWS)
        self.promised: dict[int, tuple[int, str]] = {}
        self.maybe: dict[int, list[tuple[int, str]]] = {}
        self.in_parts: dict[int, str] = {}
        self.zombies: list[Owner] = []
        self.owner = Owner(self.folder, self.plan)

    def teardown(self) -> None:
        for owner in (self.owner, *self.zombies):
            owner.writer.close()
            owner.parts.close()
        super().teardown()

    def append(self, owner: Owner, rows: list[int]) -> None:
        for row in rows:
            self.serial += 1
            text = f"{row} by {owner.claim.epoch} #{self.serial}"
            owner.writer.append(Kind.RESULT, row, self.result(row, text))
            owner.pending.append((row, text))

    @rule(rows=rows_written)
    def write(self, rows: list[int]) -> None:
        self.append(self.owner, rows)

    @rule(
        failures=st.dictionaries(
            st.integers(1, 9), st.sampled_from([errno.EIO, errno.ENOSPC, -5]), max_size=3
        )
    )
    def commit(self, failures: dict[int, int]) -> None:
        owner = self.owner
        owner.verdicts = {owner.files.count + ahead: code for ahead, code in failures.items()}
        epoch, batch = owner.claim.epoch, owner.pending
        try:
            committed = owner.writer.commit()
        except StorageError:
            self.leave_behind(batch, epoch)
            owner.pending = []
            self.take_over(zombie=False)
            return
        reader = JournalReader(self.folder.journal, JOB)
        payloads = reader.results([(c.row, c.location) for c in committed])
        texts = [(c.row, text_of(p)) for c, p in zip(committed, payloads, strict=True)]
        reader.close()
        assert texts == batch
        if owner.verdicts and batch:
            self.leave_behind(batch, epoch)
        for row, text in batch:
            known = self.promised.get(row)
            if known is None or known[0] < epoch:
                self.promised[row] = (epoch, text)
        owner.pending = []
        owner.verdicts = {}

    def leave_behind(self, batch: list[tuple[int, str]], epoch: int) -> None:
        for row, text in batch:
            self.maybe.setdefault(row, []).append((epoch, text))

    @rule(seed=st.integers(0, 1000), torn=st.booleans())
    def crash(self, seed: int, torn: bool) -> None:
        """The owner dies; what it had not committed may be half on disk."""
        rng = random.Random(seed)
        name = self.owner.writer.current_segment
        if torn and name and (self.folder.journal / name).exists():
            with (self.folder.journal / name).open("ab") as file:
                file.write(rng.randbytes(rng.randint(1, 30)))
        self.owner.pending = []
        self.take_over(zombie=False)

    @rule()
    def freeze(self) -> None:
        """Another process takes over while the owner is stopped."""
        self.take_over(zombie=True)

    @rule(rows=rows_written)
    def wake_between_takeovers(self, rows: list[int]) -> None:
        self.take_over(zombie=True)
        self.write_as(self.zombies[-1], rows)
        self.take_over(zombie=False)

    def write_as(self, zombie: Owner, rows: list[int]) -> None:
        self.append(zombie, rows)
        zombie.verdicts = {}
        with contextlib.suppress(StorageError):
            zombie.writer.commit()
        zombie.pending = []

    def take_over(self, *, zombie: bool) -> None:
        old = self.owner
        self.owner = Owner(self.folder, self.plan)
        if zombie:
            self.zombies.append(old)
        else:
            old.writer.close()
            old.parts.close()

    @precondition(lambda self: self.zombies)
    @rule(rows=rows_written, part=st.integers(0, 2), data=st.data())
    def zombie_wakes(self, rows: list[int], part: int, data: Any) -> None:
        """It commits to its journal and tries to commit a part; neither may change anything."""
        zombie = data.draw(st.sampled_from(self.zombies))
        self.write_as(zombie, rows)
        records = [(row, RowResult("ok", "zombie")) for row in self.rows[part * PART_ROWS :][:PART_ROWS]]
        try:
            zombie.parts.commit(
                part, records, self.plan, "none", lambda: zombie.claims.check(zombie.claim.epoch)
            )
        except OwnershipError:
            return
        raise AssertionError("a zombie committed a part")

    @precondition(lambda self: not self.owner.pending)
    @rule(part=st.integers(0, ROWS // PART_ROWS - 1))
    def assemble(self, part: int) -> None:
        rows = range(part * PART_ROWS, (part + 1) * PART_ROWS)
        if part in self.owner.parts.committed or not all(row in self.promised for row in rows):
            return
        texts = self.read_journal(self.now_accepted())
        records = [
            (self.rows[row], RowResult("ok", texts[row], "stop", None, None, (1, 2, 0))) for row in rows
        ]
        owner = self.owner
        owner.parts.commit(part, records, self.plan, "none", lambda: owner.claims.check(owner.claim.epoch))
        self.in_parts |= {row: texts[row] for row in rows}

    def now_accepted(self) -> dict[str, int]:
        return Claims(self.folder).accepted_now()

    def read_journal(self, accepted: dict[str, int]) -> dict[int, str]:
        return self.texts(replay(self.folder.journal, JOB, accepted, PART_ROWS, self.owner.parts.committed))

    @invariant()
    def every_promise_is_kept(self) -> None:
        found = self.read_journal(self.now_accepted())
        for row in range(ROWS):
            if row in self.in_parts:
                assert row not in found
                continue
            epoch, text = self.promised.get(row, (0, None))
            allowed = {text, *(t for e, t in self.maybe.get(row, []) if e >= epoch)}
            assert found.get(row) in allowed

    @invariant()
    def parts_never_change(self) -> None:
        assert self.stored() == self.in_parts


StoreMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
TestStore = StoreMachine.TestCase
