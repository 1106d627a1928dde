"""Ours against transformers' `generate` on the same 64 real prompts, in one process; run by `make bench`.

Prints tokens per second of both (runs interleaved, medians), what batch invariance costs, and how much
of the KV cache is wasted beside what reserving the longest length for each sequence would waste.
Every row generates exactly `--max-tokens` tokens, so both do the same work.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[1] / "parity")]

import torch
import transformers
from real_model import MODEL, prompts, reference_model

from batchgen.engine.build import Engine, build_engine
from batchgen.engine.config import EngineConfig
from batchgen.types import Request, SamplingParams


@dataclass
class PoolUse:
    """Token slots summed over all steps."""

    used: int = 0
    paged: int = 0
    contiguous: int = 0


def run_ours(ids: list[list[int]], max_tokens: int, pool: PoolUse, **settings: Any) -> float:
    """Seconds for all rows on a fresh engine, loading and a warm-up excluded."""
    engine = build_engine(EngineConfig(model=str(MODEL), max_model_len=1024, **settings))
    generate(engine, ids[:2], 2, 10**6, PoolUse())
    seconds = generate(engine, ids, max_tokens, 0, pool)
    engine.core.close()
    return seconds


def generate(engine: Engine, ids: list[list[int]], max_tokens: int, first_row: int, pool: PoolUse) -> float:
    """Seconds until all rows are done."""
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    longest = max(map(len, ids)) + max_tokens
    scheduler = engine.core.scheduler
    start = time.perf_counter()
    for i, prompt in enumerate(ids):
        engine.core.add(Request(first_row + i, list(prompt), sampling))
    while engine.core.num_unfinished:
        engine.core.step()
        for request in scheduler.running.values():
            pool.paged += len(scheduler.manager.block_ids(request)[0]) * engine.core.runner.block_size
            pool.contiguous += longest
            pool.used += request.num_computed_tokens
    return time.perf_counter() - start


def run_generate(ids: list[list[int]], max_tokens: int, batch: int) -> float:
    """Seconds for all rows in padded batches, sorted by length."""
    model = reference_model()
    order = sorted(ids, key=len)
    start = time.perf_counter()
    for i in range(0, len(order), batch):
        group = order[i : i + batch]
        width = max(map(len, group))
        padded = torch.tensor([[2] * (width - len(p)) + p for p in group])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in group])
        model.generate(
            padded, attention_mask=mask, max_new_tokens=max_tokens, min_new_tokens=max_tokens, do_sample=False
        )
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--max-tokens", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--batch", type=int, default=16)
    args = parser.parse_args()
    ids = prompts(args.prompts)
    print(
        f"python {platform.python_version()}, torch {torch.__version__}, transformers "
        f"{transformers.__version__}, {torch.get_num_threads()} threads, "
        f"{torch.backends.cpu.get_cpu_capability()}; {len(ids)} prompts, "
        f"{sum(map(len, ids))} prompt tokens, {args.max_tokens} new tokens each"
    )
    times: dict[str, list[float]] = {"ours": [], "not invariant": [], "generate": []}
    pool = PoolUse()
    for _ in range(args.repeats):
        times["ours"].append(run_ours(ids, args.max_tokens, pool))
        times["not invariant"].append(run_ours(ids, args.max_tokens, PoolUse(), deterministic=False))
        times["generate"].append(run_generate(ids, args.max_tokens, args.batch))
    new = len(ids) * args.max_tokens
    total = new + sum(map(len, ids))
    for name, seconds in times.items():
        median = statistics.median(seconds)
        print(f"{name:14} {new / median:8.1f} output tokens/s {total / median:8.1f} total tokens/s {seconds}")
    ratio = statistics.median(b / a for a, b in zip(times["ours"], times["generate"], strict=True))
    cost = statistics.median(a / b for a, b in zip(times["ours"], times["not invariant"], strict=True))
    print(f"generate / ours {ratio:.2f}x, batch invariance costs {cost:.3f}x")
    print(
        f"cache slots held without a token: {1 - pool.used / pool.paged:.1%}; "
        f"{1 - pool.used / pool.contiguous:.1%} if each sequence reserved the longest length"
    )


if __name__ == "__main__":
    main()
