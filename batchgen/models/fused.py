"""Layers that are one program, as a part of the model that transformers made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, Protocol, TypeVar

import torch
from transformers.modeling_outputs import BaseModelOutputWithPast

from batchgen.models.decoder_parts import Preparation
from batchgen.models.forward_context import DecodingContext, current_context


class _Weights(Protocol):
    def tensors(self) -> Iterator[torch.Tensor]: ...


W = TypeVar("W", bound=_Weights)


class FusedDecoder(torch.nn.Module, Generic[W]):
    """Packed weights of all layers, as buffers, so that their memory is counted with the model."""

    def __init__(self, weights: W, preparation: Preparation) -> None:
        super().__init__()
        self.weights = weights
        self.preparation = preparation
        for i, tensor in enumerate(weights.tensors()):
            self.register_buffer(f"tensor_{i}", tensor, persistent=False)


class FusedBody:
    """In the place of `forward` of a model's body: all its layers as one program of the step's context."""

    def __init__(self, body: Any, decoder: FusedDecoder[Any]) -> None:
        self._body = body
        self._original = body.forward
        self.decoder = decoder
        self.suspended = False

    def __call__(
        self, input_ids: Any = None, position_ids: Any = None, inputs_embeds: Any = None, **options: Any
    ) -> Any:
        if self.suspended or not isinstance(context := current_context(), DecodingContext):
            given = {"input_ids": input_ids, "position_ids": position_ids, "inputs_embeds": inputs_embeds}
            return self._original(**given, **options)
        preparation = self.decoder.preparation
        # The text part of a model for more than text is given what its whole has embedded.
        embedded = self._body.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if preparation.multiplier != 1:
            embedded = embedded * preparation.multiplier
        tables = preparation.tables(self._body.rotary_emb, embedded, position_ids)
        hidden = context.decode(embedded[0], tables)
        return BaseModelOutputWithPast(last_hidden_state=hidden.unsqueeze(0))

    def forget(self) -> None:
        """Never compute as transformers defined it again."""
        self._original = None
