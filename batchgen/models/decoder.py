"""Read the layers of a decoder of the kind that `batchgen_kernels.cpu.decoder` computes.

What a model is made of is read from its parts and their names, and tried on numbers: norms, what embedded
tokens are multiplied by, and which table of rotary positions a layer is given. What nothing here tells (a
twist inside of a layer's `forward`) shows when the output is compared with transformers', at each load.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.activations import GELUTanh

from batchgen_kernels.cpu.decoder import DecoderWeights, LayerWeights, NormWeights
from batchgen_kernels.cpu.linear import PackedWeights, pack, pack_gated
from batchgen_kernels.cpu.matmul import Epilogue
from batchgen_kernels.cpu.quantised_weights import quantised

_BODY = {"embed_tokens", "layers", "norm", "rotary_emb"}
_LAYER = {"self_attn", "mlp"}
_NORMS = (
    {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    {"output_norm": "post_attention_layernorm", "down_norm": "post_feedforward_layernorm"},
    {
        "attention_norm": "input_layernorm",
        "output_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "down_norm": "post_feedforward_layernorm",
    },
)
"""Norms of a layer: where they stand, as `LayerWeights` says, by what they are called in a model."""
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_PACKED_ATTENTION = {"qkv_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_PACKED_MLP = {"gate_up_proj", "down_proj", "activation_fn"}
_CHECKED_ROWS = 3


class _OtherwiseBuilt(Exception):
    """The layers are not of the one kind that is fused; says in what they differ."""


@dataclass(frozen=True, slots=True)
class Preparation:
    """What a model does with embedded tokens before its layers.

    Args:
        multiplier: of embedded tokens.
        rope_kinds: what the rotary embedding is asked for to get each table: a type of layers, or None where
            there is one for all.
        rotary_sizes: widths of the tables.
    """

    multiplier: float
    rope_kinds: Sequence[str | None]
    rotary_sizes: Sequence[int]

    def tables(
        self, rotary: Any, hidden: torch.Tensor, positions: torch.Tensor
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Cosines and sines of positions `(1, T)`, `(T, rotary size)`, of each kind."""
        found = []
        for kind in self.rope_kinds:
            cos, sin = rotary(hidden, positions) if kind is None else rotary(hidden, positions, kind)
            found.append((cos[0], sin[0]))
        return found


class FusedDecoder(torch.nn.Module):
    """Packed weights of all layers, as buffers, so that their memory is counted with the model."""

    def __init__(self, weights: DecoderWeights, preparation: Preparation) -> None:
        super().__init__()
        self.weights = weights
        self.preparation = preparation
        for i, tensor in enumerate(_tensors(weights)):
            self.register_buffer(f"tensor_{i}", tensor, persistent=False)


def _tensors(weights: DecoderWeights) -> Iterator[torch.Tensor]:
    yield weights.norm.weight
    for layer in weights.layers:
        yield from (norm.weight for norm in layer.norms)
        for product in (layer.qkv, layer.output, layer.gate_up, layer.down):
            yield from product.tensors()


def read_decoder(body: Any, *, quantise: bool = False) -> FusedDecoder | str:
    """The weights of all layers, packed, or in what they differ from what is fused.

    Args:
        body: of a model.
        quantise: whether products become int8.
    """
    try:
        _expect("the model", body, _BODY)
        read = _read_quantised if quantise else _read_layer
        layers = [read(layer) for layer in body.layers]
        norm = _norm(body.norm)
        preparation, ropes = _read_preparation(body)
    except _OtherwiseBuilt as difference:
        return str(difference)
    layers = [
        replace(layer, rope=None if layer.rope is None else rope)
        for layer, rope in zip(layers, ropes, strict=True)
    ]
    if len({layer.kind for layer in layers}) != 1:
        return "its layers are of different shapes"
    return FusedDecoder(DecoderWeights(layers, norm, layers[0].qkv.in_features), preparation)


def _parts(module: Any) -> set[str]:
    """Names of a module's parts, but for what does nothing in evaluation."""
    return {name for name, part in module.named_children() if not isinstance(part, torch.nn.Dropout)}


def _expect(what: str, module: Any, names: set[str], optional: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    found = _parts(module)
    if not names <= found <= names | optional:
        raise _OtherwiseBuilt(f"{what} has the parts {', '.join(sorted(found))}")
    if any(True for _ in module.parameters(recurse=False)):
        raise _OtherwiseBuilt(f"{what} has weights of its own")


def _norm_names(layer: Any) -> dict[str, str]:
    """Of those in `_NORMS` the places that fit a layer; the first where none does."""
    found = _parts(layer) - _LAYER
    return next((places for places in _NORMS if set(places.values()) == found), _NORMS[0])


class _Calls:
    """What a model's layers are given in one forward pass, of which they do nothing."""

    def __init__(self) -> None:
        self.hidden: list[torch.Tensor] = []
        self.positions: list[tuple[torch.Tensor, torch.Tensor]] = []

    def take(self, hidden_states: torch.Tensor, *_: Any, **options: Any) -> torch.Tensor:
        """In the place of a layer's `forward`."""
        cos, sin = options["position_embeddings"]
        self.hidden.append(hidden_states)
        self.positions.append((cos, sin))
        return hidden_states


@torch.inference_mode()
def _read_preparation(body: Any) -> tuple[Preparation, list[int]]:
    """What is done before the layers, and the number of each layer's table."""
    ids = torch.arange(_CHECKED_ROWS).unsqueeze(0)
    calls = _Calls()
    for layer in body.layers:
        layer.forward = calls.take
    try:
        body(input_ids=ids, position_ids=ids, use_cache=False)
    except Exception as error:
        raise _OtherwiseBuilt(f"layers are given something else ({type(error).__name__}: {error})") from error
    finally:
        for layer in body.layers:
            del layer.forward
    embedded, hidden = body.embed_tokens(ids), calls.hidden[0]
    multipliers = (value for value in (1.0, *vars(body).values()) if isinstance(value, int | float))
    multiplier = next((m for m in multipliers if torch.equal(embedded * m, hidden)), None)
    if multiplier is None or len(calls.hidden) != len(body.layers):
        raise _OtherwiseBuilt("embedded tokens become something else before the layers")
    kinds: dict[str | None, int] = {}
    tables = [kinds.setdefault(_rope_kind(body, hidden, ids, p), len(kinds)) for p in calls.positions]
    sizes = {int(cos.shape[-1]) for cos, _ in calls.positions}
    return Preparation(float(multiplier), tuple(kinds), tuple(sizes)), tables


def _rope_kind(
    body: Any, hidden: torch.Tensor, positions: torch.Tensor, given: tuple[torch.Tensor, torch.Tensor]
) -> str | None:
    """What a rotary embedding is asked for to give this table."""
    by_type = sorted(set(getattr(body.config, "layer_types", None) or ()))
    takes_type = "layer_type" in inspect.signature(body.rotary_emb.forward).parameters
    for kind in by_type if takes_type else [None]:
        found = body.rotary_emb(hidden, positions, kind) if takes_type else body.rotary_emb(hidden, positions)
        if all(torch.equal(a, b) for a, b in zip(found, given, strict=True)):
            return kind
    raise _OtherwiseBuilt("its rotary positions are of an unknown kind")


def _read_layer(layer: Any) -> LayerWeights:
    """All but the number of the table, if a layer turns its queries and keys."""
    _expect("a layer", layer, _LAYER | set(_norm_names(layer).values()))
    attention = layer.self_attn
    packed = "qkv_proj" in _parts(attention)
    _expect("attention", attention, _PACKED_ATTENTION if packed else _ATTENTION, _HEAD_NORMS)
    inputs = [attention.qkv_proj] if packed else [attention.q_proj, attention.k_proj, attention.v_proj]
    norms = {place: _norm(getattr(layer, name)) for place, name in _norm_names(layer).items()}
    query_norm, key_norm = _head_norms(attention)
    multiplier = float(getattr(layer, "residual_multiplier", 1.0))
    gate_up, down = _read_mlp(layer.mlp)
    return LayerWeights(
        attention_norm=norms.get("attention_norm"),
        qkv=_joined([_linear(module) for module in inputs]),
        query_norm=query_norm,
        key_norm=key_norm,
        rope=0 if getattr(attention, "use_rope", True) else None,
        output=_behind(attention.o_proj, multiplier, adds="output_norm" not in norms),
        output_norm=_times(norms.get("output_norm"), multiplier),
        mlp_norm=norms.get("mlp_norm"),
        gate_up=gate_up,
        down=_behind(down, multiplier, adds="down_norm" not in norms),
        down_norm=_times(norms.get("down_norm"), multiplier),
    )


def _read_mlp(mlp: Any) -> tuple[PackedWeights, Any]:
    """The gated unit, and the linear layer behind it."""
    if "gate_up_proj" in _parts(mlp):
        _expect("the gated unit", mlp, _PACKED_MLP)
        both = _linear(mlp.gate_up_proj)
        gate, up = both.weight.chunk(2)
        return _gated(gate, up, both.bias is not None, mlp.activation_fn), mlp.down_proj
    _expect("the gated unit", mlp, _MLP)
    halves = [_linear(mlp.gate_proj), _linear(mlp.up_proj)]
    has_bias = any(linear.bias is not None for linear in halves)
    return _gated(halves[0].weight, halves[1].weight, has_bias, mlp.act_fn), mlp.down_proj


def _read_quantised(layer: Any) -> LayerWeights:
    """One layer at a time, so that all of them never lie in memory in float32."""
    read = _read_layer(layer)
    return replace(
        read,
        qkv=quantised(read.qkv),
        output=quantised(read.output),
        gate_up=quantised(read.gate_up),
        down=quantised(read.down),
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


def _behind(linear: Any, multiplier: float, *, adds: bool) -> PackedWeights:
    """A product whose result is added to the hidden states, at once or by a norm behind it.

    A multiplier is part of the weights, or else of the norm's.
    """
    weight, bias = _linear(linear).weight, linear.bias
    if not adds:
        return pack(weight, bias)
    if multiplier != 1:
        weight, bias = weight * multiplier, None if bias is None else bias * multiplier
    return replace(pack(weight, bias), epilogue=Epilogue.ADD)


def _times(norm: NormWeights | None, multiplier: float) -> NormWeights | None:
    return norm and replace(norm, weight=norm.weight * multiplier)


def _gated(gate: torch.Tensor, up: torch.Tensor, has_bias: bool, activation: Any) -> PackedWeights:
    if has_bias:
        raise _OtherwiseBuilt("the gated unit has a bias")
    activations = {torch.nn.SiLU: Epilogue.SILU, GELUTanh: Epilogue.GELU_TANH}
    by_name = {"SiLUActivation": Epilogue.SILU, "SiLU": Epilogue.SILU}
    kind = activations.get(type(activation)) or by_name.get(type(activation).__name__)
    if kind is None:
        raise _OtherwiseBuilt(f"its activation is {type(activation).__name__}")
    return pack_gated(gate, up, kind)


def _head_norms(attention: Any) -> tuple[NormWeights | None, NormWeights | None]:
    """Of queries and keys: of each head, or of all heads together."""
    if not hasattr(attention, "q_norm"):
        return None, None
    norms = _norm(attention.q_norm), _norm(attention.k_norm)
    size = attention.head_dim
    together = [attention.q_proj.out_features, attention.k_proj.out_features]
    if [len(norm.weight) for norm in norms] not in ([size, size], together):
        raise _OtherwiseBuilt("queries and keys are normalised in parts")
    if norms[0].epsilon != norms[1].epsilon:
        raise _OtherwiseBuilt("queries and keys are normalised unlike each other")
    return norms


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
