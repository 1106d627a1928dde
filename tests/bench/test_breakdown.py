"""The clocks around an engine: all time is somewhere, nothing computed changes, nothing is left behind."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from engine_harness import make_engine, run
from tiny_models import save_tiny_llama

from batchgen.bench.breakdown import Clock, clocked
from batchgen.bench.machine import product_rates, read_bandwidth
from batchgen.bench.shapes import Product
from batchgen.cache import cache_dir
from batchgen.engine import prepared
from batchgen.engine.build import Engine
from batchgen.models.prepared import PreparedModel
from batchgen.types import SamplingParams

PROMPTS = [[10 + i, 20, 30, 40] for i in range(5)]
SAMPLING = SamplingParams(max_tokens=4, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock whose time is the last number."""
    times = [0.0]
    monkeypatch.setattr("batchgen.bench.breakdown.time.perf_counter", lambda: times[-1])
    return times


def test_time_is_charged_to_the_innermost_part(now: list[float]) -> None:
    clock = Clock()

    def inner() -> None:
        now.append(now[-1] + 5)

    def outer() -> None:
        now.append(now[-1] + 1)
        clock.around("inner", inner, then="behind")()
        now.append(now[-1] + 2)

    clock.around("outer", outer)()
    now.append(now[-1] + 100)
    clock.around("outer", lambda: None)()
    assert clock.seconds == {"outer": 1, "inner": 5, "behind": 2}
    assert clock.depth == 0


def test_a_part_that_raises_ends(now: list[float]) -> None:
    clock = Clock()

    def fail() -> None:
        now.append(now[-1] + 3)
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        clock.around("outer", clock.around("inner", fail))()
    assert clock.depth == 0
    assert clock.seconds == {"outer": 0, "inner": 3}


@pytest.fixture
def start(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Engine]:
    """An engine whose layers are one program, from the model or from what a start has kept, or are not."""

    def engine(kind: str) -> Engine:
        if kind == "apart":
            # Then transformers' own layers compute.
            return make_engine(folder, attention="reference")
        if kind == "kept":
            monkeypatch.setenv("NUMBA_CACHE_DIR", str(cache_dir() / "numba"))
            monkeypatch.setenv("BATCHGEN_CACHE", str(tmp_path / "cache"))
            monkeypatch.setattr(prepared, "LEAST_BYTES", 0)
            make_engine(folder).core.close()
        return make_engine(folder)

    return engine


@pytest.mark.parametrize("kind", ["program", "kept", "apart"])
def test_an_engine_under_clocks(start: Callable[[str], Engine], kind: str) -> None:
    engine = start(kind)
    core = engine.core
    assert (core.runner.program is None) == (kind == "apart")
    assert isinstance(engine.loaded, PreparedModel) == (kind == "kept")
    weights = 4 * (2 * (64 * 128 + 64 * 64 + 64 * 256 + 128 * 64) + 259 * 64)
    assert weights <= core.runner.parts.read_bytes <= 1.05 * weights
    plain = run(engine, PROMPTS, SAMPLING)
    names = [set(vars(owner)) for owner in (core, core.runner, core.scheduler, core.runner.backend)]
    with clocked(core) as parts:
        began = time.perf_counter()
        measured = run(engine, PROMPTS, SAMPLING)
        seconds = time.perf_counter() - began
        found = parts()
    assert [o.token_ids for o in measured] == [o.token_ids for o in plain]
    products = {"qkv", "output", "gate_up", "down", "lm_head", "attention"}
    assert products | {"scheduler", "inputs", "embedding", "sampling", "host"} <= found.keys()
    assert all(found[name] > 0 for name in products)
    assert sum(found.values()) <= seconds
    owners = (core, core.runner, core.scheduler, core.runner.backend)
    assert [set(vars(owner)) for owner in owners] == names
    core.close()


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_operations_are_timed(folder: Path, threads: int) -> None:
    before = torch.get_num_threads()
    engine = make_engine(folder, num_threads=threads)
    program = engine.core.runner.program
    assert program is not None
    times = program.watch()
    assert set(times.seconds().values()) == {0.0}
    began = time.monotonic()
    run(engine, PROMPTS, SAMPLING)
    first = times.seconds()
    assert all(seconds > 0 for seconds in first.values())
    assert sum(first.values()) <= time.monotonic() - began
    run(engine, PROMPTS, SAMPLING)
    assert all(seconds > first[kind] for kind, seconds in times.seconds().items())
    engine.core.close()
    torch.set_num_threads(before)


def test_rates_of_the_machine() -> None:
    [rate] = product_rates([(Product("qkv", 64, 128, 1), 8)])
    assert rate.ours is not None
    assert rate.best == max(rate.ours, rate.torch) > 0
    assert read_bandwidth() > 0
