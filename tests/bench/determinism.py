"""What `engine.deterministic` costs on the real model: seconds of the processor, on beside off in one run.

Chats are answered with all rows together, where padding to a multiple of rows costs least, and one at a time,
where it costs most. Run by `make bench-determinism`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1]), str(Path(__file__).resolve().parents[1] / "parity")]

import torch
from real_model import MODEL, prompts

from batchgen.engine.build import Engine, build_engine
from batchgen.engine.config import EngineConfig
from batchgen.types import Request, SamplingParams


def seconds(engine: Engine, chats: list[list[int]], tokens: int, first_row: int) -> float:
    """Of the processor, until all chats have `tokens` tokens of output."""
    for i, ids in enumerate(chats):
        # Each time another first token, so that nothing is found in the cache.
        request = Request(
            first_row + i, [3 + first_row + i, *ids], SamplingParams(max_tokens=tokens, ignore_eos=True)
        )
        engine.core.add(request)
    start = time.process_time()
    while engine.core.num_unfinished:
        engine.core.step()
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    print(f"{' '.join(sys.argv)}: torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}")
    print("| model | rows at once | off | on | ratio |\n|---|---|---|---|---|")
    for dtype in ("float32", "bfloat16"):
        for rows in (args.rows, 1):
            engines = {
                deterministic: build_engine(
                    EngineConfig(
                        model=str(MODEL), dtype=dtype, deterministic=deterministic, max_model_len=1024
                    )
                )
                for deterministic in (False, True)
            }
            assert engines[True].facts["batch_invariant"]
            times: dict[bool, list[float]] = {False: [], True: []}
            for repeat in range(args.repeats):
                for deterministic, engine in engines.items():
                    spent = seconds(engine, prompts(rows), args.tokens, repeat * rows)
                    times[deterministic].append(spent)
            off, on = (statistics.median(times[x]) for x in (False, True))
            print(f"| {dtype} | {rows} | {off:.2f} s | {on:.2f} s | {on / off:.2f} |", flush=True)
            for engine in engines.values():
                engine.core.close()


if __name__ == "__main__":
    main()
