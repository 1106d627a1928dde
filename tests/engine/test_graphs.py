"""Captured steps, with a stand-in that does again what was captured, against engines without them."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import make_engine, reschedule, run
from hypothesis import given
from hypothesis import strategies as st
from stand_in_gpu import StandInCapture, StandInMemory, stand_in_gpu
from tiny_models import oracle, save_tiny_llama
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from batchgen.engine import first_start, materials, sizing
from batchgen.engine.build import Engine
from batchgen.engine.capture import CudaCapture
from batchgen.engine.graphs import bucket_sizes, graph_bytes
from batchgen.scores import Scoring
from batchgen.types import SamplingParams, UsageError

PROMPTS = [[5, 9, 2, 7, 7, 3, 1] * 3, [8, 8, 4], [1], [200, 100] * 9, [17, 3, 5]]
SETTINGS: dict[str, Any] = {
    "attention": "reference",
    "dtype": "float32",
    "max_model_len": 96,
    "max_num_batched_tokens": 128,
    "max_num_seqs": 8,
}
TOKENS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture
def capture(monkeypatch: pytest.MonkeyPatch) -> StandInCapture:
    capture = StandInCapture()
    stand_in_gpu(monkeypatch, capture)
    return capture


def ids(engine: Engine, sampling: SamplingParams | Sequence[SamplingParams]) -> list[list[list[int]]]:
    return [[s.token_ids for s in output.samples] for output in run(engine, PROMPTS, sampling)]


def scribble(engine: Engine) -> None:
    """Fill what no sequence may see: the null block, and what earlier steps leave in block tables."""
    runner = engine.core.runner
    assert runner.graphs is not None
    generator = torch.Generator().manual_seed(0)
    blocks = runner.kv.caches[0].num_blocks
    for table in runner.graphs._tables:
        table.copy_(torch.randint(0, blocks, table.shape, generator=generator))
    runner.graphs._inputs.fill_(0)
    for cache in runner.kv.caches:
        for tensor in cache.tensors:
            tensor[0] = 3e4


SAMPLINGS = {
    "greedy": SamplingParams(max_tokens=TOKENS),
    "sampled": SamplingParams(max_tokens=TOKENS, temperature=1.0, top_p=0.9, seed=3),
    "forked": SamplingParams(max_tokens=TOKENS, temperature=1.0, n=3, seed=3),
    "biased": SamplingParams(max_tokens=TOKENS, repetition_penalty=1.3),
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "together": {"max_num_batched_tokens": 512, "max_num_seqs": 8},
    "chunks": {"max_num_batched_tokens": 7, "max_num_seqs": 5},
    "alone": {"max_num_batched_tokens": 512, "max_num_seqs": 1},
}


@pytest.mark.parametrize("name", SAMPLINGS)
def test_tokens_are_those_of_an_engine_without(name: str, folder: Path, capture: StandInCapture) -> None:
    sampling = SAMPLINGS[name]
    plain = make_engine(folder, cuda_graphs=False, **SETTINGS)
    assert plain.core.runner.graphs is None
    want = ids(plain, sampling)
    engine = make_engine(folder, cuda_graphs=True, **SETTINGS)
    scribble(engine)
    for pool, schedule in ((400, "together"), (400, "chunks"), (400, "alone"), (80, "together")):
        driven, before = reschedule(engine, pool, **SCHEDULES[schedule]), capture.launched
        assert ids(driven, sampling) == want, (pool, schedule)
        assert capture.launched > before
        assert driven.core.scheduler.stats.preemptions > 0 or pool > 80
    if name == "greedy":
        assert [samples[0] for samples in want] == oracle(folder, PROMPTS, TOKENS)


def test_rows_that_are_too_many_write_nowhere(folder: Path, capture: StandInCapture) -> None:
    engine = make_engine(folder, cuda_graphs=True, **SETTINGS)
    scribble(engine)
    run(engine, PROMPTS[:3], SAMPLINGS["greedy"])
    assert capture.launched > 0
    for cache in engine.core.runner.kv.caches:
        for tensor in cache.tensors:
            assert (tensor[0] == 3e4).all()


@pytest.mark.parametrize("name", ["gemma3", "qwen2-window"])
def test_groups_of_layers_have_their_own_tables(name: str, tmp_path: Path, capture: StandInCapture) -> None:
    from families import FAMILIES

    one = next(f for f in FAMILIES if f.name == name).save(tmp_path)
    sampling = SamplingParams(max_tokens=30, ignore_eos=True)
    plain = make_engine(one, cuda_graphs=False, **SETTINGS)
    assert len(plain.core.runner.layout.groups) > 1
    want = ids(plain, sampling)
    engine = make_engine(one, cuda_graphs=True, **SETTINGS)
    scribble(engine)
    assert ids(engine, sampling) == want
    assert capture.launched > 0


def test_only_steps_that_decode_and_are_not_read_are_launched(folder: Path, capture: StandInCapture) -> None:
    engine = make_engine(folder, cuda_graphs=True, **SETTINGS)
    launched: list[bool] = []
    execute = engine.core.runner.execute

    def recording(output: Any, *pending: Any) -> torch.Tensor:
        before = capture.launched
        logits = execute(output, *pending)
        launched.append(capture.launched > before)
        only_tokens = all(s.num_tokens == 1 and s.samples for s in output.scheduled)
        read = any(len(s.request.reads(s.start, s.start + s.num_tokens)) for s in output.scheduled)
        assert launched[-1] == (only_tokens and not read)
        return logits

    engine.core.runner.execute = recording  # type: ignore[method-assign]
    scored = replace(SAMPLINGS["greedy"], logprobs=2)
    # What an earlier attempt has sampled is scored again, one of them in a step of a single token.
    partial = [[], [4, 5, 6], [9], [], []]
    scoring = [None, None, None, Scoring(2, tuple(PROMPTS[3][3:]), 1), None]
    outputs = run(engine, PROMPTS, scored, partial, scoring=scoring)
    assert True in launched
    assert False in launched
    plain = make_engine(folder, cuda_graphs=False, **SETTINGS)
    for got, want in zip(outputs, run(plain, PROMPTS, scored, partial, scoring=scoring), strict=True):
        assert got.token_ids == want.token_ids
        assert got.logprobs is not None
        assert want.logprobs is not None
        assert [t.logprob for t in got.logprobs] == pytest.approx(
            [t.logprob for t in want.logprobs], abs=1e-4
        )


class Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Watches what operations read that they did not make under it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.read: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self._made: set[int] = set()

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        for storage in self._storages((args, kwargs)):
            if storage._cdata not in self._made:
                self.read[storage._cdata] = weakref.ref(storage)
        result = func(*args, **(kwargs or {}))
        self._made |= {storage._cdata for storage in self._storages(result)} - self.read.keys()
        return result

    def _storages(self, values: Any) -> Iterator[torch.UntypedStorage]:
        return (leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))


def test_what_captured_steps_read_is_kept(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU does them again at the same addresses, whoever has that memory by then."""
    watched: list[Reads] = []

    def forgetting(run: Callable[[], None]) -> Callable[[], None]:
        run()
        watched.append(Reads())
        with watched[-1]:
            run()
        return lambda: None

    stand_in_gpu(monkeypatch, forgetting)
    engine = make_engine(folder, cuda_graphs=True, **SETTINGS)
    gc.collect()
    graphs = engine.core.runner.graphs
    assert graphs is not None
    for reads in watched[-len(graphs._launches) :]:
        assert len(reads.read) > 10
        assert all(storage() is not None for storage in reads.read.values())


class FakeCuda:
    """Of `torch.cuda` what a capture needs, which goes wrong as it does in torch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current: Any = self.Stream(None)
        self.device = torch.device("cuda", 0)
        for name, fake in {
            "Stream": self.Stream,
            "stream": self.stream,
            "device": self.on,
            "graph": self.graph,
            "current_stream": lambda _: self.current,
            "graph_pool_handle": lambda: (0, 1),
            "CUDAGraph": lambda: self,
        }.items():
            monkeypatch.setattr(torch.cuda, name, fake)

    class Stream:
        def __init__(self, place: Any) -> None: ...

        def wait_stream(self, other: Any) -> None: ...

    def replay(self) -> None: ...

    @contextmanager
    def on(self, device: torch.device) -> Iterator[None]:
        before, self.device = self.device, device
        yield
        self.device = before

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    @contextmanager
    def graph(self, graph: Any, pool: Any, stream: Any, *, capture_error_mode: str) -> Iterator[None]:
        before, self.current = self.current, stream
        assert self.device == torch.device("cuda", 1)
        yield
        self.current = before


def test_a_capture_that_fails_leaves_the_stream_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(monkeypatch)
    usual, calls = cuda.current, []
    capture = CudaCapture(torch.device("cuda", 1))

    def run() -> None:
        assert cuda.current is not usual
        calls.append(1)
        if len(calls) == 4:
            raise RuntimeError("operation not permitted when stream is capturing")

    assert capture(run) == cuda.replay
    assert cuda.current is usual
    with pytest.raises(RuntimeError, match="not permitted"):
        capture(run)
    assert cuda.current is usual


def test_more_rows_than_were_captured_run_as_ever(folder: Path, capture: StandInCapture) -> None:
    engine = make_engine(folder, cuda_graphs=True, **{**SETTINGS, "max_num_seqs": 2})
    driven = reschedule(engine, 176, max_num_batched_tokens=128, max_num_seqs=8)
    plain = make_engine(folder, cuda_graphs=False, **SETTINGS)
    assert ids(driven, SAMPLINGS["greedy"]) == ids(plain, SAMPLINGS["greedy"])
    assert capture.captured == (1 + 1 + 2) + 2


def test_sequences_that_are_longer_than_was_captured_run_as_ever(
    folder: Path, capture: StandInCapture
) -> None:
    engine = make_engine(folder, cuda_graphs=True, **SETTINGS)
    engine.core.runner.capture([8, 1], 32)
    lengths: list[int] = []
    execute = engine.core.runner.execute

    def recording(output: Any, *pending: Any) -> torch.Tensor:
        before = capture.launched
        logits = execute(output, *pending)
        if capture.launched > before:
            lengths.append(max(s.start for s in output.scheduled) + 1)
        return logits

    engine.core.runner.execute = recording  # type: ignore[method-assign]
    plain = make_engine(folder, cuda_graphs=False, **SETTINGS)
    assert ids(engine, SAMPLINGS["greedy"]) == ids(plain, SAMPLINGS["greedy"])
    assert max(lengths) == 32


@given(st.integers(1, 2000), st.sampled_from([1, 2, 4, 8, 32]))
def test_sizes(most: int, multiple: int) -> None:
    sizes = bucket_sizes(most, multiple)
    assert sizes == sorted(set(sizes), reverse=True)
    assert most <= sizes[0] < most + multiple
    assert all(size % multiple == 0 for size in sizes)
    for rows in range(8 * multiple, most):
        assert min(size for size in sizes if size >= rows) <= rows * 9 / 8 + 32


class Growing(StandInMemory):
    """A memory from which captured steps take."""

    def __init__(self) -> None:
        super().__init__()
        self.taken = self.hidden = 0

    def free(self) -> int:
        return super().free() - self.taken - self.hidden

    def held(self) -> int:
        return self.taken


def test_what_captured_steps_keep_follows_from_two() -> None:
    memory = Growing()

    def capture(sizes: Sequence[int]) -> None:
        memory.taken = sizes[0] * 1000 + len(sizes) * 7 if sizes else 0

    assert graph_bytes(memory, capture, [64, 32, 8, 1]) == 64_000 + 4 * 7
    assert graph_bytes(memory, capture, [64]) == 64_007
    assert memory.taken == 0

    def beside(sizes: Sequence[int]) -> None:
        capture(sizes)
        memory.hidden = 300 * len(sizes)

    assert graph_bytes(memory, beside, [64, 32, 8, 1]) == 64_000 + 4 * 307


def test_what_others_take_meanwhile_is_not_counted_as_captured_steps() -> None:
    memory = Growing()

    def capture(sizes: Sequence[int]) -> None:
        memory.taken = len(sizes) * 7
        memory.hidden += 5 << 30

    assert graph_bytes(memory, capture, [64, 32, 8, 1]) <= 4 * (7 + (32 << 20))


def broken(run: Callable[[], None]) -> Callable[[], None]:
    raise RuntimeError("operation not permitted\nwhen stream is capturing")


def test_what_cannot_be_captured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_gpu(monkeypatch, broken)
    with pytest.raises(UsageError, match=r"engine.cuda_graphs: a step of this model could not be captured"):
        make_engine(folder, cuda_graphs=True, **SETTINGS)
    with pytest.raises(UsageError, match=r"a model for embed has none"):
        make_engine(folder, cuda_graphs=True, task="embed", **SETTINGS)
    # Layers of transformers' own may wait for the device.
    engine = make_engine(folder, **SETTINGS)
    assert engine.core.runner.graphs is None


def test_captured_steps_with_other_bits_are_given_up(
    folder: Path, capture: StandInCapture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_start, "_may_be_invariant", lambda *_: True)
    monkeypatch.setattr(first_start, "model_is_invariant", lambda *_: True)
    monkeypatch.setattr(materials, "find_step_multiple", lambda *_: 1)
    tried: list[bool] = []

    def other_bits(runner: Any, *_: Any) -> bool:
        tried.append(runner.graphs is not None)
        return False

    settings = {**SETTINGS, "deterministic": True}
    monkeypatch.setattr(materials, "captured_steps_are_independent", other_bits)
    with pytest.raises(
        UsageError, match=r"engine\.cuda_graphs: engine\.deterministic asks .* cuda_graphs: auto"
    ):
        make_engine(folder, cuda_graphs=True, **settings)
    monkeypatch.setattr(sizing.Sizing, "captures", True)
    engine = make_engine(folder, **settings)
    assert engine.core.runner.graphs is None
    assert "CUDA graphs: none, as a row would have other bits in a captured step" in engine.notes
    assert tried == [True, True]
    # Where nobody asks for the same bits, nobody looks.
    assert make_engine(folder, cuda_graphs=True, **SETTINGS).core.runner.graphs is not None
    assert len(tried) == 2


def test_the_processor_captures_nothing(folder: Path) -> None:
    assert make_engine(folder).core.runner.graphs is None
    with pytest.raises(UsageError, match=r"engine.cuda_graphs: true asks .* on cpu none are"):
        make_engine(folder, cuda_graphs=True)
    with pytest.raises(UsageError, match=r"engine.cuda_graphs: 'yes' is not allowed"):
        make_engine(folder, cuda_graphs="yes")
