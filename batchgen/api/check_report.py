"""What checks found, in one place. Each check gets a `Report`; `checks` says which run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from batchgen.types import BatchgenError, InputError, StorageError

if TYPE_CHECKING:
    from batchgen.job.faults import Fault, KeyPath
    from batchgen.job.spec.job import JobSpec

# What a sentence is about, whichever check came upon it.
_ABOUT: dict[type, tuple[str, ...]] = {InputError: ("input", "path"), StorageError: ("output", "path")}


@dataclass(slots=True)
class Report:
    """What the checks found.

    Args:
        faults: in the order of the checks.
        notes: sentences that do not stop the job.
        facts: what a program may want to know of the input.
        spec: the job, once it is known; says where in its files the key of a fault stands.
    """

    faults: list[BatchgenError] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    spec: JobSpec | None = None
    _keys: dict[int, KeyPath] = field(default_factory=dict)

    @contextmanager
    def check(self, *key: str) -> Iterator[None]:
        """Collect what the body raises instead of stopping; a sentence that names no key is about `key`.

        A damaged file stops each check that reads it, and is one fault.
        """
        try:
            yield
        except BatchgenError as error:
            known = {fault.message for found in self.faults for fault in self.located(found)}
            if str(error) not in known:
                self.faults.append(error)
                self._keys[id(error)] = _ABOUT.get(type(error), key)

    def located(self, fault: BatchgenError) -> list[Fault]:
        """The fault, or each of a job file's, with its place: where the key stands that it begins with."""
        from batchgen.job.faults import Fault, JobFileError, Origin, named_key

        if isinstance(fault, JobFileError):
            return list(fault.faults)
        key = named_key(str(fault)) or self._keys.get(id(fault), ())
        place = self.spec.place(key) if self.spec else None
        return [Fault(place or Origin(""), str(fault), key if place else ())]

    def sentence(self, fault: BatchgenError) -> str:
        """A fault as a sentence that begins with its place, if it has one."""
        from batchgen.job.faults import JobFileError

        if isinstance(fault, JobFileError):
            return str(fault)
        (located,) = self.located(fault)
        return str(located) if located.origin.source else located.message

    @property
    def exit_code(self) -> int:
        """0 or the smallest code: what the user must fix comes before what the machine lacks."""
        return min((fault.exit_code for fault in self.faults), default=0)

    def raise_faults(self) -> None:
        """Raise what was found as one error with `exit_code`."""
        if self.faults:
            worst = next(f for f in self.faults if f.exit_code == self.exit_code)
            others = [f for f in self.faults if f is not worst]
            raise type(worst)("\n".join(map(self.sentence, [worst, *others]))) from worst
