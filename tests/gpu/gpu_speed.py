"""What is fast and what is not: kernels by themselves, and whole jobs on a dummy model.

Rows, steps and shares are those of `batchgen bench`, whose code this runs.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from itertools import islice
from typing import Any

import torch
from gpu_notes import Notes, Place

from batchgen.bench import table
from batchgen.bench.gaps import waiting_shares
from batchgen.bench.kernel_cases import ALIKE_EACH, ALIKE_ONCE, BLOCK_SIZE, DEVICE_SIZES, TINY_SIZES, layer_of
from batchgen.bench.kernels import Measured, cases_of, ceilings, lines, measure, report
from batchgen.bench.machine import product_rates
from batchgen.bench.parts import DECODING
from batchgen.bench.passes import Pass, run_pass
from batchgen.bench.shapes import ModelShapes, model_shapes
from batchgen.bench.utilisation import Limits, utilisation
from batchgen.bench.workloads import BenchRow, load_workload, warmup_rows
from batchgen.models.loader import load_config
from batchgen.models.source import find_model
from batchgen.types import Request, SamplingParams
from batchgen_kernels.backend import allocate
from batchgen_kernels.shared_prefix import SharedGroup
from batchgen_kernels.triton_kernels import TritonBackend

MODEL = "dummy:llama-3.1-8b"
TINY = (
    "dummy:llama-3.1-8b?num_hidden_layers=1&hidden_size=64&intermediate_size=96&num_attention_heads=4"
    "&num_key_value_heads=2&head_dim=16&vocab_size=300"
)
LONGEST = 9000
"""Tokens of a row: those of `prefill` are of 8,000."""


def kernels(notes: Notes, place: Place, _: float) -> None:
    """Each kernel at the shapes of a model, of what this GPU can do; one that fails ends alone."""
    dtype = torch.float32 if place.dry else torch.bfloat16
    limits = ceilings(place.device, dtype, quick=place.dry)
    notes.figure("copy bandwidth", limits.copy_bandwidth / 1e9, "GB/s")
    notes.figure(f"products in {limits.dtype}", limits.product_rate / 1e12, "TFLOP/s")
    model = TINY if place.dry else MODEL
    layer = layer_of(load_config(find_model(model).tokenizer_folder()))
    sizes = TINY_SIZES if place.dry else DEVICE_SIZES
    found: list[Measured] = []
    try:
        for case in cases_of(layer, place.device, dtype, sizes, "triton"):
            with notes.attempt(f"{case.kernel} {case.shape}"):
                found += measure([case], limits, place.device, quick=place.dry)
    finally:
        notes.fact("kernels", list(lines(report(model, limits, found))))
        for one in found:
            _targets(notes, one, dry=place.dry)
        by_name = {(one.kernel, one.shape): one for one in found}
        backend = TritonBackend()
        kv = allocate(backend, layer.attention, 1, BLOCK_SIZE, place.device, dtype)
        cost = backend.sharing(layer.attention, dtype, kv)
        assert cost is not None
        for count, common, own in sizes.alike:
            shape = f"{count} x 1 after {common} + {own}"
            each, once = (by_name.get((name, shape)) for name in (ALIKE_EACH, ALIKE_ONCE))
            if each and once:
                saved = cost.seconds_saved([SharedGroup(range(count), common)], count)
                _alike(notes, each, once, saved, dry=place.dry)


def _alike(notes: Notes, each: Measured, once: Measured, expected: float, *, dry: bool) -> None:
    """Whether keys in common take less time once, and whether the formula that chooses it is right."""
    saved = each.seconds - once.seconds
    notes.figure(
        f"keys in common {each.shape}, saved",
        saved * 1e6,
        "us",
        least=0 if expected > 0 and not dry else None,
    )
    notes.figure(f"keys in common {each.shape}, the formula expects", expected * 1e6, "us")


def _targets(notes: Notes, one: Measured, *, dry: bool) -> None:
    count, longest = _numbers(one.shape)
    many, short, long = (1, 1, 1) if dry else (64, 1024, 8192)
    if one.kernel == "attend decoding" and count >= many and longest >= short:
        share = 100 * one.bandwidth_share
        notes.figure(f"attention of decoding {one.shape}, of a copy", share, "%", least=80)
    if one.kernel == "attend prompts" and longest >= long:
        notes.figure(f"attention of prompts {one.shape}, of products", 100 * one.product_share, "%", least=50)


def _numbers(shape: str) -> tuple[int, int]:
    """Sequences and the longest run of tokens of a shape such as `64 x 1 after 1024`."""
    numbers = [int(word) for word in shape.split() if word.isdigit()]
    return numbers[0], max(numbers[1:], default=0)


def jobs(notes: Notes, place: Place, until: float) -> None:
    """Prompts, decoding, a shared prefix, on one engine; and what of a step the GPU waits."""
    model, half = (TINY, "float32") if place.dry else (MODEL, "bfloat16")
    config, dtype = load_config(find_model(model).tokenizer_folder()), getattr(torch, half)
    products, rows = layer_of(config).products, 8192
    if place.dry:
        products, rows = products[:1], 8
    rates = product_rates([(product, rows) for product in products], place.device, dtype)
    limits = Limits.measured(place.device, dtype, rates, quick=place.dry)
    notes.figure("fastest products", limits.product_rate / 1e12, "TFLOP/s")
    began = time.perf_counter()
    llm = place.llm(model, dtype=half, max_model_len=LONGEST)
    notes.figure(f"seconds until {model.partition('?')[0]} is ready", time.perf_counter() - began, "s")
    notes.fact("engine", list(llm.notes))
    core = llm._core
    shapes = model_shapes(config, [layer.spec for layer in core.runner.layers])
    bench = _Jobs(notes, place, core, shapes, limits, half)
    notes.figure("warm-up", bench.run(warmup_rows()).seconds, "s")
    for part in (_prefill, _decode, _shared):
        name = part.__name__.strip("_")
        if time.monotonic() > until and not place.dry:
            notes.skip(name, "the section's time was over")
            continue
        with notes.attempt(f"{name} runs to its end"):
            part(notes, bench)
    if core.ahead is not None:
        followed, alone = core.ahead.followed, core.ahead.alone
        share = 100 * followed / max(1, followed + sum(alone.values()))
        notes.figure("steps behind which another was launched at once", share, "%")
        told = ", ".join(f"{why} {count}" for why, count in alone.items())
        notes.check("no step failed behind another", not alone["error"], f"alone: {told or 'none'}")
    llm.close()


def _prefill(notes: Notes, bench: _Jobs) -> None:
    done = bench.workload("prefill")
    notes.figure("prefill: tokens per second", done.prompt_tokens / done.seconds, "/s")
    what, share = "prefill: operations of the model, of products", bench.used["flop_share"]
    if share is None:
        notes.skip(what, "it is not known what each step computed")
    else:
        notes.figure(what, 100 * share, "%", least=55)
    bench.waits(done)


def _decode(notes: Notes, bench: _Jobs) -> None:
    done = bench.workload("decode")
    tokens = sum(output.completion_tokens for output in done.outputs.values())
    notes.figure("decode: output tokens per second", tokens / done.seconds, "/s")
    only, what = bench.used["kinds"][DECODING], "decode: weights, keys and values read, of a copy"
    if only is None:
        notes.skip(what, "no step only decoded")
    else:
        notes.figure("decode: rows in a step", only["rows"], "")
        notes.figure("decode: seconds of a step", only["seconds"] / only["steps"], "s")
        notes.figure(what, 100 * only["bandwidth_share"], "%", least=70)
    bench.waits(done)


def _shared(notes: Notes, bench: _Jobs) -> None:
    chance, size = random.Random(0), bench.core.vocab_size
    count, long, own = (4, 20, 2) if bench.dry else (256, 2048, 64)
    prefix, *ends = ([chance.randrange(3, size) for _ in range(n)] for n in (long, *[own] * count))
    done = bench.run([BenchRow([*prefix, *end], 8) for end in ends])
    notes.figure(f"{count} rows that share {long} tokens: from the cache", 100 * done.hit_share, "%")
    notes.figure(f"{count} rows that share {long} tokens: rows per second", count / done.seconds, "/s")


class _Jobs:
    """Passes over an engine, each over rows with numbers of their own."""

    def __init__(
        self, notes: Notes, place: Place, core: Any, shapes: ModelShapes | None, limits: Limits, dtype: str
    ) -> None:
        self.core, self.dry = core, place.dry
        self.used: dict[str, Any] = {}
        self.told: list[str] = []
        self._notes = notes
        self._shapes, self._limits, self._dtype = shapes, limits, dtype
        self._first = 0
        self._requests: list[Request] = []
        self._name = ""

    def run(self, rows: Iterable[BenchRow]) -> Pass:
        """Raises RuntimeError where a row fails; in a dry run few rows that are cut short."""
        size = self.core.vocab_size
        if self.dry:
            rows = [BenchRow(row.prompt_ids[:30], min(6, row.max_new_tokens)) for row in islice(rows, 4)]
        self._requests = [
            Request(
                self._first + i,
                [token % size for token in row.prompt_ids],
                SamplingParams(max_tokens=row.max_new_tokens, ignore_eos=True),
            )
            for i, row in enumerate(rows)
        ]
        self._first += len(self._requests)
        done = run_pass(self.core, self._requests)
        for output in done.outputs.values():
            if output.error is not None:
                raise RuntimeError(f"a row failed: {output.error.message}")
        return done

    def workload(self, name: str) -> Pass:
        """One of `batchgen bench`."""
        self._name, done = name, self.run(load_workload(name).rows)
        used = utilisation(self.core, self._shapes, done, self._limits)
        self.used = {"dtype": self._dtype, **used}
        return done

    def waits(self, done: Pass) -> None:
        """Measure how long the device waits for the host in the workload before."""
        host: dict[str, float | None] = {}
        with self._notes.attempt(f"{self._name}: how long the GPU waits for the host"):
            host = waiting_shares(self.core, done, self._requests, self._first)
        self._first += len(self._requests)
        self.told += [f"{self._name}:", *table.steps(self.used, host, done.seconds)]
        self._notes.fact("jobs", self.told)
        for kind, share in host.items():
            name = f"{self._name}: the GPU waits for the host, steps: {kind}"
            if share is None:
                self._notes.skip(name, "the profiler saw nothing, or there were too few such steps")
            else:
                self._notes.figure(name, 100 * share, "%", most=3)
