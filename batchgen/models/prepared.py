"""A model that needs nothing of transformers any more: what is left of one whose layers are one program.

`batchgen.engine.prepared` keeps it in a file. Once the model that transformers made was checked, tokens are
embedded, positions are rotated, the program runs, and the head makes logits; whether that is all that the
model does is tried on numbers, bit for bit, and not read from its name.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from batchgen.models.forward_context import DecodingContext, current_context
from batchgen.models.layer_attention import LayerAttention
from batchgen.models.object_tree import take_apart
from batchgen.types import Task
from batchgen_kernels.cpu.decoder import DecoderWeights
from batchgen_kernels.cpu.linear import Linear, PackedWeights


def take_rows(table: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """`(R, W)` of `(N, W)`, by `(R,)` int64 numbers.

    torch wakes its other threads for it, which costs more than it saves, and far more where they must wait
    for a processor.
    """
    return torch.from_numpy(np.take(table.numpy(), rows.numpy(), axis=0))


@dataclass(frozen=True, slots=True)
class Rotation:
    """Rotary embedding: the angle of a pair is its frequency times the position.

    Args:
        frequencies: `(head_size / 2,)` float32.
        scaling: of sines and cosines.
    """

    frequencies: torch.Tensor
    scaling: float

    def __call__(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines `(T, head_size)` of `(T,)` positions."""
        angles = positions.float().unsqueeze(1) * self.frequencies
        cos, sin = angles.cos() * self.scaling, angles.sin() * self.scaling
        return torch.cat((cos, cos), dim=-1), torch.cat((sin, sin), dim=-1)


@dataclass(frozen=True, slots=True)
class PreparedWeights:
    """Weights and facts of a model.

    Args:
        embedding: `(vocab, hidden)` float32.
        rotation: of queries and keys.
        decoder: the layers.
        head: what makes logits of hidden states; None where nothing does.
        layers: what each layer's attention needs.
        task: for which it was loaded.
        eos_token_ids: that end a sequence.
        generation: its generation configuration.
        context: the longest sequence it was made for, in tokens.
        longest: that `model.max_model_len` may ask for.
    """

    embedding: torch.Tensor
    rotation: Rotation
    decoder: DecoderWeights
    head: PackedWeights | None
    layers: list[LayerAttention]
    task: Task
    eos_token_ids: tuple[int, ...]
    generation: dict[str, Any]
    context: int
    longest: int


class PreparedModel:
    """In the place of a `LoadedModel`.

    Args:
        weights: whose tensors may lie in a mapped file.
        tensors: of the weights.
    """

    def __init__(self, weights: PreparedWeights, tensors: Iterator[torch.Tensor]) -> None:
        self.weights = weights
        self.task = weights.task
        self.eos_token_ids = weights.eos_token_ids
        self.generation = weights.generation
        self.context, self.longest = weights.context, weights.longest
        self.vocab_size = len(weights.embedding)
        self.dtype = weights.embedding.dtype
        self.memory = torch.nn.Module()
        """Holds the tensors, so that their memory is counted as any model's."""
        for i, tensor in enumerate(tensors):
            self.memory.register_buffer(f"tensor_{i}", tensor, persistent=False)

    def parts(self) -> PreparedParts:
        """What runs it."""
        return PreparedParts(self.weights)


class PreparedParts:
    """As `ModelParts`."""

    def __init__(self, weights: PreparedWeights) -> None:
        self._weights: PreparedWeights | None = weights
        self._product = None if weights.head is None else Linear(weights.head)
        self._latest: torch.Tensor | None = None

    def forward(
        self, input_ids: torch.Tensor, position_ids: torch.Tensor, logits_rows: torch.Tensor
    ) -> torch.Tensor:
        """One pass over `(1, T)` ids and positions.

        Returns:
            `(R, V)` logits of the rows; `(0, 0)` where the model makes no next-token logits.
        """
        context, weights = current_context(), self._weights
        assert weights is not None
        assert isinstance(context, DecodingContext)
        embedded = take_rows(weights.embedding, input_ids[0])
        self._latest = context.decode(embedded, [weights.rotation(position_ids[0])])
        return torch.empty(0, 0) if self._product is None else self.head(take_rows(self._latest, logits_rows))

    @property
    def hidden(self) -> torch.Tensor:
        """`(T, H)` hidden states after the final norm, of the latest pass."""
        assert self._latest is not None
        return self._latest

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """`(R, V)` logits of `(R, H)` hidden states."""
        if self._product is None:
            raise TypeError("a model that was loaded for embeddings has no head")
        return self._product(hidden)

    @property
    def read_bytes(self) -> int:
        """Bytes of weights that a token reads: all but the table that embeds it."""
        weights = self._weights
        assert weights is not None
        _, tensors = take_apart([weights.decoder, weights.head])
        return sum(tensor.nbytes for tensor in tensors.values())

    def products(self) -> Iterator[tuple[str, Any]]:
        """Nothing: all products are in the program, and in `head`."""
        yield from ()

    def close(self) -> None:
        """Let go of the model."""
        self._weights = self._product = self._latest = None
