"""Logprobs of sampled tokens against transformers' own, however the engine is driven, and their bits."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import make_engine, reschedule, run
from tiny_models import save_tiny_llama
from transformers import AutoModelForCausalLM

from batchgen.engine import live_row
from batchgen.engine.build import Engine
from batchgen.scores import Scoring
from batchgen.types import Output, SamplingParams

TOP = 4
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True, logprobs=TOP)
# Everything that changes logits must leave the logprobs alone, which are those of the model.
CHANGED = SamplingParams(
    max_tokens=12,
    ignore_eos=True,
    temperature=1.5,
    top_k=20,
    repetition_penalty=1.3,
    logit_bias={5: 3.0},
    min_tokens=3,
    logprobs=TOP,
)


def make_prompts() -> list[list[int]]:
    rng = random.Random(11)
    return [[rng.randrange(256) for _ in range(n)] for n in (1, 16, 17, 45)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return make_engine(folder)


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def fresh(engine: Engine, **settings: Any) -> Engine:
    given = {"tokens": 1024, "max_num_batched_tokens": 64, "max_num_seqs": 8, **settings}
    return reschedule(engine, **given)


def equals_the_models(model: Any, prompt: Sequence[int], tokens: Sequence[int], sample: Any) -> None:
    with torch.inference_mode():
        logits = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
    logprobs = torch.log_softmax(logits.double(), -1)
    assert sample.logprobs is not None
    assert [entry.token_id for entry in sample.logprobs] == list(tokens)
    for entry, row in zip(sample.logprobs, logprobs, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=1e-4)
        assert entry.rank == 1 + int((row > row[entry.token_id]).sum())
        likeliest = torch.topk(row, TOP)
        assert [token.token_id for token in entry.top] == likeliest.indices.tolist()
        assert [token.rank for token in entry.top] == [1, 2, 3, 4]
        assert [token.logprob for token in entry.top] == pytest.approx(likeliest.values.tolist(), abs=1e-4)


@pytest.mark.parametrize("sampling", [GREEDY, CHANGED], ids=["greedy", "changed"])
def test_equal_those_of_transformers(engine: Engine, model: Any, sampling: SamplingParams) -> None:
    outputs = run(fresh(engine), make_prompts(), sampling)
    for prompt, output in zip(make_prompts(), outputs, strict=True):
        equals_the_models(model, prompt, output.token_ids, output.samples[0])
    ranks = [entry.rank for output in outputs for entry in output.samples[0].logprobs or ()]
    assert (set(ranks) == {1}) == sampling.greedy


def test_each_of_several_samples_has_its_own(engine: Engine, model: Any) -> None:
    sampling = SamplingParams(max_tokens=6, n=3, temperature=1.0, ignore_eos=True, logprobs=TOP)
    for prompt, output in zip(make_prompts(), run(fresh(engine), make_prompts(), sampling), strict=True):
        for sample in output.samples:
            equals_the_models(model, prompt, sample.token_ids, sample)


def scores_of(outputs: Sequence[Output]) -> list[Any]:
    return [[(sample.token_ids, sample.scores) for sample in output.samples] for output in outputs]


@pytest.mark.parametrize("n", [1, 2], ids=["single", "forks"])
@pytest.mark.parametrize(
    "settings",
    [{"max_num_batched_tokens": 7}, {"tokens": 112}, {"prefix_caching": False}],
    ids=["chunks", "preempted", "uncached"],
)
def test_bits_do_not_depend_on_the_schedule(engine: Engine, n: int, settings: dict[str, Any]) -> None:
    sampling = SamplingParams(max_tokens=12, n=n, temperature=1.0, ignore_eos=True, logprobs=TOP)
    expected = scores_of(run(fresh(engine, max_num_seqs=8), make_prompts(), sampling))
    other = fresh(engine, **settings)
    assert scores_of(run(other, make_prompts(), sampling)) == expected
    if "tokens" in settings:
        assert other.core.scheduler.stats.preemptions > 0


@pytest.mark.parametrize("prompt_logprobs", [None, 2])
@pytest.mark.parametrize("cut", [1, 5, 12, 99])
@pytest.mark.parametrize("chunk", [5, 64])
def test_a_resumed_row_has_the_same_bits(
    engine: Engine, cut: int, chunk: int, prompt_logprobs: int | None
) -> None:
    sampling = SamplingParams(
        max_tokens=12, temperature=0.8, stop=("e", "a"), logprobs=3, prompt_logprobs=prompt_logprobs
    )
    scoring = [
        None if prompt_logprobs is None or len(p) < 2 else Scoring(0, tuple(p[1:]), prompt_logprobs)
        for p in make_prompts()
    ]

    def outputs_of(partial: Sequence[list[int]] | None) -> list[Output]:
        return run(
            fresh(engine, max_num_batched_tokens=chunk), make_prompts(), sampling, partial, scoring=scoring
        )

    whole = outputs_of(None)
    partial = sampled_tokens(engine, sampling)
    resumed = outputs_of([tokens[:cut] for tokens in partial])
    assert scores_of(resumed) == scores_of(whole)
    assert [o.scores for o in resumed] == [o.scores for o in whole]
    assert [o.text for o in resumed] == [o.text for o in whole]


def sampled_tokens(engine: Engine, sampling: SamplingParams) -> list[list[int]]:
    """Every token that was drawn, those behind the end of the answer too, as partial results have them."""
    fresh_engine = fresh(engine)
    tokens: dict[int, list[int]] = {}
    step = fresh_engine.core.step

    def stepping() -> list[Output]:
        rows = {r: live.first.output_token_ids for r, live in fresh_engine.core._live.items()}
        outputs = step()
        tokens.update(rows)
        return outputs

    fresh_engine.core.step = stepping  # type: ignore[method-assign]
    run(fresh_engine, make_prompts(), sampling)
    return [tokens[i] for i in range(len(make_prompts()))]


def test_what_is_not_asked_for_is_not_there(engine: Engine) -> None:
    plain, bare = (
        run(fresh(engine), make_prompts()[:1], SamplingParams(max_tokens=3, logprobs=k))[0].samples[0]
        for k in (None, 0)
    )
    assert plain.logprobs is None
    assert bare.logprobs is not None
    assert [entry.top for entry in bare.logprobs] == [()] * len(bare.token_ids)


def test_bits_differ_where_tokens_are_scored_at_the_wrong_place(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = scores_of(run(fresh(engine), make_prompts(), GREEDY))
    partial = [tokens[:5] for tokens in sampled_tokens(engine, GREEDY)]
    real = live_row._also_of

    def shifted(request: Any, known: list[int]) -> Scoring:
        scoring = real(request, known)
        return Scoring(max(0, scoring.first - 1), scoring.targets, scoring.top_k)

    monkeypatch.setattr(live_row, "_also_of", shifted)
    assert scores_of(run(fresh(engine), make_prompts(), GREEDY, partial)) != expected
