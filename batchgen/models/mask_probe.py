"""What mask a model builds, read from the model itself.

A batch on the paged cache has no masks: causality and windows are the attention backend's work. Which window
a layer has is not said reliably by configurations (some have one that no layer uses) nor by what layers pass
to attention (some build a window into their mask only). So the load-time probe lets the model build its masks
as for any other attention, with a mask function of ours, which keeps transformers' rule of who sees whom, a
function of (batch, head, query position, key position), and evaluates it.
https://huggingface.co/docs/transformers/attention_interface
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from batchgen.models.attention import ATTENTION_NAME
from batchgen.models.forward_context import current_context

PROBE_NAME = "batchgen_probe"
HORIZON = 1 << 17
"""Positions over which a mask is read; a wider window than this is none."""

MaskRule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class OwnMaskError(ValueError):
    """A layer's mask is none of those that transformers' functions built; says so or what it does."""


class SeenMasks:
    """The masks that a model builds in one forward pass, with their rules.

    Args:
        place: the model's device, where its masks are.
    """

    def __init__(self, place: torch.device) -> None:
        self._place = place
        self._built: list[tuple[torch.Tensor, MaskRule]] = []

    def build(self, *, q_length: int, kv_length: int, mask_function: MaskRule, **_: Any) -> torch.Tensor:
        """transformers' mask interface: a mask that lets everybody see, `(1, 1, q_length, kv_length)`."""
        mask = torch.zeros(1, 1, q_length, kv_length, device=self._place)
        self._built.append((mask, mask_function))
        return mask

    def window(self, mask: torch.Tensor) -> int | None:
        """Keys that a query sees under a mask that was built here, its own included; None sees all before it.

        Raises:
            OwnMaskError: the mask was not built here, or is not causal attention with or without a window.
        """
        for built, rule in self._built:
            # A model may have sliced or expanded it.
            if built.data_ptr() == mask.data_ptr():
                return _window_of(rule, self._place)
        raise OwnMaskError("builds an attention mask of its own")


def _window_of(rule: MaskRule, place: torch.device) -> int | None:
    last = _row(rule, HORIZON - 1, place)
    seen = int(last.sum())
    window = None if seen == HORIZON else seen
    edge = window or 1
    for query in {0, 1, edge - 1, edge, edge + 1, 2 * edge, HORIZON // 3, HORIZON - 1}:
        keys = torch.arange(HORIZON, device=place)
        expected = (keys <= query) & (keys > query - (window or HORIZON))
        if query < HORIZON and not torch.equal(_row(rule, query, place), expected):
            raise OwnMaskError("has a mask that is neither causal nor causal within a window")
    return window


def _row(rule: MaskRule, query: int, place: torch.device) -> torch.Tensor:
    """Bool `(HORIZON,)`: the keys that a query sees."""
    keys = torch.arange(HORIZON, device=place)
    zeros = torch.zeros_like(keys)
    return rule(zeros, zeros, torch.full_like(keys, query), keys).expand(HORIZON)


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    return current_context().attend(module, query, key, value, mask=attention_mask, **options), None


@contextmanager
def seen_masks(model: PreTrainedModel) -> Iterator[SeenMasks]:
    """Let `model` build masks while this lasts; attention contexts get each layer's as `mask`."""
    masks = SeenMasks(model.device)
    AttentionInterface.register(PROBE_NAME, _attention)
    AttentionMaskInterface.register(PROBE_NAME, masks.build)
    try:
        model.set_attn_implementation(PROBE_NAME)
        yield masks
    finally:
        model.set_attn_implementation(ATTENTION_NAME)
        AttentionMaskInterface.register(PROBE_NAME, _no_mask)


def _no_mask(**_: Any) -> None:
    """Keeps nothing alive of a probe that has ended."""
