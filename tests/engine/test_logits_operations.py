"""Greedy output with each operation on logits equals that of transformers' `generate`, token for token.

However the engine is driven: chunks, preemption, rows of other sampling in the batch, resumed rows.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import make_engine, reschedule, run
from tiny_models import save_tiny_llama
from transformers import AutoModelForCausalLM, LogitsProcessor

from batchgen.engine.build import Engine
from batchgen.sampling.bad_words import spellings
from batchgen.sampling.operations import Penalties
from batchgen.types import ErrorClass, SamplingParams

MAX_TOKENS = 16
EOS = 258


class OpenAiPenalties(LogitsProcessor):
    """The formula of OpenAI's documentation, over the output alone."""

    def __init__(self, prompt: int, presence: float, frequency: float) -> None:
        self.prompt, self.presence, self.frequency = prompt, presence, frequency

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        counts = torch.bincount(input_ids[0, self.prompt :], minlength=scores.shape[1])
        return scores - counts * self.frequency - (counts > 0) * self.presence


def favour_next(ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    logits[(ids[-1] + len(ids)) % len(logits)] += 4.0
    return logits


class FavourNext(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return favour_next(input_ids[0].tolist(), scores[0].clone())[None]


BIAS = dict.fromkeys(range(0, 250, 7), 3.0)
BAD_WORDS = ("a", "th", "\u00e9t", " x", "00")
CASES: dict[str, dict[str, Any]] = {
    "repetition": {"repetition_penalty": 1.4},
    "presence": {"presence_penalty": 2.0},
    "frequency": {"frequency_penalty": 1.1},
    "bias": {"logit_bias": BIAS},
    "bad_words": {"bad_words": BAD_WORDS},
    "min_tokens": {"min_tokens": 9, "logit_bias": {EOS: 50.0}},
    "custom": {"logits_processors": (favour_next,)},
    "all": {
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.3,
        "logit_bias": BIAS,
        "bad_words": BAD_WORDS,
        "min_tokens": 9,
        "logits_processors": (favour_next,),
    },
}


def make_prompts() -> list[list[int]]:
    rng = random.Random(8)
    return [[rng.randrange(256) for _ in range(n)] for n in (1, 17, 40)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return make_engine(folder)


@pytest.fixture(scope="module")
def generate(folder: Path, engine: Engine) -> Callable[[list[int], SamplingParams], list[int]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model.eval()

    def greedy(prompt: list[int], sampling: SamplingParams) -> list[int]:
        barred = [list(s) for s in spellings(sampling.bad_words, engine.tokenizer)]
        openai = OpenAiPenalties(len(prompt), sampling.presence_penalty, sampling.frequency_penalty)
        custom = [FavourNext()] if sampling.logits_processors else []
        ids = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            repetition_penalty=sampling.repetition_penalty,
            min_new_tokens=sampling.min_tokens,
            bad_words_ids=barred or None,
            sequence_bias={(token,): bias for token, bias in sampling.logit_bias.items()} or None,
            logits_processor=[openai, *custom],
        )[0, len(prompt) :].tolist()
        return ids[: ids.index(EOS)] if EOS in ids else ids

    return greedy


@pytest.fixture(scope="module")
def expected(generate: Any) -> dict[str, list[list[int]]]:
    return {name: [generate(prompt, params(name)) for prompt in make_prompts()] for name in CASES}


def params(name: str) -> SamplingParams:
    return SamplingParams(max_tokens=MAX_TOKENS, **CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_equals_generate(engine: Engine, expected: dict[str, list[list[int]]], name: str) -> None:
    fresh = reschedule(engine, 1024, max_num_batched_tokens=64, max_num_seqs=8)
    assert [o.token_ids for o in run(fresh, make_prompts(), params(name))] == expected[name]


@pytest.mark.parametrize(
    "settings",
    [{"tokens": 1024, "max_num_batched_tokens": 7}, {"tokens": 96, "max_num_batched_tokens": 64}],
    ids=["chunks", "preempted"],
)
def test_rows_of_all_kinds_together(
    engine: Engine, expected: dict[str, list[list[int]]], settings: dict[str, Any]
) -> None:
    fresh = reschedule(engine, max_num_seqs=8, **settings)
    prompts = [prompt for prompt in make_prompts() for _ in CASES]
    outputs = run(fresh, prompts, [params(name) for _ in make_prompts() for name in CASES])
    assert [o.token_ids for o in outputs] == [
        expected[n][i] for i in range(len(make_prompts())) for n in CASES
    ]
    if settings["tokens"] < 1024:
        assert fresh.core.scheduler.stats.preemptions > 0


@pytest.mark.parametrize("cut", [1, 8])
def test_a_resumed_row_counts_what_an_earlier_attempt_sampled(
    engine: Engine, expected: dict[str, list[list[int]]], cut: int
) -> None:
    fresh = reschedule(engine, 1024, max_num_batched_tokens=64, max_num_seqs=8)
    partial = [tokens[:cut] for tokens in expected["all"]]
    outputs = run(fresh, make_prompts(), params("all"), partial=partial)
    assert [o.token_ids for o in outputs] == expected["all"]


def test_parity_fails_when_the_prompt_is_not_counted(
    engine: Engine, expected: dict[str, list[list[int]]], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Penalties.__call__

    def forgetful(self: Penalties, logits: torch.Tensor, history: Any) -> torch.Tensor:
        history.prompt = []
        return real(self, logits, history)

    monkeypatch.setattr(Penalties, "__call__", forgetful)
    fresh = reschedule(engine, 1024, max_num_batched_tokens=64, max_num_seqs=8)
    assert [o.token_ids for o in run(fresh, make_prompts(), params("repetition"))] != expected["repetition"]


def test_the_cases_change_something(expected: dict[str, list[list[int]]], generate: Any) -> None:
    plain = [generate(prompt, SamplingParams(max_tokens=MAX_TOKENS)) for prompt in make_prompts()]
    assert all(tokens != plain for tokens in expected.values())


def test_a_row_that_fails_takes_no_other_with_it(
    engine: Engine, expected: dict[str, list[list[int]]]
) -> None:
    fresh = reschedule(engine, 1024, max_num_batched_tokens=64, max_num_seqs=8)
    stuck = SamplingParams(allowed_token_ids=(5,), bad_words=(engine.tokenizer.decode([5]),))
    unknown = SamplingParams(logit_bias={259: 1.0})
    outputs = run(
        fresh,
        [make_prompts()[0], *make_prompts(), make_prompts()[1]],
        [stuck, *[params("all")] * len(make_prompts()), unknown],
    )
    errors = [outputs[0].error, outputs[-1].error]
    assert [e.error_class for e in errors if e is not None] == [ErrorClass.INVALID_PARAM] * 2
    assert errors[1] is not None
    assert errors[1].message == "logit_bias: token id 259 is not allowed; the model knows ids up to 258"
    assert [o.token_ids for o in outputs[1:-1]] == expected["all"]


def test_only_allowed_tokens_are_drawn(engine: Engine) -> None:
    fresh = reschedule(engine, 1024, max_num_batched_tokens=64, max_num_seqs=8)
    sampling = SamplingParams(max_tokens=12, temperature=1.5, allowed_token_ids=(65, 66, 67))
    outputs = run(fresh, make_prompts(), sampling)
    assert {token for o in outputs for token in o.token_ids} == {65, 66, 67}
    assert all(len(o.token_ids) == 12 for o in outputs)
