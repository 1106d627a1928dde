"""Each operation on logits against transformers' own, else against a written-out formula; and their order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizers import byte_fallback, byte_level

from batchgen.sampling.bad_words import spellings
from batchgen.sampling.history import TokenHistory
from batchgen.sampling.operations import BadWords, Operation, Penalties, operations_of
from batchgen.sampling.sampler import SamplingRow, keep_min_p, keep_top_k, keep_top_p, processed, sample
from batchgen.text.tokenizer import Tokenizer
from batchgen.types import ErrorClass, RowError, SamplingParams

VOCAB = 12
STOPS = frozenset({3, 7})
tokens = st.lists(st.integers(0, VOCAB - 1), max_size=10)
prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=10)
seeds = st.integers(0, 2**32)
words = st.lists(
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=3).map(tuple),
    min_size=1,
    max_size=4,
    unique=True,
)


def logits_of(seed: int, vocab: int = VOCAB) -> torch.Tensor:
    return 3 * torch.randn(vocab, generator=torch.Generator().manual_seed(seed))


def theirs(processor: Callable[..., Any], logits: torch.Tensor, ids: list[int]) -> torch.Tensor:
    result: torch.Tensor = processor(torch.tensor([ids]), logits[None].clone())[0]
    return result


def ours(operation: Operation, logits: torch.Tensor, prompt: list[int], output: list[int]) -> torch.Tensor:
    return operation(logits.clone(), TokenHistory(prompt, output))


def made(**sampling: Any) -> tuple[Operation, ...]:
    return operations_of(SamplingParams(**sampling), STOPS, NO_TOKENIZER, VOCAB)


NO_TOKENIZER: Any = None


@given(seeds, prompts, tokens, st.floats(0.1, 5))
def test_repetition_penalty(seed: int, prompt: list[int], output: list[int], penalty: float) -> None:
    logits = logits_of(seed)
    expected = transformers.RepetitionPenaltyLogitsProcessor(penalty)
    found = ours(Penalties(penalty, 0.0, 0.0), logits, prompt, output)
    assert torch.equal(found, theirs(expected, logits, prompt + output))


@given(seeds, prompts, tokens, st.floats(-2, 2), st.floats(-2, 2))
def test_presence_and_frequency_penalty(
    seed: int, prompt: list[int], output: list[int], presence: float, frequency: float
) -> None:
    logits = logits_of(seed)
    expected = [
        x - np.float32(frequency) * output.count(i) - np.float32(presence) * (i in output)
        for i, x in enumerate(logits.numpy())
    ]
    found = ours(Penalties(1.0, frequency, presence), logits, prompt, output)
    torch.testing.assert_close(found, torch.tensor(np.array(expected)))


@given(seeds, prompts, st.lists(st.integers(0, 200), max_size=150), st.data())
def test_counts_that_follow_the_output_are_those_of_the_whole(
    seed: int, prompt: list[int], output: list[int], data: st.DataObject
) -> None:
    """As in a request that is resumed, preempted or asked twice at one length: bit by bit the same."""
    logits, penalties = logits_of(seed, 201), Penalties(1.3, 0.5, 0.25)
    growing: list[int] = []
    history = TokenHistory(prompt, growing)
    for end in [*data.draw(st.lists(st.integers(0, len(output)), max_size=6).map(sorted)), len(output)]:
        growing += output[len(growing) : end]
        whole = ours(penalties, logits, prompt, output[:end])
        assert torch.equal(penalties(logits.clone(), history), whole)


@given(seeds, prompts, tokens, words)
def test_bad_words(seed: int, prompt: list[int], output: list[int], barred: list[tuple[int, ...]]) -> None:
    logits = logits_of(seed)
    expected = transformers.NoBadWordsLogitsProcessor([list(word) for word in barred])
    assert torch.equal(
        ours(BadWords(barred), logits, prompt, output), theirs(expected, logits, prompt + output)
    )


@given(seeds, prompts, tokens, st.integers(1, 9))
def test_min_tokens(seed: int, prompt: list[int], output: list[int], least: int) -> None:
    logits = logits_of(seed)
    expected = transformers.MinNewTokensLengthLogitsProcessor(len(prompt), least, sorted(STOPS), device="cpu")
    (operation,) = made(min_tokens=least, max_tokens=9)
    assert torch.equal(ours(operation, logits, prompt, output), theirs(expected, logits, prompt + output))


@given(seeds, st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100, width=32), min_size=1))
def test_logit_bias(seed: int, bias: dict[int, float]) -> None:
    logits = logits_of(seed)
    expected = transformers.SequenceBiasLogitsProcessor({(token,): b for token, b in bias.items()})
    for operation in made(logit_bias=bias):
        assert torch.equal(ours(operation, logits, [0], []), theirs(expected, logits, [0]))


@given(seeds, st.lists(st.integers(0, VOCAB - 1), min_size=1))
def test_allowed_token_ids(seed: int, allowed: list[int]) -> None:
    logits = logits_of(seed)
    expected = transformers.PrefixConstrainedLogitsProcessor(lambda *_: allowed, num_beams=1)
    (operation,) = made(allowed_token_ids=tuple(allowed))
    assert torch.equal(ours(operation, logits, [0], []), theirs(expected, logits, [0]))


@given(seeds, st.floats(0.05, 0.95), st.floats(0.5, 4))
def test_warpers(seed: int, share: float, temperature: float) -> None:
    logits = logits_of(seed)
    heated = theirs(transformers.TemperatureLogitsWarper(temperature), logits, [0])
    assert torch.equal(heated, logits / temperature)
    probabilities = torch.softmax(logits / temperature, -1)
    for warper, kept in (
        (transformers.TopKLogitsWarper(1 + seed % VOCAB), keep_top_k(probabilities, 1 + seed % VOCAB)),
        (transformers.TopPLogitsWarper(share), keep_top_p(probabilities, share)),
        (transformers.MinPLogitsWarper(share), keep_min_p(probabilities, share)),
    ):
        allowed = theirs(warper, heated, [0]) > -torch.inf
        assert torch.equal(kept > 0, allowed), type(warper).__name__


@given(seeds, prompts, tokens)
def test_order(seed: int, prompt: list[int], output: list[int]) -> None:
    """Written out in plain Python; each two of the operations are exchanged below and give something else."""
    assert torch.equal(in_order(seed, prompt, output), all_of_them(seed, prompt, output))


def all_of_them(seed: int, prompt: list[int], output: list[int]) -> torch.Tensor:
    operations = (
        *made(
            allowed_token_ids=(1, 2, 3, 4, 5),
            min_tokens=5,
            logit_bias={2: 1.5, 3: 100.0, 8: 100.0},
            repetition_penalty=1.7,
            presence_penalty=0.5,
            logits_processors=(lambda ids, logits: logits * (1 + len(ids)),),
        ),
    )
    row = SamplingRow(SamplingParams(), 0, 0, 9, operations, TokenHistory(prompt, output))
    return processed(logits_of(seed), row)


def in_order(seed: int, prompt: list[int], output: list[int]) -> torch.Tensor:
    logits = logits_of(seed)
    for token in range(VOCAB):
        x = logits[token].clone()
        if token not in (1, 2, 3, 4, 5) or (len(output) < 5 and token in STOPS):
            x = torch.tensor(-torch.inf)
        x = x + {2: 1.5, 3: 100.0, 8: 100.0}.get(token, 0.0)
        if token in prompt or token in output:
            x = x / 1.7 if x > 0 else x * 1.7
        if token in output:
            x = x - 0.5
        logits[token] = x * (1 + len(prompt) + len(output))
    return logits


def test_bias_comes_before_the_penalty_of_repetition() -> None:
    """The sign that decides how it is applied is that of the biased logits."""
    row = SamplingRow(
        SamplingParams(), 0, 0, 1, made(logit_bias={0: 3.0}, repetition_penalty=2.0), TokenHistory([0], [])
    )
    assert processed(torch.tensor([-1.0, 0.0]), row)[0] == 1.0


def test_operations_leave_the_logits_of_the_model_alone() -> None:
    logits = logits_of(1)
    row = SamplingRow(SamplingParams(), 0, 0, 1, made(logit_bias={0: 3.0}), TokenHistory([0], []))
    assert not torch.equal(processed(logits, row), logits)
    assert torch.equal(logits, logits_of(1))


def test_a_row_without_operations_has_none() -> None:
    assert made() == made(min_tokens=0, temperature=0.7, stop_token_ids=(5,)) == ()
    assert operations_of(SamplingParams(min_tokens=2), [VOCAB + 4], NO_TOKENIZER, VOCAB) == ()


def test_a_row_for_which_no_token_is_left_is_an_error_and_no_other() -> None:
    stuck = made(allowed_token_ids=(3,), min_tokens=2)
    rows = [
        SamplingRow(SamplingParams(temperature=t), i, 0, 5, stuck, TokenHistory([0], [1] * i))
        for i, t in ((0, 0.0), (1, 1.0), (2, 0.0))
    ]
    first, second, third = sample(torch.zeros(3, VOCAB), rows)
    for error in (first, second):
        assert isinstance(error, RowError)
        assert error.error_class is ErrorClass.INVALID_PARAM
        assert "no token may be drawn at position 5" in error.message
    assert third == 3


def broken(ids: list[int], logits: torch.Tensor) -> Any:
    raise KeyError("nothing there")


@pytest.mark.parametrize(
    ("process", "said"),
    [
        (broken, "(broken) raised KeyError: 'nothing there'"),
        (lambda ids, logits: logits[1:], "returned (11,); return a tensor of shape (12,)"),
        (lambda ids, logits: None, "returned NoneType; return a tensor"),
        (lambda ids, logits: logits * torch.nan, "returned NaN or infinity"),
        (lambda ids, logits: logits + torch.inf, "returned NaN or infinity"),
    ],
    ids=["raises", "shape", "none", "nan", "infinity"],
)
def test_a_function_of_the_callers_that_fails_ends_its_row(process: Any, said: str) -> None:
    operations = made(logits_processors=(process,))
    (error,) = sample(
        torch.zeros(1, VOCAB), [SamplingRow(SamplingParams(), 0, 0, 1, operations, TokenHistory([0], []))]
    )
    assert isinstance(error, RowError)
    assert error.error_class is ErrorClass.INVALID_PARAM
    assert said in error.message
    assert error.message.startswith("logits_processors[0]")


def vllm_spellings(word: str, tokenizer: Tokenizer) -> list[tuple[int, ...]]:
    """What vLLM bars for a word, written out."""
    plain, spaced = map(tuple, tokenizer.encode_batch([word.lstrip(), " " + word.lstrip()]))
    return [plain, spaced] if len(plain) == len(spaced) and plain[0] != spaced[0] else [plain]


@pytest.mark.parametrize("make", [byte_level, byte_fallback], ids=["byte_level", "byte_fallback"])
@pytest.mark.parametrize("word", ["hello", " world", "hello world", "é", "…"])
def test_bad_words_are_barred_wherever_they_stand(make: Callable[[], Tokenizer], word: str) -> None:
    tokenizer = make()
    barred = spellings([word], tokenizer)
    assert all(any(s[-len(b) :] == b for b in barred) for s in vllm_spellings(word, tokenizer))
    for text in (word.lstrip(), "a " + word.lstrip(), "a\n" + word.lstrip()):
        ids = tokenizer.encode_batch([text])[0]
        hit = [
            end
            for end in range(len(ids))
            if ours(BadWords(barred), torch.zeros(tokenizer.vocab_size), ids[:1], ids[1:end])[ids[end]]
            == -torch.inf
            and end
        ]
        assert hit or len(ids) == 1, text
        if len(ids) == 1:
            assert tuple(ids) in barred


SAMPLES = 4_000
CASES: list[dict[str, Any]] = [
    {"temperature": 0.7},
    {"temperature": 1.3, "top_k": 5},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.0, "min_p": 0.15},
    {"temperature": 0.9, "top_k": 7, "top_p": 0.9, "min_p": 0.05},
    {"temperature": 1.0, "repetition_penalty": 1.5},
    {"temperature": 1.0, "presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"temperature": 1.0, "logit_bias": {0: 2.0, 5: -100.0}},
    {"temperature": 1.0, "allowed_token_ids": (1, 2, 3, 4)},
    {"temperature": 1.0, "min_tokens": 9},
]
FAMILY_ALPHA = 1e-3


@pytest.mark.parametrize("case", CASES, ids=str)
def test_draws_follow_the_exact_distribution(case: dict[str, Any]) -> None:
    """4,000 draws over 12 tokens a case with fixed seeds; chi-square, Bonferroni over all cases at 0.001."""
    logits = 0.4 * logits_of(5)
    prompt, output = [1, 2, 2], [4, 4, 6]
    params = SamplingParams(**case)
    operations = operations_of(params, STOPS, NO_TOKENIZER, VOCAB)
    rows = [SamplingRow(params, i, 0, 6, operations, TokenHistory(prompt, output)) for i in range(SAMPLES)]
    drawn = sample(logits.repeat(SAMPLES, 1), rows)
    counts = np.bincount([token for token in drawn if isinstance(token, int)], minlength=VOCAB)
    exact = distribution(logits, prompt, output, params)
    possible = exact > 0
    assert counts.sum() == SAMPLES
    assert counts[~possible].sum() == 0
    expected = SAMPLES * exact[possible]
    statistic = float(((counts[possible] - expected) ** 2 / expected).sum())
    # The chi-square distribution's survival function is a regularised incomplete gamma function.
    half_freedom = torch.tensor((possible.sum() - 1) / 2, dtype=torch.float64)
    p_value = torch.special.gammaincc(half_freedom, torch.tensor(statistic / 2, dtype=torch.float64))
    assert p_value > FAMILY_ALPHA / len(CASES)


def distribution(
    logits: torch.Tensor, prompt: list[int], output: list[int], params: SamplingParams
) -> np.ndarray:
    """What transformers' processors in our order make of the logits, float64."""
    ids = prompt + output
    x = logits.double()
    if params.allowed_token_ids:
        x = theirs(
            transformers.PrefixConstrainedLogitsProcessor(lambda *_: list(params.allowed_token_ids), 1),
            x,
            ids,
        )
    if params.min_tokens:
        x = theirs(
            transformers.MinNewTokensLengthLogitsProcessor(
                len(prompt), params.min_tokens, sorted(STOPS), device="cpu"
            ),
            x,
            ids,
        )
    for token, bias in params.logit_bias.items():
        x[token] += bias
    x = theirs(transformers.RepetitionPenaltyLogitsProcessor(params.repetition_penalty), x, ids)
    for token in range(VOCAB):
        x[token] -= params.frequency_penalty * output.count(token)
        x[token] -= params.presence_penalty * (token in output)
    x = x / params.temperature
    if params.min_p:
        x = theirs(transformers.MinPLogitsWarper(params.min_p), x, ids)
    if params.top_k:
        x = theirs(transformers.TopKLogitsWarper(params.top_k), x, ids)
    if params.top_p < 1:
        x = theirs(transformers.TopPLogitsWarper(params.top_p), x, ids)
    return torch.softmax(x, -1).numpy()
