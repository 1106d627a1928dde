"""Layers that are one program, as a part of the model that transformers made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Generic, Protocol, TypeVar

import torch
from transformers import PreTrainedModel
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


class Fusion(Generic[W]):
    """The layers of a model put in one program, if they can be, and the way back.

    Until `settle` the model can still compute as transformers defined it, so that both can be compared.

    Args:
        model: it is changed.
        body: the part of it whose layers attend.
        found: the layers as a program takes them, or why there is none.
    """

    def __init__(self, model: PreTrainedModel, body: Any, found: FusedDecoder[W] | str) -> None:
        self._model = model
        self._body = body
        self.decoder = found if isinstance(found, FusedDecoder) else None
        self.reason = None if isinstance(found, FusedDecoder) else found
        """Why the layers are not one program."""
        self._fused = FusedBody(body, self.decoder) if self.decoder else None
        if self._fused:
            body.forward = self._fused
            body.add_module("fused", self.decoder)

    @property
    def description(self) -> str:
        """How the layers are computed, for a person."""
        if self.decoder:
            return "one program of our own kernels and the library's products"
        return f"transformers' own, as {self.reason}"

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Let the model compute as transformers defined it."""
        self._suspend(True)
        try:
            yield
        finally:
            self._suspend(False)

    def _suspend(self, value: bool) -> None:
        if self._fused:
            self._fused.suspended = value

    def unfuse(self, reason: str) -> None:
        """Give the layers back."""
        assert self._fused is not None
        del self._body.forward
        del self._body.fused
        self._fused = self.decoder = None
        self.reason = reason

    def settle(self) -> None:
        """Give back the memory of what is not used any more; there is no way back then."""
        if self._fused:
            self._body.layers = torch.nn.ModuleList()
            self._fused.forget()

    def kept(self) -> list[torch.nn.Module]:
        """Modules that are there when all is settled."""
        ours = set(self._body.layers.modules()) if self._fused else set()
        return [module for module in self._model.modules() if module not in ours]

    def remaining(self) -> list[torch.nn.Module]:
        """Modules with products that a library computes."""
        return list(self._model.modules())
