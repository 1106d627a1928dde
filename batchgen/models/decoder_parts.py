"""Read what the layers of a dense decoder are made of, for programs that compute them.

What a model is made of is read from its parts and their names, and tried on numbers: norms, what embedded
tokens are multiplied by, and which table of rotary positions a layer is given. What nothing here tells (a
twist inside of a layer's `forward`) shows when the output is compared with transformers', at each load.
`decoder.py` packs what was read for the processor, `device_decoder.py` for a device.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

Layer = TypeVar("Layer")
"""What a program takes of a layer."""
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
"""Norms of a layer: where they stand, as `LayerParts` says, by what they are called in a model."""
_ATTENTION = {"q_proj", "k_proj", "v_proj", "o_proj"}
_PACKED_ATTENTION = {"qkv_proj", "o_proj"}
_HEAD_NORMS = {"q_norm", "k_norm"}
_MLP = {"gate_proj", "up_proj", "down_proj", "act_fn"}
_PACKED_MLP = {"gate_up_proj", "down_proj", "activation_fn"}
_ACTIVATIONS = {"SiLU": "silu", "SiLUActivation": "silu", "GELUTanh": "gelu_tanh"}
"""By the class that transformers or torch has for them."""
_CHECKED_ROWS = 3


class OtherwiseBuilt(Exception):
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


@dataclass(frozen=True, slots=True)
class NormParts:
    """Of x / sqrt(mean(x**2) + epsilon) * weight, or times 1 + weight with `unit_offset`; the model's own."""

    weight: torch.Tensor
    epsilon: float
    unit_offset: bool

    @property
    def factor(self) -> torch.Tensor:
        """`(width,)` float32, what is multiplied with."""
        wide = self.weight.float()
        return 1 + wide if self.unit_offset else wide


@dataclass(frozen=True, slots=True)
class LayerParts:
    """One layer, made of the model's own linear layers.

    Args:
        attention_norm: before `qkv`, or None.
        qkv: to queries, keys and values, side by side: three, or one.
        query_norm, key_norm: of each head, or of all heads together, which the width tells; or None.
        rope: the number of the table by which queries and keys turn with their positions, or None.
        output: of attention.
        output_norm: of what `output` gives, before it is added to the hidden states; or None.
        mlp_norm: before `gate_up`, or None.
        gate_up: of a gated unit, side by side: two, or one. They have no bias.
        activation: of the first half, as in `batchgen_kernels.layer_reference.ACTIVATIONS`.
        down: of the gated unit, as `output`.
        down_norm: as `output_norm`.
        multiplier: of what is added to the hidden states.
    """

    attention_norm: NormParts | None
    qkv: list[torch.nn.Linear]
    query_norm: NormParts | None
    key_norm: NormParts | None
    rope: int | None
    output: torch.nn.Linear
    output_norm: NormParts | None
    mlp_norm: NormParts | None
    gate_up: list[torch.nn.Linear]
    activation: str
    down: torch.nn.Linear
    down_norm: NormParts | None
    multiplier: float

    @property
    def kind(self) -> tuple[object, ...]:
        """What all layers of a program have in common: which norms there are, and shapes of products."""
        norms = (self.attention_norm, self.output_norm, self.mlp_norm, self.down_norm)
        products = (*self.qkv, self.output, *self.gate_up, self.down)
        return *(norm is None for norm in norms), *(tuple(linear.weight.shape) for linear in products)


def read_layers(
    body: Any, dtype: torch.dtype, pack: Callable[[LayerParts], Layer]
) -> tuple[list[Layer], NormParts, Preparation]:
    """All layers, packed one after the other, the last norm, and what comes before them.

    Args:
        body: of a model.
        dtype: of all products.
        pack: makes of a layer what a program takes.

    Raises:
        OtherwiseBuilt: the layers are of another kind; none of them was packed.
    """
    _expect("the model", body, _BODY)
    layers = [_read_layer(layer, dtype) for layer in body.layers]
    norm = _norm(body.norm)
    preparation, ropes = _read_preparation(body)
    if len({layer.kind for layer in layers}) != 1:
        raise OtherwiseBuilt("its layers are of different shapes")
    turned = (
        layer if layer.rope is None else replace(layer, rope=rope)
        for layer, rope in zip(layers, ropes, strict=True)
    )
    return [pack(layer) for layer in turned], norm, preparation


def _parts(module: Any) -> set[str]:
    """Names of a module's parts, but for what does nothing in evaluation."""
    return {name for name, part in module.named_children() if not isinstance(part, torch.nn.Dropout)}


def _expect(what: str, module: Any, names: set[str], optional: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    found = _parts(module)
    if not names <= found <= names | optional:
        raise OtherwiseBuilt(f"{what} has the parts {', '.join(sorted(found))}")
    if any(True for _ in module.parameters(recurse=False)):
        raise OtherwiseBuilt(f"{what} has weights of its own")


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
    ids = torch.arange(_CHECKED_ROWS, device=body.embed_tokens.weight.device).unsqueeze(0)
    calls = _Calls()
    for layer in body.layers:
        layer.forward = calls.take
    try:
        body(input_ids=ids, position_ids=ids, use_cache=False)
    except Exception as error:
        raise OtherwiseBuilt(f"layers are given something else ({type(error).__name__}: {error})") from error
    finally:
        for layer in body.layers:
            del layer.forward
    embedded, hidden = body.embed_tokens(ids), calls.hidden[0]
    multipliers = (value for value in (1.0, *vars(body).values()) if isinstance(value, int | float))
    multiplier = next((m for m in multipliers if torch.equal(embedded * m, hidden)), None)
    if multiplier is None or len(calls.hidden) != len(body.layers):
        raise OtherwiseBuilt("embedded tokens become something else before the layers")
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
    raise OtherwiseBuilt("its rotary positions are of an unknown kind")


def _read_layer(layer: Any, dtype: torch.dtype) -> LayerParts:
    """All but the number of the table, if a layer turns its queries and keys."""
    _expect("a layer", layer, _LAYER | set(_norm_names(layer).values()))
    attention = layer.self_attn
    packed = "qkv_proj" in _parts(attention)
    _expect("attention", attention, _PACKED_ATTENTION if packed else _ATTENTION, _HEAD_NORMS)
    inputs = [attention.qkv_proj] if packed else [attention.q_proj, attention.k_proj, attention.v_proj]
    norms = {place: _norm(getattr(layer, name)) for place, name in _norm_names(layer).items()}
    query_norm, key_norm = _head_norms(attention)
    gate_up, activation = _read_gated_unit(layer.mlp)
    return LayerParts(
        attention_norm=norms.get("attention_norm"),
        qkv=[_linear(module, dtype) for module in inputs],
        query_norm=query_norm,
        key_norm=key_norm,
        rope=0 if getattr(attention, "use_rope", True) else None,
        output=_linear(attention.o_proj, dtype),
        output_norm=norms.get("output_norm"),
        mlp_norm=norms.get("mlp_norm"),
        gate_up=[_linear(module, dtype) for module in gate_up],
        activation=activation,
        down=_linear(layer.mlp.down_proj, dtype),
        down_norm=norms.get("down_norm"),
        multiplier=float(getattr(layer, "residual_multiplier", 1.0)),
    )


def _read_gated_unit(mlp: Any) -> tuple[list[Any], str]:
    """What makes its halves, and the activation of the first."""
    packed = "gate_up_proj" in _parts(mlp)
    _expect("the gated unit", mlp, _PACKED_MLP if packed else _MLP)
    halves = [mlp.gate_up_proj] if packed else [mlp.gate_proj, mlp.up_proj]
    if any(getattr(linear, "bias", None) is not None for linear in halves):
        raise OtherwiseBuilt("the gated unit has a bias")
    activation = mlp.activation_fn if packed else mlp.act_fn
    name = _ACTIVATIONS.get(type(activation).__name__)
    if name is None:
        raise OtherwiseBuilt(f"its activation is {type(activation).__name__}")
    return halves, name


def _linear(module: Any, dtype: torch.dtype) -> torch.nn.Linear:
    if type(module) is not torch.nn.Linear or module.weight.dtype != dtype:
        raise OtherwiseBuilt(f"a product is {type(module).__name__}")
    return module


def _head_norms(attention: Any) -> tuple[NormParts | None, NormParts | None]:
    """Of queries and keys: of each head, or of all heads together."""
    if not hasattr(attention, "q_norm"):
        return None, None
    norms = _norm(attention.q_norm), _norm(attention.k_norm)
    size = attention.head_dim
    together = [attention.q_proj.out_features, attention.k_proj.out_features]
    if [len(norm.weight) for norm in norms] not in ([size, size], together):
        raise OtherwiseBuilt("queries and keys are normalised in parts")
    if norms[0].epsilon != norms[1].epsilon:
        raise OtherwiseBuilt("queries and keys are normalised unlike each other")
    return norms


@torch.inference_mode()
def _norm(module: Any) -> NormParts:
    """Of a root-mean-square norm, whose weights count from 0 or from 1; tried on a few rows in float32."""
    weight = getattr(module, "weight", None)
    epsilon = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    if weight is None or weight.dim() != 1 or epsilon is None or getattr(module, "bias", None) is not None:
        raise OtherwiseBuilt(f"a norm is {type(module).__name__}")
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_CHECKED_ROWS, len(weight), generator=generator).to(weight.device)
    plain = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)
    theirs = module(x)
    for unit_offset in (False, True):
        norm = NormParts(weight.detach(), float(epsilon), unit_offset)
        if torch.allclose(plain * norm.factor, theirs.float(), rtol=1e-4, atol=1e-4):
            return norm
    raise OtherwiseBuilt(f"a norm is {type(module).__name__}")
