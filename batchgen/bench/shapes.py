"""What a model multiplies for a token, read from its configuration; and what a set of rows needs of it.

Counts floating-point operations of products with weights and of attention, two for each multiply-add. Norms,
rotations and activations are a few thousandths of that and are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from batchgen.bench.parts import HEAD, KINDS
from batchgen_kernels.spec import AttentionSpec

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True, slots=True)
class Product:
    """A product of one kind: `count` of them in a model, `in_features` to `out_features`."""

    kind: str
    in_features: int
    out_features: int
    count: int

    @property
    def flop(self) -> int:
        """Of a row through one of them."""
        return 2 * self.in_features * self.out_features


@dataclass(frozen=True, slots=True)
class ModelShapes:
    """What a row is multiplied with.

    Args:
        products: of all layers; those of one kind and layer that read the same input are one.
        head: makes logits.
        attention: of each layer.
    """

    products: tuple[Product, ...]
    head: Product
    attention: tuple[AttentionSpec, ...]

    @property
    def body_flop(self) -> int:
        """Of a token through all layers, without attention."""
        return sum(product.flop * product.count for product in self.products)

    @property
    def last_flop(self) -> int:
        """Of a token through what follows attention in the last of layers that are all alike."""
        behind = (p.flop * p.count for p in self.products if p.kind != KINDS["qkv_proj"])
        return sum(behind) // len(self.attention)

    def attention_flop(self, start: int, stop: int) -> int:
        """Of the tokens at positions `start` to `stop` (exclusive) of one sequence."""
        return sum(_attention_flop(spec, start, stop) for spec in self.attention)

    def last_attention_flop(self, start: int, stop: int) -> int:
        """The same in the last layer."""
        return _attention_flop(self.attention[-1], start, stop)


@dataclass(frozen=True, slots=True)
class Need:
    """Floating-point operations that rows need, and how many tokens pass the layers and the head."""

    tokens: int
    read: int
    products: int
    attention: int

    @property
    def total(self) -> int:
        """Of everything."""
        return self.products + self.attention


class Work(NamedTuple):
    """A row: its prompt, how many tokens after it are fed to the model, how many positions to the head."""

    prompt: Sequence[int]
    fed: int
    read: int


def generating(prompt: Sequence[int], tokens: int) -> Work:
    """A row that generates; the last new token is not fed back."""
    return Work(prompt, max(0, tokens - 1), tokens)


def needed(shapes: ModelShapes, rows: Sequence[Work], *, shared: bool) -> Need:
    """What rows need.

    Args:
        shapes: of the model.
        rows: one or more.
        shared: whether what all prompts begin with is computed once.
    """
    prefix = common_prefix([row.prompt for row in rows]) if shared and len(rows) > 1 else 0
    tokens = attention = 0
    for number, row in enumerate(rows):
        start, stop = prefix if number else 0, len(row.prompt) + row.fed
        tokens += stop - start
        attention += shapes.attention_flop(start, stop)
    read = sum(row.read for row in rows)
    return Need(tokens, read, tokens * shapes.body_flop + read * shapes.head.flop, attention)


def common_prefix(prompts: Sequence[Sequence[int]]) -> int:
    """Tokens that all prompts begin with, one less than the shortest at most: its last must be computed."""
    shared, most = 0, min(map(len, prompts)) - 1
    while shared < most and all(prompt[shared] == prompts[0][shared] for prompt in prompts):
        shared += 1
    return max(0, shared)


def model_shapes(config: PretrainedConfig, attention: Sequence[AttentionSpec]) -> ModelShapes | None:
    """The shapes of a causal model; None where its configuration makes none, or one whose weights are not
    all used for each token, as those of experts."""
    from transformers import AutoModelForCausalLM
    from transformers.pytorch_utils import Conv1D

    plain = type(config).from_dict(config.to_dict())
    try:
        with torch.device("meta"):
            build: Any = AutoModelForCausalLM.from_config
            model = build(plain)
    except (ValueError, TypeError, AttributeError, KeyError):
        return None
    if any(parameter.dim() > 2 for parameter in model.parameters()) or "expert" in _names(model):
        return None
    head = model.get_output_embeddings()
    if head is None:
        return None
    found: dict[tuple[str, str], Product] = {}
    for name, module in model.named_modules():
        if module is head or not isinstance(module, torch.nn.Linear | Conv1D):
            continue
        layer, _, own = name.rpartition(".")
        rows, columns = module.weight.shape
        inputs, outputs = (rows, columns) if isinstance(module, Conv1D) else (columns, rows)
        kind = KINDS.get(own, own)
        before = found.get((layer, kind))
        joined = outputs + (0 if before is None else before.out_features)
        found[layer, kind] = Product(kind, inputs, joined, 1)
    vocabulary, width = head.weight.shape
    return ModelShapes(_counted(found.values()), Product(HEAD, width, vocabulary, 1), tuple(attention))


def _attention_flop(spec: AttentionSpec, start: int, stop: int) -> int:
    widths = spec.head_size + spec.v_head_size
    return 2 * spec.num_heads * widths * _seen(start, stop, spec.sliding_window)


def _names(model: torch.nn.Module) -> str:
    return " ".join(name for name, _ in model.named_modules())


def _counted(products: Any) -> tuple[Product, ...]:
    counts: dict[tuple[str, int, int], int] = {}
    for p in products:
        key = (p.kind, p.in_features, p.out_features)
        counts[key] = counts.get(key, 0) + 1
    return tuple(Product(*key, count) for key, count in counts.items())


def _seen(start: int, stop: int, window: int | None) -> int:
    """Keys that the tokens at positions `start` to `stop` see together, each its own and those before it."""
    if window is None:
        return (start + 1 + stop) * (stop - start) // 2
    full = max(start, min(stop, window))
    return _seen(start, full, None) + (stop - full) * window
