"""Pack the layers of a decoder for `batchgen_kernels.cpu.decoder`, the program on processors."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import torch

from batchgen.models.balance import InputSizes, balancing
from batchgen.models.decoder_parts import LayerParts, NormParts, OtherwiseBuilt, read_layers
from batchgen.models.fused import FusedDecoder
from batchgen.models.quantised_products import quantised_product
from batchgen_kernels.cpu.decoder import DecoderWeights, LayerWeights, NormWeights
from batchgen_kernels.cpu.linear import (
    PackedWeights,
    feature_sizes,
    pack,
    pack_gated,
    scaled,
    scaled_gated,
)
from batchgen_kernels.cpu.matmul import Epilogue

_EPILOGUES = {"silu": Epilogue.SILU, "gelu_tanh": Epilogue.GELU_TANH}


def read_decoder(body: Any, sizes: InputSizes | None = None) -> FusedDecoder[DecoderWeights] | str:
    """The weights of all layers, packed, or in what they differ from what is fused.

    Args:
        body: of a model in float32.
        sizes: of the inputs of its linear layers, where products are to become int8.
    """
    layer = _packed if sizes is None else partial(_quantised, sizes=sizes)
    try:
        layers, norm, preparation = read_layers(body, torch.float32, layer)
    except OtherwiseBuilt as difference:
        return str(difference)
    return FusedDecoder(DecoderWeights(layers, _norm(norm), layers[0].qkv.in_features), preparation)


def _packed(parts: LayerParts) -> LayerWeights:
    """A multiplier is part of the weights of the product whose result is added, or of the norm behind it."""
    return LayerWeights(
        attention_norm=_norm_if_any(parts.attention_norm),
        qkv=_joined(parts.qkv),
        query_norm=_norm_if_any(parts.query_norm),
        key_norm=_norm_if_any(parts.key_norm),
        rope=parts.rope,
        output=_behind(parts.output, parts.multiplier, adds=parts.output_norm is None),
        output_norm=_norm_if_any(parts.output_norm, parts.multiplier),
        mlp_norm=_norm_if_any(parts.mlp_norm),
        gate_up=_gated(parts),
        down=_behind(parts.down, parts.multiplier, adds=parts.down_norm is None),
        down_norm=_norm_if_any(parts.down_norm, parts.multiplier),
    )


def _quantised(parts: LayerParts, *, sizes: InputSizes) -> LayerWeights:
    """One layer at a time, so that all of them never lie in memory in float32.

    What inputs are multiplied by for balance is part of the norm before, or of the gated unit's second half.
    """
    layer = _packed(parts)
    attention_norm, qkv = _balanced(layer.attention_norm, layer.qkv, sizes.get(parts.qkv[0]))
    mlp_norm, gate_up = _balanced(layer.mlp_norm, layer.gate_up, sizes.get(parts.gate_up[0]))
    down, balance = layer.down, balancing(sizes.get(parts.down), feature_sizes(layer.down))
    if balance is not None:
        gate_up, down = scaled_gated(gate_up, balance), scaled(down, 1 / balance)
    return replace(
        layer,
        attention_norm=attention_norm,
        qkv=quantised_product(qkv),
        output=quantised_product(layer.output),
        mlp_norm=mlp_norm,
        gate_up=quantised_product(gate_up),
        down=quantised_product(down),
    )


def _balanced(
    norm: NormWeights | None, product: PackedWeights, inputs: torch.Tensor | None
) -> tuple[NormWeights | None, PackedWeights]:
    balance = None if norm is None else balancing(inputs, feature_sizes(product))
    if norm is None or balance is None:
        return norm, product
    return replace(norm, weight=norm.weight * balance), scaled(product, 1 / balance)


def _norm(norm: NormParts, multiplier: float = 1.0) -> NormWeights:
    factor = norm.factor if multiplier == 1 else norm.factor * multiplier
    return NormWeights(factor.contiguous(), norm.epsilon)


def _norm_if_any(norm: NormParts | None, multiplier: float = 1.0) -> NormWeights | None:
    return None if norm is None else _norm(norm, multiplier)


def _joined(linears: list[torch.nn.Linear]) -> PackedWeights:
    weight = torch.cat([linear.weight for linear in linears])
    if all(linear.bias is None for linear in linears):
        return pack(weight)
    missing = weight.new_zeros(1)
    return pack(
        weight,
        torch.cat([missing.expand(len(x.weight)) if x.bias is None else x.bias for x in linears]),
    )


def _behind(linear: torch.nn.Linear, multiplier: float, *, adds: bool) -> PackedWeights:
    """A product whose result is added to the hidden states, at once or by a norm behind it."""
    weight: torch.Tensor = linear.weight
    bias: torch.Tensor | None = linear.bias
    if not adds:
        return pack(weight, bias)
    if multiplier != 1:
        weight, bias = weight * multiplier, None if bias is None else bias * multiplier
    return replace(pack(weight, bias), epilogue=Epilogue.ADD)


def _gated(parts: LayerParts) -> PackedWeights:
    weights = [linear.weight for linear in parts.gate_up]
    gate, up = weights if len(weights) == 2 else weights[0].chunk(2)
    return pack_gated(gate, up, _EPILOGUES[parts.activation])
