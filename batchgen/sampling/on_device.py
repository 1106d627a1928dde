"""Turn logits into tokens where the logits are: what `sampler.py` does, for all rows of a step at once.

The host waits once, for the tokens. The same noise, the same order of operations; sums over the vocabulary
are added up in another order, so that where a draw falls on a border, which is as rare as float64 is precise,
another token may be drawn than on the host. Rows with functions of the caller's are processed on the host.
On an NVIDIA GPU one kernel of `triton_kernels.sampling` draws; elsewhere torch does, by sorting.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from batchgen.sampling.edits import Edits, Transfer
from batchgen.sampling.noise import uniform
from batchgen.sampling.operations import Custom
from batchgen.sampling.sampler import SamplingRow, finite_rows, none_left, sample
from batchgen.types import RowError, SamplingParams

_NONFINITE, _NONE_LEFT = -1, -2
_AT_ONCE = 2**23
"""Logits that are worked on at a time: a few hundred MiB with everything that is made of them."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens that have been drawn, or will have been when the device comes to it.

    Args:
        tokens: `(R,)` int64 on the device; -1 where logits are not finite, -2 where a row's operations have
            barred all tokens, anything for rows in `chosen`.
        rows: whose they are.
        chosen: what was decided on the host, by row; None where logits are not finite.
    """

    tokens: torch.Tensor
    rows: Sequence[SamplingRow]
    chosen: dict[int, int | RowError | None]

    def result(self) -> list[int | RowError | None]:
        """R token ids, or why a row has none; None where its logits are not finite. Waits for the device."""
        return self.of(self.tokens.tolist())

    def of(self, tokens: Sequence[int]) -> list[int | RowError | None]:
        """The same, from what `tokens` holds."""
        if not self.chosen and min(tokens, default=0) >= 0:
            return [*tokens]
        found: list[int | RowError | None] = []
        for i, (row, token) in enumerate(zip(self.rows, tokens, strict=True)):
            if i in self.chosen:
                found.append(self.chosen[i])
            elif token == _NONE_LEFT:
                found.append(none_left(row).error)
            else:
                found.append(None if token == _NONFINITE else token)
        return found


@torch.inference_mode()
def draw(
    logits: torch.Tensor,
    rows: Sequence[SamplingRow],
    transfer: Transfer,
    source: Sequence[int] | None = None,
) -> Drawn:
    """Draw one token per row.

    Args:
        logits: `(L, V)` float32, L and V at least 1.
        rows: R descriptions.
        transfer: to the device of the logits.
        source: the row of logits of each description; None: they are in the same order.
    """
    places = np.arange(len(rows)) if source is None else np.asarray(source, dtype=np.int64)
    plain, edited, own = _by_need(rows)
    random = [i for i in plain if not rows[i].sampling.greedy]
    tokens = _drawn(logits, rows, places, random, transfer)
    step = max(1, _AT_ONCE // logits.shape[1])
    for start in range(0, len(edited), step):
        part = edited[start : start + step]
        (index, target) = transfer([places[part], np.array(part)])
        found = _draw_edited(logits[index], [rows[i] for i in part], transfer)
        tokens[target] = torch.where(tokens[target] == _NONFINITE, _NONFINITE, found)
    chosen = _choose_on_host(logits, [rows[i] for i in own], places[own], transfer) if own else []
    return Drawn(tokens, rows, dict(zip(own, chosen, strict=True)))


def _drawn(
    logits: torch.Tensor,
    rows: Sequence[SamplingRow],
    places: npt.NDArray[np.int64],
    random: list[int],
    transfer: Transfer,
    *,
    barred: bool = False,
) -> torch.Tensor:
    """`(R,)` tokens: of `random` by noise, of the others the likeliest; -1 where logits are not finite.

    With `barred` logits may be -inf, and -2 says that all are.
    """
    by = _drawn_by_kernel if _has_kernel(logits.device) else _drawn_by_torch
    return by(logits, rows, places, random, transfer, barred)


def _has_kernel(device: torch.device) -> bool:
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def _drawn_by_kernel(
    logits: torch.Tensor,
    rows: Sequence[SamplingRow],
    places: npt.NDArray[np.int64],
    random: list[int],
    transfer: Transfer,
    barred: bool,
) -> torch.Tensor:
    from batchgen_kernels.triton_kernels import sampling

    kinds, kind_of = _kinds(rows)
    numbers = np.empty((len(rows), 5), dtype=np.int64)
    numbers[:, [0, 4]] = np.array([(s.seed, s.top_k) for s in kinds], dtype=np.int64)[kind_of]
    for column, values in (
        (1, [row.row for row in rows]),
        (2, [row.sample for row in rows]),
        (3, [row.position for row in rows]),
    ):
        numbers[:, column] = values
    floats = np.array([(0.0, s.min_p, s.top_p) for s in kinds])[kind_of]
    floats[random, 0] = np.array([s.temperature for s in kinds])[kind_of[random]]
    tensors = transfer([places, numbers, floats])
    return sampling.draw(logits, *tensors, barred=barred)


def _kinds(rows: Sequence[SamplingRow]) -> tuple[list[SamplingParams], npt.NDArray[np.int64]]:
    """Sampling parameters, which most rows share, and `(R,)` which of them each row has."""
    # Looked up by identity: comparing them would take longer than to draw.
    kinds = {id(row.sampling): row.sampling for row in rows}
    numbers = {identity: number for number, identity in enumerate(kinds)}
    return list(kinds.values()), np.array([numbers[id(row.sampling)] for row in rows], dtype=np.int64)


def _drawn_by_torch(
    logits: torch.Tensor,
    rows: Sequence[SamplingRow],
    places: npt.NDArray[np.int64],
    random: list[int],
    transfer: Transfer,
    barred: bool,
) -> torch.Tensor:
    (index,) = transfer([places])
    tokens, largest = logits.argmax(-1)[index], logits.amax(-1)[index]
    if random:
        _draw_random(logits, [rows[i] for i in random], places[random], np.array(random), tokens, transfer)
    if barred:
        return torch.where(largest == -torch.inf, _NONE_LEFT, tokens)
    finite = largest.isfinite() & logits.amin(-1)[index].isfinite()
    return torch.where(finite, tokens, _NONFINITE)


def _by_need(rows: Sequence[SamplingRow]) -> tuple[list[int], list[int], list[int]]:
    """Rows without operations, rows with some that can be said in numbers, and rows with others."""
    plain: list[int] = []
    edited: list[int] = []
    own: list[int] = []
    for i, row in enumerate(rows):
        if not row.operations:
            plain.append(i)
            continue
        of_caller = any(isinstance(operation, Custom) for operation in row.operations)
        (own if of_caller else edited).append(i)
    return plain, edited, own


def _draw_edited(logits: torch.Tensor, rows: list[SamplingRow], transfer: Transfer) -> torch.Tensor:
    """`(R,)` tokens of `(R, V)` logits, which are changed, after each row's operations."""
    edits = Edits()
    for number, row in enumerate(rows):
        edits.row = number
        assert row.history is not None, "operations need the tokens so far"
        for operation in row.operations:
            operation.edit(edits, row.history)
    random = [i for i, row in enumerate(rows) if not row.sampling.greedy]
    edited = edits.apply(logits, transfer)
    return _drawn(edited, rows, np.arange(len(rows)), random, transfer, barred=True)


def _choose_on_host(
    logits: torch.Tensor, rows: list[SamplingRow], places: npt.NDArray[np.int64], transfer: Transfer
) -> list[int | RowError | None]:
    (index,) = transfer([places])
    theirs = logits[index].cpu()
    finite = finite_rows(theirs).tolist()
    whole = [i for i, ok in enumerate(finite) if ok]
    found: list[int | RowError | None] = [None] * len(rows)
    for i, token in zip(whole, sample(theirs[whole], [rows[i] for i in whole]), strict=True):
        found[i] = token
    return found


def _draw_random(
    logits: torch.Tensor,
    rows: list[SamplingRow],
    places: npt.NDArray[np.int64],
    targets: npt.NDArray[np.int64],
    tokens: torch.Tensor,
    transfer: Transfer,
) -> None:
    """Into `tokens`, at `targets`, by each row's own noise."""
    settings = [row.sampling for row in rows]
    numbers = [(s.seed, row.row, row.sample, row.position) for s, row in zip(settings, rows, strict=True)]
    columns = transfer(
        [
            places,
            targets,
            uniform(*np.array(numbers, dtype=np.int64).T)[:, None],
            np.array([[s.temperature] for s in settings], dtype=np.float32),
            np.array([[s.min_p] for s in settings], dtype=np.float32),
            np.array([[s.top_k] for s in settings], dtype=np.int64),
            np.array([[s.top_p] for s in settings], dtype=np.float64),
        ]
    )
    step = max(1, _AT_ONCE // logits.shape[1])
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        cut = any(s.top_k > 0 or s.top_p < 1 for s in settings[part])
        index, target, noise, temperature, min_p, top_k, top_p = (column[part] for column in columns)
        probabilities = torch.softmax(logits[index] / temperature, dim=-1)
        largest = probabilities.amax(-1, keepdim=True)
        probabilities = torch.where(probabilities < min_p * largest, 0.0, probabilities)
        if cut:
            probabilities = _keep_likeliest(probabilities, top_k, top_p)
        tokens[target] = _inverse_cdf(probabilities, noise)


def _keep_likeliest(probabilities: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """`keep_top_k`, then `keep_top_p`, with numbers `(R, 1)` of each row's own."""
    width = probabilities.shape[1]
    ranked, order = torch.sort(probabilities, dim=-1, descending=True, stable=True)
    few = (top_k > 0) & (top_k < width)
    border = ranked.gather(1, torch.where(few, top_k, width) - 1)
    ranked = torch.where(ranked < border, 0.0, ranked)
    mass = ranked.double()
    mass_before = mass.cumsum(-1) - mass
    stays = (mass_before < top_p * mass.sum(-1, keepdim=True)) | (top_p >= 1)
    stays[:, :1] = True
    return torch.zeros_like(probabilities).scatter_(1, order, torch.where(stays, ranked, 0.0))


def _inverse_cdf(probabilities: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """`(R,)` tokens of `(R, V)` probabilities and `(R, 1)` float64 noise, as the function of this name finds
    them."""
    cumulated = probabilities.double().cumsum(-1)
    found = torch.searchsorted(cumulated, noise * cumulated[:, -1:], right=True).squeeze(1)
    ids = torch.arange(probabilities.shape[1], device=probabilities.device)
    last = torch.where(probabilities > 0, ids, 0).amax(-1)
    return torch.minimum(found, last)
