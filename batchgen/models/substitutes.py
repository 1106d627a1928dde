"""Put our own products and layers in the place of a model's, for float32 on the processor.

Linear layers become products with packed weights; the layers of a decoder that is built like Llama's become
one program. Which modules are what is read from their structure and tried on numbers, not from a list of
models. Until `settle` the model can still compute as transformers defined it, so that both can be compared.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from batchgen.models.balance import InputSizes, balancing, input_sizes
from batchgen.models.decoder import read_decoder
from batchgen.models.dtypes import precision
from batchgen.models.fused import Fusion
from batchgen.models.quantised_products import quantised_product
from batchgen_kernels.cpu.decoder import DecoderWeights
from batchgen_kernels.cpu.linear import Linear, feature_sizes, pack

_FEWEST = 64
"""Features of a product that is worth int8, to and from: less takes no time, and may be a score or a gate."""


class PackedLinear(torch.nn.Module):
    """A linear layer with packed weights.

    Args:
        original: whose results these are, but for rounding.
        quantise: whether the weights become int8.
        inputs: how large each feature of its inputs is, `(in_features,)`, where that is known.
    """

    def __init__(
        self, original: torch.nn.Module, *, quantise: bool = False, inputs: torch.Tensor | None = None
    ) -> None:
        super().__init__()
        weight: Any = original.weight
        weights = pack(weight.T if isinstance(original, Conv1D) else weight, original.bias)  # type: ignore[arg-type]
        if quantise:
            weights = quantised_product(weights, balancing(inputs, feature_sizes(weights)))
        self.weights = weights
        self.original: torch.nn.Module | None = original
        self.suspended = False
        for i, tensor in enumerate(weights.tensors()):
            self.register_buffer(f"tensor_{i}", tensor, persistent=False)
        self._product = Linear(weights)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """`(..., in_features)` to `(..., out_features)`."""
        if self.suspended and self.original is not None:
            result: torch.Tensor = self.original(x)
            return result
        return self._product(x)


class Substitutes(Fusion[DecoderWeights]):
    """What was put into a model, and the way back.

    Args:
        model: in float32 on the processor; it is changed.
        body: the part of it whose layers attend.
        quantise: whether products become int8.
    """

    def __init__(self, model: PreTrainedModel, body: Any, *, quantise: bool = False) -> None:
        self._sizes: InputSizes | None = input_sizes(model, body) if quantise else None
        super().__init__(model, body, read_decoder(body, sizes=self._sizes))
        self._linears: list[PackedLinear] = []
        self._pack_linears()

    @torch.inference_mode()
    def _pack_linears(self) -> None:
        for parent in self.remaining():
            child: Any
            for name, child in list(parent.named_children()):
                if type(child) in (torch.nn.Linear, Conv1D) and child.weight.dtype == torch.float32:
                    quantise = self._sizes is not None and min(child.weight.shape) >= _FEWEST
                    inputs = self._sizes.get(child) if self._sizes else None
                    packed = PackedLinear(child, quantise=quantise, inputs=inputs)
                    setattr(parent, name, packed)
                    self._linears.append(packed)

    @property
    def description(self) -> str:
        """How the layers are computed, for a person."""
        if self.decoder:
            return f"one program of our own products{self._precision()}"
        count = len(self._linears)
        return f"transformers' own with {count} products of ours{self._precision()}, as {self.reason}"

    def _precision(self) -> str:
        modules = [m for m in self.remaining() if any(p.dim() > 1 for p in m.parameters(recurse=False))]
        others = {"embeddings" if isinstance(m, torch.nn.Embedding) else type(m).__name__ for m in modules}
        if not all(linear.weights.quantised for linear in self._linears):
            others.add("products of few numbers")
        return precision(None if self._sizes is None else "int8", others)

    def _suspend(self, value: bool) -> None:
        super()._suspend(value)
        for linear in self._linears:
            linear.suspended = value

    def unfuse(self, reason: str) -> None:
        """Give the layers back; their linear layers are packed each by itself."""
        super().unfuse(reason)
        self._pack_linears()

    def settle(self) -> None:
        """See `Fusion`."""
        super().settle()
        for linear in self._linears:
            linear.original = None
        if self._sizes is not None:
            self._sizes = {}

    def kept(self) -> list[torch.nn.Module]:
        """See `Fusion`."""
        return [*self.remaining(), *self._linears]

    def remaining(self) -> list[torch.nn.Module]:
        """Modules that compute as transformers defined them."""
        ours: set[torch.nn.Module] = set()
        for linear in self._linears:
            ours |= set(linear.modules())
        return [module for module in super().kept() if module not in ours]
