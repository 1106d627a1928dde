"""What operations do to the logits of many rows at once, where the logits are. Called by `on_device.py`.

An operation changes some logits of a row; which, and by how much, the host knows. So a row's operations are
lists of token ids and numbers (`Operation.edit`), and those of all rows go to the device together: one kind
after the other, in the order in which a row has them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

Array = npt.NDArray[np.generic]
Transfer = Callable[[Sequence[Array]], list[torch.Tensor]]
"""From arrays to tensors on the device, without waiting."""


@dataclass(slots=True)
class _Places:
    """Logits of one kind: row and token id of each, and numbers that go with them."""

    rows: list[npt.NDArray[np.int64]] = field(default_factory=list)
    ids: list[npt.NDArray[np.int64]] = field(default_factory=list)
    numbers: list[npt.NDArray[np.float32]] = field(default_factory=list)

    def add(self, row: int, ids: torch.Tensor, numbers: Sequence[torch.Tensor | float] = ()) -> None:
        found = ids.numpy()
        self.rows.append(np.full(len(found), row))
        self.ids.append(found)
        columns = np.empty((len(numbers), len(found)), dtype=np.float32)
        for column, number in zip(columns, numbers, strict=True):
            column[:] = number.numpy() if isinstance(number, torch.Tensor) else number
        self.numbers.append(columns)

    def arrays(self) -> list[Array]:
        """Rows, ids, and as many columns of numbers as there are."""
        columns = np.concatenate(self.numbers, axis=1)
        return [np.concatenate(self.rows), np.concatenate(self.ids), *columns]


class Edits:
    """What is to be done to the logits of some rows, which are numbered from 0."""

    def __init__(self) -> None:
        self._only, self._barred, self._added, self._penalised = (_Places() for _ in range(4))
        self.row = 0
        """Whose edits come now."""

    def keep_only(self, ids: torch.Tensor) -> None:
        """All other tokens are barred."""
        self._only.add(self.row, ids)

    def bar(self, ids: torch.Tensor) -> None:
        """These tokens may not be chosen."""
        self._barred.add(self.row, ids)

    def add(self, ids: torch.Tensor, numbers: torch.Tensor) -> None:
        """Each number is added to the logit of its token."""
        self._added.add(self.row, ids, [numbers])

    def penalise(
        self, ids: torch.Tensor, counts: torch.Tensor, repetition: float, frequency: float, presence: float
    ) -> None:
        """See `operations.Penalties`."""
        self._penalised.add(self.row, ids, [repetition, frequency * counts, presence * (counts > 0)])

    def apply(self, logits: torch.Tensor, transfer: Transfer) -> torch.Tensor:
        """New logits.

        Args:
            logits: `(R, V)` float32, which may be changed in place.
            transfer: to their device.
        """
        kinds = (
            (_keep_only, self._only),
            (_bar, self._barred),
            (_add, self._added),
            (_penalise, self._penalised),
        )
        wanted = [(kind, places.arrays()) for kind, places in kinds if places.rows]
        tensors = iter(transfer([array for _, arrays in wanted for array in arrays]))
        for kind, arrays in wanted:
            logits = kind(logits, *itertools.islice(tensors, len(arrays)))
        return logits


def _keep_only(logits: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    kept = torch.full_like(logits, -torch.inf)
    kept[rows, ids] = logits[rows, ids]
    narrow = torch.zeros_like(logits[:, :1], dtype=torch.bool)
    narrow[rows] = True
    return torch.where(narrow, kept, logits)


def _bar(logits: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    logits[rows, ids] = logits.new_full((), -torch.inf)
    return logits


def _add(logits: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    logits[rows, ids] = logits[rows, ids] + numbers
    return logits


def _penalise(
    logits: torch.Tensor,
    rows: torch.Tensor,
    ids: torch.Tensor,
    repetition: torch.Tensor,
    frequency: torch.Tensor,
    presence: torch.Tensor,
) -> torch.Tensor:
    found = logits[rows, ids]
    found = torch.where(found > 0, found / repetition, found * repetition)
    logits[rows, ids] = found - frequency - presence
    return logits
