"""What is fast and what is not: kernels by themselves, and whole jobs on a dummy model."""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from gpu_notes import Notes, Place

from batchgen.bench.kernel_cases import DEVICE_SIZES, TINY_SIZES, layer_of
from batchgen.bench.kernels import Ceilings, Measured, cases_of, ceilings, lines, measure, report
from batchgen.bench.shapes import ModelShapes, generating, model_shapes, needed
from batchgen.models.loader import load_config
from batchgen.models.source import find_model
from batchgen.types import Request, SamplingParams

MODEL = "dummy:llama-3.1-8b"
TINY = (
    "dummy:llama-3.1-8b?num_hidden_layers=1&hidden_size=64&intermediate_size=96&num_attention_heads=4"
    "&num_key_value_heads=2&head_dim=16&vocab_size=300"
)


@dataclasses.dataclass
class Driven:
    """What a job took: of each step its seconds, tokens computed, tokens sampled."""

    seconds: float
    steps: list[tuple[float, int, int]]
    cached: int
    prompt_tokens: int


def kernels(notes: Notes, place: Place) -> None:
    """Each kernel at the shapes of a model, of what this GPU can do."""
    dtype = torch.float32 if place.dry else torch.bfloat16
    limits = ceilings(place.device, dtype, quick=place.dry)
    notes.figure("copy bandwidth", limits.copy_bandwidth / 1e9, "GB/s")
    notes.figure(f"products in {limits.dtype}", limits.product_rate / 1e12, "TFLOP/s")
    model = TINY if place.dry else MODEL
    layer = layer_of(load_config(find_model(model).tokenizer_folder()))
    sizes = TINY_SIZES if place.dry else DEVICE_SIZES
    found: list[Measured] = []
    try:
        cases = cases_of(layer, place.device, dtype, sizes, "triton")
        measure(cases, limits, place.device, quick=place.dry, tell=found.append)
    finally:
        notes.fact("kernels", list(lines(report(model, limits, found))))
        for one in found:
            _targets(notes, one)


def _targets(notes: Notes, one: Measured) -> None:
    count, before = _numbers(one.shape)
    if one.kernel == "attend decoding" and count >= 64 and before >= 1024:
        notes.figure(f"decoding attention {one.shape}, of a copy", 100 * one.bandwidth_share, "%", 80)
    if one.kernel == "attend prompts" and before >= 8192:
        notes.figure(f"attention of prompts {one.shape}, of products", 100 * one.product_share, "%", 50)


def _numbers(shape: str) -> tuple[int, int]:
    """Sequences and the longest run of tokens of a shape such as `64 x 1 after 1024`."""
    numbers = [int(word) for word in shape.split() if word.isdigit()]
    return numbers[0], max(numbers[1:], default=0)


def jobs(notes: Notes, place: Place) -> None:
    """Prompts, decoding, a shared prefix, on one engine; and what of a step the GPU waits."""
    model, half = (TINY, "float32") if place.dry else (MODEL, "bfloat16")
    limits = ceilings(place.device, getattr(torch, half), quick=place.dry)
    began = time.perf_counter()
    llm = place.llm(model, dtype=half, max_model_len=4096)
    notes.figure(f"seconds until {model.partition('?')[0]} is ready", time.perf_counter() - began, "s")
    notes.fact("engine", list(llm.notes))
    core = llm._core
    specs = [layer.spec for layer in core.runner.layers]
    shapes = model_shapes(load_config(find_model(model).tokenizer_folder()), specs)
    assert shapes is not None
    chance = random.Random(0)
    rows, long, short, out = (2, 20, 5, 6) if place.dry else (64, 2048, 256, 384)
    warm = _drive(core, _requests(core, chance, rows, short, 4, 10_000_000))
    notes.figure("warm-up", warm.seconds, "s")
    _prompts(notes, core, shapes, limits, chance, rows, long)
    _decoding(notes, place, core, shapes, limits, chance, 4 * rows, short, out)
    _shared(notes, core, chance, 4 * rows, long, short // 4)
    llm.close()


def _prompts(
    notes: Notes,
    core: Any,
    shapes: ModelShapes,
    limits: Ceilings,
    chance: random.Random,
    rows: int,
    long: int,
) -> None:
    requests = _requests(core, chance, rows, long, 1, 20_000_000)
    done = _drive(core, requests)
    need = needed(shapes, [generating(r.prompt_token_ids, 1) for r in requests], shared=False)
    share = need.total / done.seconds / limits.product_rate
    notes.figure(f"prompts of {long}: tokens per second", done.prompt_tokens / done.seconds, "/s")
    notes.figure(f"prompts of {long}: model operations, of products", 100 * share, "%", 55)


def _decoding(
    notes: Notes,
    place: Place,
    core: Any,
    shapes: ModelShapes,
    limits: Ceilings,
    chance: random.Random,
    rows: int,
    short: int,
    out: int,
) -> None:
    done = _drive(core, _requests(core, chance, rows, short, out, 30_000_000))
    item = 4 if place.dry else 2
    weights = item * (shapes.body_flop + shapes.head.flop) // 2
    of_token = item * sum(s.num_kv_heads * (s.head_size + s.v_head_size) for s in shapes.attention)
    steps = [(seconds, computed) for seconds, computed, sampled in done.steps if computed == sampled == rows]
    if steps:
        # Every row has the same length: in the middle of its output, in the mean over steps.
        cache = rows * of_token * (short + out / 2)
        seconds = statistics.fmean(s for s, _ in steps)
        share = (weights + cache) / seconds / limits.copy_bandwidth
        notes.figure(f"decoding {rows} rows: seconds of a step", seconds, "s")
        notes.figure(f"decoding {rows} rows: weights and cache read, of a copy", 100 * share, "%", 70)
    else:
        notes.skip("decoding", f"no step decoded all {rows} rows at once")
    notes.figure(f"decoding {rows} rows: output tokens per second", rows * out / done.seconds, "/s")
    if place.dry:
        notes.skip("host gap", "there is no GPU whose time could be measured")
        return
    busy = _busy(core, _requests(core, chance, rows, short, 48, 40_000_000), rows)
    if busy is None or not steps:
        notes.skip("host gap", "the profiler saw no kernels")
        return
    # Least of what a step takes, as those before were measured without the profiler.
    short_steps = [s for s, _ in steps[: max(1, len(steps) // 8)]]
    gap = 100 * max(0.0, 1 - busy / statistics.median(short_steps))
    notes.figure("the GPU waits for the host, of a decoding step", gap, "% (3 or less wanted)")


def _shared(notes: Notes, core: Any, chance: random.Random, rows: int, long: int, own: int) -> None:
    requests = _requests(core, chance, rows, own, 8, 50_000_000, _ids(core, chance, long))
    done = _drive(core, requests)
    notes.figure(
        f"{rows} rows that share {long} tokens: from the cache", 100 * done.cached / done.prompt_tokens, "%"
    )
    notes.figure(f"{rows} rows that share {long} tokens: rows per second", rows / done.seconds, "/s")


def _busy(core: Any, requests: list[Request], rows: int) -> float | None:
    """Seconds of a decoding step in which the GPU computes, by torch's profiler; None if it sees nothing."""
    for request in requests:
        core.add(request)
    while True:
        before = core.counters.sampled
        core.step()
        if core.counters.sampled - before == rows or not core.num_unfinished:
            break
    count = 16
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(count):
                core.step()
            torch.cuda.synchronize()
        spans = sorted(
            (event.time_range.start, event.time_range.end)
            for event in profile.events() or ()
            if event.device_type == torch.autograd.DeviceType.CUDA
        )
    except Exception as error:
        print("profiler:", error, flush=True)
        spans = []
    core.abort_all()
    busy, end = 0.0, float("-inf")
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return busy / 1e6 / count if busy else None


def _drive(core: Any, requests: list[Request]) -> Driven:
    """Run requests as a worker does; raises RuntimeError where a row fails."""
    waiting: Iterator[Request] = iter(requests)
    most = 2 * core.scheduler.config.max_num_seqs
    cached, steps = core.scheduler.stats.cached_tokens, []
    began = last = time.perf_counter()
    while True:
        for request in islice(waiting, max(0, most - core.num_unfinished)):
            core.add(request)
        if not core.num_unfinished:
            break
        computed, sampled = core.counters.computed, core.counters.sampled
        for output in core.step():
            if output.error is not None:
                raise RuntimeError(f"a row failed: {output.error.message}")
        now = time.perf_counter()
        steps.append((now - last, core.counters.computed - computed, core.counters.sampled - sampled))
        last = now
    return Driven(
        time.perf_counter() - began,
        steps,
        core.scheduler.stats.cached_tokens - cached,
        sum(len(request.prompt_token_ids) for request in requests),
    )


def _requests(
    core: Any,
    chance: random.Random,
    rows: int,
    tokens: int,
    out: int,
    first: int,
    prefix: list[int] | None = None,
) -> list[Request]:
    sampling = SamplingParams(max_tokens=out, ignore_eos=True)
    return [Request(first + i, [*(prefix or []), *_ids(core, chance, tokens)], sampling) for i in range(rows)]


def _ids(core: Any, chance: random.Random, count: int) -> list[int]:
    return [chance.randrange(3, core.vocab_size) for _ in range(count)]
