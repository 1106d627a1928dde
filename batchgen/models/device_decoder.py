"""Pack the layers of a decoder for `batchgen_kernels.triton_kernels.program`, the program on devices.

Products that read the same are joined, and the model's own weights become views of the joined ones: memory is
needed once, and the model can still compute as transformers defined it.
"""

from __future__ import annotations

from typing import Any

import torch

from batchgen.models.decoder_parts import LayerParts, NormParts, OtherwiseBuilt, read_layers
from batchgen.models.fused import FusedDecoder
from batchgen_kernels.triton_kernels.program import DeviceLayer, DeviceNorm, DeviceProduct, DeviceWeights


@torch.inference_mode(False)
@torch.no_grad()
def read_device_decoder(body: Any) -> FusedDecoder[DeviceWeights] | str:
    """The weights of all layers, joined, or in what they differ from what is fused.

    Args:
        body: of a model, on its device and in its dtype; weights that are joined become views.
    """
    try:
        layers, norm, preparation = read_layers(body, body.embed_tokens.weight.dtype, _joined_layer)
    except OtherwiseBuilt as difference:
        return str(difference)
    return FusedDecoder(DeviceWeights(layers, _norm(norm)), preparation)


def _joined_layer(parts: LayerParts) -> DeviceLayer:
    return DeviceLayer(
        attention_norm=_norm_if_any(parts.attention_norm),
        qkv=_joined(parts.qkv),
        query_norm=_norm_if_any(parts.query_norm),
        key_norm=_norm_if_any(parts.key_norm),
        rope=parts.rope,
        output=_joined([parts.output]),
        output_norm=_norm_if_any(parts.output_norm),
        mlp_norm=_norm_if_any(parts.mlp_norm),
        gate_up=_joined(parts.gate_up),
        activation=parts.activation,
        down=_joined([parts.down]),
        down_norm=_norm_if_any(parts.down_norm),
        multiplier=parts.multiplier,
    )


def _norm(norm: NormParts) -> DeviceNorm:
    return DeviceNorm(norm.weight.detach(), norm.epsilon, norm.unit_offset)


def _norm_if_any(norm: NormParts | None) -> DeviceNorm | None:
    return None if norm is None else _norm(norm)


def _joined(linears: list[torch.nn.Linear]) -> DeviceProduct:
    """One product of several; a bias of 0 where only some have one."""
    if len(linears) == 1:
        (linear,) = linears
        return DeviceProduct(linear.weight.detach(), None if linear.bias is None else linear.bias.detach())
    weight = torch.cat([linear.weight for linear in linears])
    bias = None
    if any(linear.bias is not None for linear in linears):
        bias = torch.cat([x.weight.new_zeros(len(x.weight)) if x.bias is None else x.bias for x in linears])
    start = 0
    for linear in linears:
        own = slice(start, start + len(linear.weight))
        linear.weight = torch.nn.Parameter(weight[own], requires_grad=False)
        if bias is not None and linear.bias is not None:
            linear.bias = torch.nn.Parameter(bias[own], requires_grad=False)
        start = own.stop
    return DeviceProduct(weight, bias)
