"""What programs of a decoder's layers have in common, whatever computes them. The model runner calls them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from batchgen_kernels.backend import KVCache
from batchgen_kernels.metadata import AttentionMetadata, NeededRows
from batchgen_kernels.spec import AttentionSpec


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """What a layer attends to: its cache, and the number of the metadata of a step that tells where."""

    spec: AttentionSpec
    cache: KVCache
    group: int
    sinks: torch.Tensor | None = None


class OperationSeconds(Protocol):
    """How long operations took since they are watched."""

    def seconds(self) -> dict[str, float]:
        """Of each kind."""
        ...


class LayersProgram(Protocol):
    """Runs a decoder's layers over a packed step; one caller at a time."""

    @property
    def buffer_bytes(self) -> int:
        """Memory that is kept for the activations of a step."""
        ...

    def run(
        self,
        hidden: torch.Tensor,
        tables: Sequence[tuple[torch.Tensor, torch.Tensor]],
        metadata: Sequence[AttentionMetadata],
        needed: NeededRows | None = None,
    ) -> torch.Tensor:
        """Write keys and values of the step's tokens and compute all layers.

        Args:
            hidden: `(T, H)`, the embedded tokens.
            tables: cosines and sines of the step's positions, `(T, rotary size)`, by which the first
                numbers of a head turn.
            metadata: of each group of layers.
            needed: the rows that are read; all of them unless given.

        Returns:
            `(T, H)`, after the last norm; rows that are not needed may be NaN.
        """
        ...

    def watch(self) -> OperationSeconds | None:
        """From now on add up how long each kind of operation takes; None where that is not known."""
        ...
