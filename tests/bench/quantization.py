"""What products in int8 cost and gain on the real model; run by `make bench-int8`.

Prints a table: perplexity of real text, greedy agreement with float32 on real chats, seconds and tokens per
second of answering them (runs interleaved, medians). Accuracy is a property of model, text and arithmetic.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import sys
import time
from contextlib import closing
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[1] / "parity")]

import torch
from kv_dtypes import Accuracy, agreement, measure, windows
from real_model import MODEL, prompts

from batchgen.engine.build import build_engine
from batchgen.engine.config import EngineConfig
from batchgen.types import Request, SamplingParams

KINDS = (None, "int8")


def seconds(quantization: str | None, chats: list[list[int]], tokens: int) -> float:
    """Of answering all chats, after a first one."""
    engine = build_engine(EngineConfig(model=str(MODEL), quantization=quantization, max_model_len=1536))
    greedy = SamplingParams(max_tokens=tokens, ignore_eos=True)
    with closing(engine.core) as core:
        for first, some in ((0, chats[:1]), (1, chats)):
            start = time.perf_counter()
            for i, ids in enumerate(some):
                core.add(Request(first + i, list(ids), greedy))
            while core.num_unfinished:
                core.step()
        return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=16384, help="of text whose perplexity is measured")
    parser.add_argument("--rows", type=int, default=64, help="chats that are answered")
    parser.add_argument("--max-tokens", type=int, default=48, help="of each answer")
    parser.add_argument("--repeats", type=int, default=3, help="of the timed run")
    args = parser.parse_args()
    print(
        f"{' '.join(sys.argv)}: torch {torch.__version__}, {platform.machine()}, "
        f"{torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}"
    )
    texts, chats = windows(args.tokens, 1024), prompts(args.rows)
    times: dict[str | None, list[float]] = {kind: [] for kind in KINDS}
    for _ in range(args.repeats):
        for kind in KINDS:
            times[kind].append(seconds(kind, chats, args.max_tokens))
    total = sum(map(len, chats)) + args.rows * args.max_tokens
    print("| products | perplexity | rows as in float32 | tokens until the first difference | tokens/s |")
    print("|---|---|---|---|---|")
    exact: Accuracy | None = None
    for kind in KINDS:
        found = measure("float32", "float32", texts, chats, args.max_tokens, quantization=kind)
        exact = exact or found
        rows, tokens = agreement(found.outputs, exact.outputs)
        change = found.perplexity / exact.perplexity - 1
        print(
            f"| {kind or 'float32'} | {found.perplexity:.4f} ({change:+.3%}) "
            f"| {rows:.1%} | {tokens:.1%} | {total / statistics.median(times[kind]):,.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
