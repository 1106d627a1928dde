"""How much of what a device can do the steps of an engine use: its products, its memory, its time.

Operations are those of products and attention that steps have computed, bytes those of all weights once in a
step and of the keys and values that each sequence attends to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from batchgen.bench.kernels import ceilings
from batchgen.bench.machine import ProductRate, read_bandwidth
from batchgen.bench.parts import STEP_KINDS
from batchgen.bench.passes import Pass
from batchgen.bench.shapes import ModelShapes
from batchgen.bench.steps import Span, Step
from batchgen.engine.core import EngineCore
from batchgen.engine.runner import ModelRunner


@dataclass(frozen=True, slots=True)
class Limits:
    """What a device does at best: operations a second of products, bytes a second of memory."""

    product_rate: float
    bandwidth: float

    @classmethod
    def measured(
        cls, device: torch.device, dtype: torch.dtype, rates: Iterable[ProductRate], *, quick: bool = False
    ) -> Limits:
        """Those of a device now.

        Args:
            device: a processor or a GPU.
            dtype: of products.
            rates: of products at a model's shapes; the fastest counts, if it is faster than one of square
                matrices.
            quick: see only whether it can be measured.

        Returns:
            With the bytes that a processor reads in a second, and that a GPU reads and writes in a copy.
        """
        found = ceilings(device, dtype, quick=quick)
        bandwidth = read_bandwidth(device) if device.type == "cpu" else found.copy_bandwidth
        return cls(max([found.product_rate, *(rate.best * 1e9 for rate in rates)]), bandwidth)


@dataclass(frozen=True, slots=True)
class CacheReads:
    """Bytes of keys and values that sequences read in a step.

    Args:
        layers: of each layer, bytes of a token and how far back is seen.
    """

    layers: Mapping[int | None, float]

    @classmethod
    def of(cls, runner: ModelRunner) -> CacheReads:
        """Those of a model; layers that read another's keys and values read them again."""
        layers: dict[int | None, float] = {}
        for layer, spec in zip(runner.layers, runner.layout.specs, strict=True):
            window = layer.spec.sliding_window
            layers[window] = layers.get(window, 0.0) + spec.page_bytes / runner.block_size
        return cls(layers)

    def bytes(self, span: Span) -> float:
        """All that one of its tokens sees, once."""
        tokens = span.stop - span.start
        return sum(
            of_token * (span.stop if window is None else min(span.stop, window + tokens - 1))
            for window, of_token in self.layers.items()
        )


def utilisation(core: EngineCore, shapes: ModelShapes | None, done: Pass, limits: Limits) -> dict[str, Any]:
    """The shares of a pass, and of its steps by kind.

    Args:
        core: that ran it.
        shapes: of its model; None where operations are not counted, nor then the weights that a step reads.
        done: the pass.
        limits: of the device.

    Returns:
        `product_rate` and `bandwidth` of the device, `flop` and `flop_share` of the whole, and by kind of
        step, None where there was none: `steps`, `tokens`, `rows` (means), `seconds` (together), `flop`,
        `flop_share`, `bytes` (mean), `distinct_bytes` (what sequences share counted once), and
        `bandwidth_share`.
    """
    # Layers that are one program leave out what nobody reads of the last one.
    whole = core.runner.program is None
    of_kind = {kind: [step for step in done.steps if step.kind == kind] for kind in STEP_KINDS}
    flop = None if shapes is None or not done.steps else computed_flop(shapes, done.steps, whole=whole)
    return {
        "product_rate": limits.product_rate,
        "bandwidth": limits.bandwidth,
        "flop": flop,
        "flop_share": None if flop is None else flop / done.seconds / limits.product_rate,
        "kinds": {
            kind: _of_steps(core.runner, shapes, steps, limits, whole=whole) if steps else None
            for kind, steps in of_kind.items()
        },
    }


def _of_steps(
    runner: ModelRunner, shapes: ModelShapes | None, steps: Sequence[Step], limits: Limits, *, whole: bool
) -> dict[str, Any]:
    seconds, count = sum(step.seconds for step in steps), len(steps)
    found: dict[str, Any] = {
        "steps": count,
        "tokens": sum(step.tokens for step in steps) / count,
        "rows": sum(len(step.spans) for step in steps) / count,
        "seconds": seconds,
        **dict.fromkeys(("flop", "flop_share", "bytes", "distinct_bytes", "bandwidth_share")),
    }
    if shapes is None:
        return found
    reads, weights = CacheReads.of(runner), runner.parts.read_bytes
    read = weights + sum(reads.bytes(span) for step in steps for span in step.spans) / count
    of_token = sum(reads.layers.values())
    flop = computed_flop(shapes, steps, whole=whole)
    return found | {
        "flop": flop,
        "flop_share": flop / seconds / limits.product_rate,
        "bytes": read,
        "distinct_bytes": min(read, weights + of_token * sum(step.held for step in steps) / count),
        "bandwidth_share": read * count / seconds / limits.bandwidth,
    }


def computed_flop(shapes: ModelShapes, steps: Iterable[Step], *, whole: bool) -> int:
    """Operations of products and attention in steps.

    Args:
        shapes: of the model.
        steps: with what was computed in them.
        whole: whether what follows the keys and values of the last layer is computed for all tokens, not only
            for those that somebody reads.
    """
    flop = 0
    for span in (span for step in steps for span in step.spans):
        tokens = span.stop - span.start
        flop += tokens * shapes.body_flop + span.logits * shapes.head.flop
        flop += shapes.attention_flop(span.start, span.stop)
        if not whole:
            flop -= tokens * shapes.last_flop + shapes.last_attention_flop(span.start, span.stop)
            for part in span.needed:
                flop += len(part) * shapes.last_flop + shapes.last_attention_flop(part.start, part.stop)
    return flop
