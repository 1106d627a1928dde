"""Read the layers of a decoder that is built like Llama's, for `batchgen_kernels.cpu.decoder`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from transformers.activations import GELUTanh

from batchgen_kernels.cpu.decoder import DecoderWeights, LayerWeights, NormWeights
from batchgen_kernels.cpu.linear import PackedWeights, pack, pack_gated
from batchgen_kernels.cpu.matmul import Epilogue

_BODY = {"embed_tokens", "layers", "norm", "rotary_emb"}
_LAYER = {"input_layernorm", "self_attn", "post_attention_layernorm", "mlp"}
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_CHECKED_ROWS = 3


class _OtherwiseBuilt(Exception):
    """The layers are not of the one kind that is fused; says in what they differ."""


class FusedDecoder(torch.nn.Module):
    """Packed weights of all layers, as buffers, so that their memory is counted with the model."""

    def __init__(self, weights: DecoderWeights) -> None:
        super().__init__()
        self.weights = weights
        for i, tensor in enumerate(_tensors(weights)):
            self.register_buffer(f"tensor_{i}", tensor, persistent=False)


def _tensors(weights: DecoderWeights) -> Iterator[torch.Tensor]:
    yield weights.norm.weight
    for layer in weights.layers:
        norms = (layer.attention_norm, layer.query_norm, layer.key_norm, layer.mlp_norm)
        yield from (norm.weight for norm in norms if norm is not None)
        for product in (layer.qkv, layer.output, layer.gate_up, layer.down):
            yield product.panels
            if product.bias is not None:
                yield product.bias


def read_decoder(body: Any) -> FusedDecoder | str:
    """The weights of all layers, packed, or in what they differ from what is fused."""
    try:
        _expect("the model", body, _BODY)
        layers = [_read_layer(layer) for layer in body.layers]
        norm = _norm(body.norm)
    except _OtherwiseBuilt as difference:
        return str(difference)
    shapes = {
        tuple(p.panels.shape for p in (layer.qkv, layer.output, layer.gate_up, layer.down))
        for layer in layers
    }
    if len(shapes) != 1:
        return "its layers are of different shapes"
    return FusedDecoder(DecoderWeights(layers, norm, layers[0].qkv.in_features))


def _expect(what: str, module: Any, names: set[str], optional: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    found = {name for name, _ in module.named_children()}
    if not names <= found <= names | optional:
        raise _OtherwiseBuilt(f"{what} has the parts {', '.join(sorted(found))}")
    if any(True for _ in module.parameters(recurse=False)):
        raise _OtherwiseBuilt(f"{what} has weights of its own")


def _read_layer(layer: Any) -> LayerWeights:
    _expect("a layer", layer, _LAYER)
    attention, mlp = layer.self_attn, layer.mlp
    _expect("attention", attention, _ATTENTION, _HEAD_NORMS)
    _expect("the gated unit", mlp, _MLP)
    for linear in (attention.q_proj, attention.k_proj, attention.v_proj, attention.o_proj):
        _linear(linear)
    has_norms = hasattr(attention, "q_norm")
    return LayerWeights(
        attention_norm=_norm(layer.input_layernorm),
        qkv=_joined([attention.q_proj, attention.k_proj, attention.v_proj]),
        query_norm=_head_norm(attention.q_norm, attention) if has_norms else None,
        key_norm=_head_norm(attention.k_norm, attention) if has_norms else None,
        rotates=bool(getattr(attention, "use_rope", True)),
        output=_added(attention.o_proj),
        mlp_norm=_norm(layer.post_attention_layernorm),
        gate_up=_gated(mlp),
        down=_added(mlp.down_proj),
    )


def _linear(module: Any) -> Any:
    if type(module) is not torch.nn.Linear or module.weight.dtype != torch.float32:
        raise _OtherwiseBuilt(f"a product is {type(module).__name__}")
    return module


def _joined(linears: list[Any]) -> PackedWeights:
    weight = torch.cat([linear.weight for linear in linears])
    if all(linear.bias is None for linear in linears):
        return pack(weight)
    missing = weight.new_zeros(1)
    return pack(
        weight,
        torch.cat([missing.expand(len(x.weight)) if x.bias is None else x.bias for x in linears]),
    )


def _added(linear: Any) -> PackedWeights:
    packed = pack(_linear(linear).weight, linear.bias)
    return PackedWeights(packed.panels, packed.bias, packed.out_features, Epilogue.ADD)


def _gated(mlp: Any) -> PackedWeights:
    gate, up = _linear(mlp.gate_proj), _linear(mlp.up_proj)
    if gate.bias is not None or up.bias is not None:
        raise _OtherwiseBuilt("the gated unit has a bias")
    activations = {torch.nn.SiLU: Epilogue.SILU, GELUTanh: Epilogue.GELU_TANH}
    by_name = {"SiLUActivation": Epilogue.SILU, "SiLU": Epilogue.SILU}
    kind = activations.get(type(mlp.act_fn)) or by_name.get(type(mlp.act_fn).__name__)
    if kind is None:
        raise _OtherwiseBuilt(f"its activation is {type(mlp.act_fn).__name__}")
    return pack_gated(gate.weight, up.weight, kind)


def _head_norm(module: Any, attention: Any) -> NormWeights:
    norm = _norm(module)
    if len(module.weight) != attention.head_dim:
        raise _OtherwiseBuilt("queries are normalised as a whole")
    return norm


@torch.inference_mode()
def _norm(module: Any) -> NormWeights:
    """Of a root-mean-square norm, whose weights count from 0 or from 1; tried on a few rows."""
    weight = getattr(module, "weight", None)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if weight is None or weight.dim() != 1 or epsilon is None or getattr(module, "bias", None) is not None:
        raise _OtherwiseBuilt(f"a norm is {type(module).__name__}")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_CHECKED_ROWS, len(weight), generator=generator)
    plain = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)
    theirs = module(x)
    for factor in (weight, 1 + weight):
        if torch.allclose(plain * factor, theirs, rtol=1e-4, atol=1e-4):
            return NormWeights(factor.contiguous(), float(epsilon))
    raise _OtherwiseBuilt(f"a norm is {type(module).__name__}")
