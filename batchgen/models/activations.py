"""Make activation functions independent of how many rows share the call.

torch splits an elementwise operation over threads by the number of elements, and computes the end of
each thread's share, where it does not fill a vector, with scalar code whose bits differ. With three or
more threads the borders move with the number of rows. Working on slices too small to be split, each of
whole rows, leaves no border inside a row that another number of rows would put elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from transformers.activations import ACT2CLS

# torch's grain: an elementwise operation of at most this many elements runs on one thread.
GRAIN = 32768


class RowwiseActivation(torch.nn.Module):
    """An activation applied to slices of whole rows.

    Args:
        inner: elementwise, without parameters.
    """

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Elementwise on `(..., features)`; the result has the same shape."""
        rows = x.reshape(-1, x.shape[-1])
        # A row whose length is no multiple of a vector ends in scalar code wherever it stands only if it
        # stands alone.
        step = max(1, GRAIN // rows.shape[1]) if rows.shape[1] % 64 == 0 else 1
        out = torch.empty_like(rows)
        for i in range(0, len(rows), step):
            out[i : i + step] = self.inner(rows[i : i + step])
        return out.view(x.shape)


def activation_modules(
    modules: Iterable[torch.nn.Module],
) -> list[tuple[torch.nn.Module, str, torch.nn.Module]]:
    """(parent, attribute, activation) of every activation function that is a module, of these parents."""
    known = {entry[0] if isinstance(entry, tuple) else entry for entry in ACT2CLS.values()}
    return [
        (parent, name, child)
        for parent in modules
        for name, child in parent.named_children()
        if type(child) in known | {RowwiseActivation} and not isinstance(parent, RowwiseActivation)
    ]


def make_activations_rowwise(model: torch.nn.Module) -> None:
    """Replace every activation module by one that works on slices of rows."""
    for parent, name, child in activation_modules(model.modules()):
        if not isinstance(child, RowwiseActivation):
            setattr(parent, name, RowwiseActivation(child))
