"""Parity notices what could be wrong: each mutation breaks the engine in one place, and must be seen.

`BATCHGEN_FAMILIES=all` breaks every family; in the usual suite a few that have every trait between them.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, Family
from parity import SCHEDULES, TOLERANCE, Oracle, compare, open_engine, run_schedule

from batchgen.engine.inputs import PackedStep
from batchgen.engine.runner import ModelRunner
from batchgen_kernels import reference

ALL = os.environ.get("BATCHGEN_FAMILIES") == "all"
USUAL = ("mistral", "gemma2", "gpt2", "gpt_oss", "deepseek_v3")
MAX_TOKENS = 6
NOTICED = 100 * TOLERANCE

Patch = pytest.MonkeyPatch


def change_specs(runner: ModelRunner, patch: Patch, **changes: Callable[[Any], Any]) -> None:
    """Hand attention specs whose fields, where they are set, were changed."""

    def changed(layer: Any) -> Any:
        new = {f: change(getattr(layer.spec, f)) for f, change in changes.items() if getattr(layer.spec, f)}
        spec = dataclasses.replace(layer.spec, **new)
        return dataclasses.replace(layer, spec=spec, sinks=layer.sinks if spec.has_sinks else None)

    patch.setattr(runner, "layers", [changed(layer) for layer in runner.layers])


def change_steps(runner: ModelRunner, patch: Patch, change: Callable[[PackedStep], None]) -> None:
    """Change every step's tensors before they are used."""
    forward = runner.forward

    def changed(step: PackedStep) -> torch.Tensor:
        change(step)
        return forward(step)

    patch.setattr(runner, "forward", changed)


def wider_window(runner: ModelRunner, patch: Patch) -> None:
    change_specs(runner, patch, sliding_window=lambda window: window + 1)


def narrower_window(runner: ModelRunner, patch: Patch) -> None:
    change_specs(runner, patch, sliding_window=lambda window: window - 1)


def no_softcap(runner: ModelRunner, patch: Patch) -> None:
    change_specs(runner, patch, softcap=lambda cap: None)


def no_sinks(runner: ModelRunner, patch: Patch) -> None:
    change_specs(runner, patch, has_sinks=lambda sinks: False)


def wrong_scale(runner: ModelRunner, patch: Patch) -> None:
    change_specs(runner, patch, scale=lambda scale: scale * 1.01)


def wrong_kv_head(runner: ModelRunner, patch: Patch) -> None:
    """Query head h reads key/value head h modulo their number, in place of h over the group's size."""
    attend = runner.backend.attend

    def changed(query: torch.Tensor, kv: Any, meta: Any, spec: Any, sinks: Any = None) -> torch.Tensor:
        order = torch.arange(spec.num_heads).view(spec.group_size, spec.num_kv_heads).T.flatten()
        sinks = None if sinks is None else sinks[order]
        return attend(query[:, order], kv, meta, spec, sinks)[:, order.argsort()]

    patch.setattr(runner.backend, "attend", changed)


def position_off_by_one(runner: ModelRunner, patch: Patch) -> None:
    """Positions from 10 on are one too large; were all, rope would turn none against another."""

    def later(step: PackedStep) -> None:
        step.position_ids[step.position_ids >= 10] += 1

    change_steps(runner, patch, later)


def mask_off_by_one(runner: ModelRunner, patch: Patch) -> None:
    """A query sees the key after its own, where there is one."""
    visible = reference._visible

    def changed(num_queries: int, num_keys: int, *args: Any) -> torch.Tensor:
        ahead = torch.arange(num_keys) == torch.arange(num_keys - num_queries, num_keys).unsqueeze(1) + 1
        return visible(num_queries, num_keys, *args) | ahead

    patch.setattr(reference, "_visible", changed)


def stale_block(runner: ModelRunner, patch: Patch) -> None:
    """Each sequence reads its next to last block from where the sequence before it has that block."""

    def stale(step: PackedStep) -> None:
        for meta in step.metadata:
            column = ((meta.seq_lens.long() - 1) // meta.block_size - 1).clamp(min=0)
            rows = torch.arange(len(column))
            meta.block_table[rows, column] = meta.block_table.roll(1, 0)[rows, column]

    change_steps(runner, patch, stale)


MUTATIONS: tuple[tuple[Callable[[ModelRunner, Patch], None], str], ...] = (
    (wider_window, "window"),
    (narrower_window, "window"),
    (no_softcap, "softcap"),
    (no_sinks, "sinks"),
    (wrong_kv_head, "gqa"),
    (position_off_by_one, ""),
    (mask_off_by_one, ""),
    (stale_block, ""),
    (wrong_scale, ""),
)
"""With the trait that a family must have for it."""


def traits(family: Family) -> frozenset[str]:
    return family.traits | {""} | ({"window"} if any(family.windows) else set())


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_every_mutation_is_noticed(family: Family, tmp_path: Path) -> None:
    if not ALL and family.name not in USUAL:
        pytest.skip("BATCHGEN_FAMILIES=all")
    engine = open_engine(family, tmp_path, attention="reference")
    oracle = Oracle(family.build())
    schedule = SCHEDULES[0]
    assert compare(oracle, run_schedule(engine, schedule, MAX_TOKENS)).ok
    missed = []
    for mutation, trait in MUTATIONS:
        if trait in traits(family):
            with pytest.MonkeyPatch.context() as patch:
                mutation(engine.core.runner, patch)
                seen = compare(oracle, run_schedule(engine, schedule, MAX_TOKENS))
            if seen.ok or seen.difference < NOTICED:
                missed.append((mutation.__name__, seen))
    assert missed == []
    assert compare(oracle, run_schedule(engine, schedule, MAX_TOKENS)).ok


def test_the_usual_families_have_every_trait() -> None:
    usual = [traits(family) for family in FAMILIES if family.name in USUAL]
    assert {trait for _, trait in MUTATIONS} <= frozenset().union(*usual)
