"""What the attention function needs to know about the step that is running.

`ModelRunner` and the load-time probe enter a context around each forward pass; the attention
function that transformers calls looks it up here. Calling attention outside a context is an
error: without one it could only guess which cache and which sequences are meant.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, runtime_checkable

import torch


class ForwardContext(Protocol):
    """One forward pass over a packed batch."""

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        **options: Any,
    ) -> torch.Tensor:
        """Attention of one layer.

        Args:
            module: the model's attention module; `module.layer_idx` names the layer.
            query: `(1, num_heads, T, head_size)` after rope.
            key: `(1, num_kv_heads, T, head_size)` after rope, not repeated.
            value: `(1, num_kv_heads, T, v_head_size)`.
            options: what the model passed on: `scaling`, `sliding_window`, `softcap`, `s_aux` …

        Returns:
            `(1, T, num_heads, v_head_size)`.
        """
        ...


@runtime_checkable
class DecodingContext(ForwardContext, Protocol):
    """A forward pass of a model whose layers are one program."""

    def decode(
        self, hidden: torch.Tensor, tables: Sequence[tuple[torch.Tensor, torch.Tensor]]
    ) -> torch.Tensor:
        """All layers and the last norm.

        Args:
            hidden: `(T, H)`, the embedded tokens.
            tables: cosines and sines of their positions, `(T, rotary size)`, for some of the layers each.

        Returns:
            `(T, H)`, NaN in rows that nobody reads.
        """
        ...


_active: ForwardContext | None = None


@contextmanager
def forward_context(context: ForwardContext) -> Iterator[None]:
    """Make `context` the one in which attention runs.

    Raises:
        RuntimeError: a context is already active; forward passes do not nest.
    """
    global _active
    if _active is not None:
        raise RuntimeError("a forward pass is already running; batchgen's contexts do not nest")
    _active = context
    try:
        yield
    finally:
        _active = None


def current_context() -> ForwardContext:
    """The active context.

    Raises:
        RuntimeError: none is active.
    """
    if _active is None:
        raise RuntimeError(
            "batchgen attention was called outside a forward context; run the model through ModelRunner"
        )
    return _active
