"""What one attention layer computes, apart from its inputs. Built by the load-time probe for the backends."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """The shape and the arithmetic of one causal attention layer.

    Args:
        num_heads: query heads.
        num_kv_heads: key/value heads; query head h reads KV head h // (num_heads // num_kv_heads).
        head_size: width of a query and of a key.
        v_head_size: width of a value and of the output.
        scale: the dot products are multiplied by it.
        sliding_window: a query sees at most this many keys, itself included; None sees all before it.
        softcap: scores become softcap * tanh(score / softcap) after scaling; None leaves them.
        has_sinks: one learned logit a query head joins the softmax denominator (and has no value).

    Raises:
        ValueError: names the field, the value and what is allowed.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    v_head_size: int
    scale: float
    sliding_window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False

    def __post_init__(self) -> None:
        def require(ok: bool, name: str, allowed: str) -> None:
            if not ok:
                raise ValueError(f"attention {name}: {getattr(self, name)!r} is not allowed; use {allowed}")

        require(self.num_kv_heads >= 1, "num_kv_heads", "1 or more")
        divides = self.num_heads >= 1 and self.num_heads % self.num_kv_heads == 0
        require(divides, "num_heads", f"a positive multiple of num_kv_heads ({self.num_kv_heads})")
        require(self.head_size >= 1, "head_size", "1 or more")
        require(self.v_head_size >= 1, "v_head_size", "1 or more")
        require(math.isfinite(self.scale) and self.scale > 0, "scale", "a positive number")
        window_ok = self.sliding_window is None or self.sliding_window >= 1
        require(window_ok, "sliding_window", "1 or more, or None for full attention")
        cap_ok = self.softcap is None or (math.isfinite(self.softcap) and self.softcap > 0)
        require(cap_ok, "softcap", "a positive number, or None")

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head."""
        return self.num_heads // self.num_kv_heads
