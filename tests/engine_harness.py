"""Build small engines and run prompts through them; shared by the engine's tests."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from batchgen.core.kv_spec import KVCacheConfig
from batchgen.core.scheduler import Scheduler, SchedulerConfig, SchedulerOutput
from batchgen.engine.build import Engine, build_engine
from batchgen.engine.config import EngineConfig
from batchgen.engine.core import EngineCore
from batchgen.scores import Scoring
from batchgen.types import Output, Request, SamplingParams


def make_engine(folder: Path, **settings: object) -> Engine:
    """An engine over `folder` with every invariant checked after every step."""
    defaults: dict[str, object] = {"max_model_len": 256, "max_num_seqs": 8, "debug_checks": True}
    return build_engine(EngineConfig(model=str(folder), **{**defaults, **settings}))  # type: ignore[arg-type]


def pool_blocks(engine: Engine, tokens: int) -> int:
    """Blocks, the null block included, that hold `tokens` tokens if no window lets go of any."""
    return -(-tokens // engine.core.runner.block_size) * len(engine.core.runner.layout.groups) + 1


def small_pool(engine_folder: Path, tokens: int, **settings: object) -> Engine:
    """An engine whose pool holds `tokens` tokens and no more."""
    probe = make_engine(engine_folder, **settings)
    memory = pool_blocks(probe, tokens) * probe.core.runner.layout.block_bytes
    probe.core.close()
    return make_engine(engine_folder, kv_cache_memory=memory, **settings)


def reschedule(engine: Engine, tokens: int, **settings: Any) -> Engine:
    """The same model and cache under a new scheduler whose pool holds `tokens` tokens.

    What earlier schedules left in the cache stays there: nobody may read it.
    """
    core = engine.core
    config = SchedulerConfig(**{"max_model_len": core.max_model_len, "debug_checks": True, **settings})
    blocks = pool_blocks(engine, tokens)
    assert blocks <= core.runner.kv.caches[0].num_blocks
    scheduler = Scheduler(config, KVCacheConfig(blocks, core.runner.block_size, core.runner.layout.groups))
    fresh = EngineCore(
        core.runner, scheduler, core.tokenizer, core.eos_token_ids, core.max_model_len, core.vocab_size
    )
    return dataclasses.replace(engine, core=fresh)


def run(
    engine: Engine,
    prompts: Sequence[list[int]],
    sampling: SamplingParams | Sequence[SamplingParams],
    partial: Sequence[list[int]] | None = None,
    first_row: int = 0,
    scoring: Sequence[Scoring | None] | None = None,
) -> list[Output]:
    """All prompts to their end; outputs in the order of the prompts."""
    each = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else list(sampling)
    done: dict[int, Output] = {}
    for i, (prompt, params) in enumerate(zip(prompts, each, strict=True)):
        request = Request(first_row + i, list(prompt), params)
        if partial is not None:
            request.output_token_ids = list(partial[i])
        if scoring is not None:
            request.scoring = scoring[i]
        output = engine.core.add(request)
        if output is not None:
            done[output.request_id] = output
    while engine.core.num_unfinished:
        for output in engine.core.step():
            assert output.request_id not in done
            done[output.request_id] = output
    engine.core.scheduler.check()
    return [done[first_row + i] for i in range(len(prompts))]


def record_logits(engine: Engine) -> dict[tuple[int, int], torch.Tensor]:
    """Keep the logits of every sampled position as (row, position) from now on."""
    seen: dict[tuple[int, int], torch.Tensor] = {}
    engine.core.runner.__dict__.pop("execute", None)
    execute: Callable[..., torch.Tensor] = engine.core.runner.execute

    def recording(output: SchedulerOutput, *pending: Any) -> torch.Tensor:
        logits = execute(output, *pending)
        samplers = [s for s in output.scheduled if s.samples]
        for s, row in zip(samplers, logits, strict=True):
            key = (s.request.request_id, s.start + s.num_tokens)
            if key in seen:
                assert torch.equal(seen[key], row), f"position {key} was computed with other bits before"
            seen[key] = row.clone()
        return logits

    engine.core.runner.execute = recording  # type: ignore[method-assign]
    return seen
