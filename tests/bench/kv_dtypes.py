"""What storing keys and values in fewer bits costs and saves on the real model; run by `make bench-kv`.

Prints a table: perplexity of real text (HumanEval's problems with their solutions, in windows), greedy
agreement with float32 on real chats, bytes of cache per token, and the time of attention. Accuracy is a
property of model, text and dtype; times are ratios within one run, of medians of interleaved calls.
"""

from __future__ import annotations

import argparse
import gzip
import json
import math
import platform
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[1] / "parity")]

import torch
from real_model import MODEL, PROBLEMS, prompts, tokenizer

from batchgen.bench.accuracy import common_length, perplexity
from batchgen.engine.build import Engine, build_engine
from batchgen.engine.config import EngineConfig
from batchgen.scores import Scoring
from batchgen.types import Output, Request, SamplingParams, Task
from batchgen_kernels import AttentionMetadata, AttentionSpec
from batchgen_kernels.backend import allocate
from batchgen_kernels.cpu import CpuBackend

COMBINATIONS = [
    ("float32", "float32"),
    ("float32", "bfloat16"),
    ("float32", "float16"),
    ("float32", "int8"),
    ("bfloat16", "bfloat16"),
    ("bfloat16", "int8"),
]
SMOLLM = AttentionSpec(num_heads=9, num_kv_heads=3, head_size=64, v_head_size=64, scale=0.125)


@dataclass
class Accuracy:
    """Of one combination of dtypes; agreement is with the first."""

    perplexity: float
    outputs: list[list[int]]
    bytes_per_token: float


def windows(tokens: int, length: int) -> list[list[int]]:
    """The first tokens of HumanEval, problem and solution after each other, cut into windows."""
    with gzip.open(PROBLEMS, "rt", encoding="utf-8") as f:
        problems = [json.loads(line) for line in f]
    text = "\n\n".join(p["prompt"] + p["canonical_solution"] for p in problems)
    ids = tokenizer().encode_batch([text])[0][:tokens]
    return [ids[i : i + length] for i in range(0, len(ids) - length + 1, length)]


def run(engine: Engine, requests: list[Request]) -> Iterator[Output]:
    """Outputs of all, as they finish."""
    for request in requests:
        engine.core.add(request)
    while engine.core.num_unfinished:
        yield from engine.core.step()


def measure(
    dtype: str,
    stored: str,
    texts: list[list[int]],
    chats: list[list[int]],
    tokens: int,
    quantization: str | None = None,
) -> Accuracy:
    """Perplexity and greedy output."""
    config = EngineConfig(
        model=str(MODEL),
        dtype=dtype,
        quantization=quantization,
        kv_cache_dtype=stored,
        max_model_len=1536,
        deterministic=False,
    )
    engine = build_engine(config)
    with closing(engine.core):
        scored = [
            Request(i, t, SamplingParams(), task=Task.LOGLIKELIHOOD, scoring=Scoring(0, tuple(t[1:])))
            for i, t in enumerate(texts)
        ]
        logprobs = [x for output in run(engine, scored) for x in output.scores.logprobs]
        greedy = SamplingParams(max_tokens=tokens)
        requests = [Request(10**6 + i, list(ids), greedy) for i, ids in enumerate(chats)]
        done = {output.request_id: output.token_ids for output in run(engine, requests)}
        size = engine.core.runner.layout.block_bytes / engine.core.runner.block_size
    likelihood = perplexity(-math.fsum(logprobs), len(logprobs))
    return Accuracy(likelihood, [done[r.request_id] for r in requests], size)


def agreement(outputs: list[list[int]], exact: list[list[int]]) -> tuple[float, float]:
    """Share of rows that are the same, and of their tokens that come before the first difference."""
    before = sum(common_length(got, want) for got, want in zip(outputs, exact, strict=True))
    same = sum(got == want for got, want in zip(outputs, exact, strict=True))
    return same / len(exact), before / sum(map(len, exact))


def attention_seconds(queries: int, context: int, sequences: int, repeats: int) -> dict[str, float]:
    """Median seconds of writing and attending in one layer, per stored dtype."""
    backend, blocks = CpuBackend(), context // 16
    tables = [list(range(1 + s * blocks, 1 + (s + 1) * blocks)) for s in range(sequences)]
    size = sequences * blocks + 1
    names = ("float32", "bfloat16", "float16", "int8")
    caches = {n: allocate(backend, SMOLLM, size, 16, torch.device("cpu"), getattr(torch, n)) for n in names}
    fill = AttentionMetadata.build([context] * sequences, [context] * sequences, tables, 16)
    step = AttentionMetadata.build([queries] * sequences, [context] * sequences, tables, 16)
    history = torch.randn(sequences * context, 3, 64)
    query, key = torch.randn(sequences * queries, 9, 64), torch.randn(sequences * queries, 3, 64)
    for kv in caches.values():
        backend.write(kv, history, history, fill)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(repeats):
        for name, kv in caches.items():
            start = time.perf_counter()
            backend.write(kv, key, key, step)
            backend.attend(query, kv, step, SMOLLM)
            seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(times) for name, times in seconds.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=16384, help="of text whose perplexity is measured")
    parser.add_argument("--rows", type=int, default=64, help="chats that are answered")
    parser.add_argument("--max-tokens", type=int, default=48, help="of each answer")
    parser.add_argument("--repeats", type=int, default=100, help="of each attention")
    args = parser.parse_args()
    print(
        f"{' '.join(sys.argv)}: torch {torch.__version__}, {platform.machine()}, "
        f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
    )
    decode = attention_seconds(1, 1024, 32, args.repeats)
    prefill = attention_seconds(512, 1024, 1, args.repeats)
    texts, chats = windows(args.tokens, 1024), prompts(args.rows)
    print(
        "| model | KV cache | perplexity | rows as in float32 | tokens until the first difference "
        "| bytes per token | decode | prefill |"
    )
    print("|---|---|---|---|---|---|---|---|")
    exact: Accuracy | None = None
    for dtype, stored in COMBINATIONS:
        found = measure(dtype, stored, texts, chats, args.max_tokens)
        exact = exact or found
        rows, tokens = agreement(found.outputs, exact.outputs)
        times = [f"{t[stored] / t['float32']:.2f}" for t in (decode, prefill)]
        print(
            f"| {dtype} | {stored} | {found.perplexity:.4f} ({found.perplexity / exact.perplexity - 1:+.3%}) "
            f"| {rows:.1%} | {tokens:.1%} | {found.bytes_per_token:,.0f} | {' | '.join(times)} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
