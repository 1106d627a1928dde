"""The engine as it is on a GPU, computed on the processor: the same results as there, and what is different.

Attention is the reference's, which runs on both; `tests/kernels/interpreted/triton_gpu.py` has Triton's.
"""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import make_engine, run
from stand_in_gpu import FREE, StandInMemory, stand_in_gpu
from tiny_models import oracle, save_tiny_classifier, save_tiny_llama

import batchgen as bg
from batchgen.core.scheduler import SchedulerOutput
from batchgen.engine import build
from batchgen.engine.build import Engine
from batchgen.engine.sizing import GPU_SHARE
from batchgen.scores import Scoring
from batchgen.types import ErrorClass, SamplingParams, UsageError

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6] * 5 + [7], [250], [3, 1, 4, 1, 5, 9, 2, 6] * 4, [9] * 20]
SETTINGS: dict[str, Any] = {"attention": "reference", "max_model_len": 64, "max_num_batched_tokens": 16}
MiB = 2**20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> StandInMemory:
    return stand_in_gpu(monkeypatch)


def two(folder: Path, **settings: Any) -> tuple[Engine, Engine]:
    """The same engine on the stand-in and on the host."""
    given = {"dtype": "float32", **SETTINGS, **settings}
    return make_engine(folder, **given), make_engine(folder, device="cpu", **given)


def samples(engine: Engine, sampling: SamplingParams, **options: Any) -> list[Any]:
    outputs = run(engine, PROMPTS, sampling, **options)
    return [output.error or [sample.token_ids for sample in output.samples] for output in outputs]


def test_tokens_are_those_of_transformers(folder: Path, memory: StandInMemory) -> None:
    engine = make_engine(folder, dtype="float32", **SETTINGS)
    assert [[tokens] for tokens in oracle(folder, PROMPTS, 8)] == samples(
        engine, SamplingParams(max_tokens=8)
    )
    assert (engine.facts["device"], engine.facts["gpu"]) == ("cuda", "stand-in")
    assert engine.notes[0] == "device: stand-in"
    assert engine.pinned["dtype"] == "float32"


def test_what_is_chosen_when_nothing_is_asked_for(
    folder: Path, memory: StandInMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(build.DEFAULTS, "cuda", build.Defaults(40, 3))
    engine = make_engine(folder, attention="reference", max_num_seqs=None)
    assert engine.pinned == {"dtype": "bfloat16", "kv_cache_dtype": "bfloat16", "max_model_len": 256}
    assert (engine.config.max_num_batched_tokens, engine.config.max_num_seqs) == (40, 3)
    assert engine.core.runner.program is None
    assert "not batch-invariant" in engine.notes[-1]
    exact = make_engine(folder, attention="reference", max_num_seqs=None, device="cpu")
    assert exact.pinned["dtype"] == "float32"


def test_draws_and_operations_are_those_of_the_host(folder: Path, memory: StandInMemory) -> None:
    theirs, ours = two(folder)
    for sampling in (
        SamplingParams(max_tokens=6, temperature=1.0, top_k=20, top_p=0.9, min_p=0.01, seed=4, n=3),
        SamplingParams(max_tokens=6, temperature=0.8, repetition_penalty=1.3, logit_bias={5: 2.0}, seed=1),
        SamplingParams(max_tokens=6, min_tokens=5, bad_words=("a",)),
    ):
        assert samples(theirs, sampling) == samples(ours, sampling)


def test_scores_are_those_of_the_host(folder: Path, memory: StandInMemory) -> None:
    sampling = SamplingParams(max_tokens=4, logprobs=3, temperature=1.0, n=2)
    scoring = [None, None, Scoring(3, tuple(PROMPTS[2][4:12]), 5), None]
    found = [run(engine, PROMPTS, sampling, scoring=scoring) for engine in two(folder)]
    for theirs, ours in zip(*found, strict=True):
        pairs = [(theirs.scores, ours.scores)]
        pairs += [(a.scores, b.scores) for a, b in zip(theirs.samples, ours.samples, strict=True)]
        for a, b in pairs:
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                assert (a.token_ids, a.ranks) == (b.token_ids, b.ranks)
                assert a.logprobs == pytest.approx(b.logprobs, abs=1e-5)
                assert [[t.token_id for t in top] for top in a.top] == [
                    [t.token_id for t in top] for top in b.top
                ]


def test_vectors_and_classes_are_those_of_the_host(
    folder: Path, memory: StandInMemory, tmp_path: Path
) -> None:
    settings = {**SETTINGS, "dtype": "float32"}
    found = [
        list(
            bg.LLM(folder, task="embed", device=device, **settings)
            .embed(["one", "another text"])[1]
            .embedding
        )
        for device in ("auto", "cpu")
    ]
    assert found[0] == pytest.approx(found[1], abs=1e-5)
    classifier = save_tiny_classifier(tmp_path)
    classes = [
        bg.LLM(classifier, device=device, **settings).classify(["a text"])[0].score
        for device in ("auto", "cpu")
    ]
    assert classes[0] == pytest.approx(classes[1], abs=1e-5)


def test_a_row_whose_logits_are_not_finite_is_alone(
    folder: Path, memory: StandInMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(folder, dtype="float32", **SETTINGS)
    wanted = samples(engine, SamplingParams(max_tokens=4))
    execute = engine.core.runner.execute

    def spoiled(planned: SchedulerOutput, *pending: Any) -> torch.Tensor:
        logits = execute(planned, *pending).clone()
        samplers = [s.request.request_id for s in planned.scheduled if s.samples]
        logits[[row == 1 for row in samplers]] = float("nan")
        return logits

    monkeypatch.setattr(engine.core.runner, "execute", spoiled)
    found = samples(engine, SamplingParams(max_tokens=4))
    assert found[1].error_class is ErrorClass.NONFINITE
    assert [found[i] for i in (0, 2, 3)] == [wanted[i] for i in (0, 2, 3)]


def test_memory_that_runs_out_is_given_back_before_a_smaller_step(
    folder: Path, memory: StandInMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(folder, dtype="float32", **SETTINGS)
    wanted = samples(engine, SamplingParams(max_tokens=4))
    execute, alive = engine.core.runner.execute, []

    def limited(planned: SchedulerOutput, *pending: Any) -> torch.Tensor:
        large = torch.zeros(planned.total_tokens)
        alive.append(weakref.ref(large))
        if planned.total_tokens > 5:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return execute(planned, *pending)

    def give_back() -> None:
        assert [ref() for ref in alive] == [None] * len(alive), "what the failed step holds is still taken"
        memory.given_back += 1

    monkeypatch.setattr(engine.core.runner, "execute", limited)
    monkeypatch.setattr(memory, "give_back", give_back)
    before = memory.given_back
    assert samples(engine, SamplingParams(max_tokens=4)) == wanted
    assert memory.given_back - before >= 2


def test_the_pool_gets_what_a_step_leaves(folder: Path, memory: StandInMemory) -> None:
    engine = make_engine(folder, dtype="float32", **{**SETTINGS, "max_model_len": 512}, max_num_seqs=5_000)
    plan = engine.core.runner.layout.block_bytes * engine.facts["num_blocks"]
    (step,) = (line.split()[2] for line in engine.notes if line.startswith("  largest step"))
    assert plan <= FREE * GPU_SHARE < plan + (int(step) + 2) * MiB
    engine.core.close()
    small = make_engine(folder, dtype="float32", **SETTINGS, kv_cache_memory=MiB)
    assert small.facts["num_blocks"] == MiB // small.core.runner.layout.block_bytes


def test_closing_returns_everything(
    folder: Path, memory: StandInMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = bg.LLM(folder, dtype="float32", **SETTINGS)
    llm.generate(["a", "b"], SamplingParams(max_tokens=3, temperature=1.0))
    runner = llm._engine.core.runner
    kept = [*runner.kv.buffers, *llm._engine.loaded.model.parameters(), runner.hidden]
    refs = [weakref.ref(tensor) for tensor in kept]
    del kept, runner
    alive: list[int] = []
    monkeypatch.setattr(memory, "give_back", lambda: alive.append(sum(ref() is not None for ref in refs)))
    llm.close()
    assert alive[-1] == 0, "what was given back last was still held by somebody"


def test_the_same_bits_in_every_batch_only_where_they_are_proven(
    folder: Path, memory: StandInMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match=r"in float32 with cuda and engine\.attention: reference"):
        make_engine(folder, dtype="float32", deterministic=True, **SETTINGS)


def test_a_device_that_is_broken_ends_the_engine(
    folder: Path, memory: StandInMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row alone would else be blamed, and every row behind it."""
    engine = make_engine(folder, **SETTINGS)
    assert run(engine, PROMPTS[:1], SamplingParams(max_tokens=2))[0].error is None

    def broken(output: SchedulerOutput) -> torch.Tensor:
        memory.broken = torch.AcceleratorError("CUDA error: an illegal memory access was encountered")
        raise RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")

    monkeypatch.setattr(engine.core.runner, "execute", broken)
    with pytest.raises(torch.AcceleratorError, match="illegal memory"):
        run(engine, PROMPTS[1:2], SamplingParams(max_tokens=2))
