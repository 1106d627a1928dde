"""`LLM` beyond generating: pairs, whole texts, vectors and classes, against transformers and by formula."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_models import save_tiny_classifier, save_tiny_llama
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
)

import batchgen as bg
from batchgen.types import ErrorClass, UsageError

WINDOW = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[bg.LLM]:
    with bg.LLM(str(folder), max_model_len=WINDOW, max_num_seqs=4, kv_cache_memory=2**24) as made:
        yield made


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


EOS = 258


def ids_of(text: str) -> list[int]:
    """By the tokenizer of the tiny models: an id for each byte, in the order of their characters."""
    from tokenizers import pre_tokenizers

    order = {c: i for i, c in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    [(spelled, _)] = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return [order[c] for c in spelled]


@torch.inference_mode()
def logprobs_after(model: Any, context: list[int], tokens: list[int]) -> list[tuple[float, bool]]:
    """Of each token, and whether it is the likeliest, by transformers."""
    logits = model(torch.tensor([context + tokens])).logits[0].float()
    rows = torch.log_softmax(logits[len(context) - 1 : -1], dim=-1)
    return [(float(row[t]), int(row.argmax()) == t) for row, t in zip(rows, tokens, strict=True)]


def test_loglikelihoods_are_those_of_transformers(llm: bg.LLM, theirs: Any) -> None:
    pairs = [("The sky is", " blue"), ("The sky is ", "blue"), ("", "Once"), ("A\n\n", "B"), ("x", "y" * 40)]
    found = llm.loglikelihood(pairs)
    expected = [
        (ids_of("The sky is"), ids_of(" blue")),
        (ids_of("The sky is"), ids_of(" blue")),
        ([EOS], ids_of("Once")),
        (ids_of("A"), ids_of("\n\nB")),
        (ids_of("x"), ids_of("y" * 40)),
    ]
    for result, (context, tokens) in zip(found, expected, strict=True):
        truth = logprobs_after(theirs, context, tokens)
        assert result.num_tokens == len(tokens)
        assert result.token_logprobs == pytest.approx([p for p, _ in truth], abs=1e-4)
        loglikelihood, is_greedy = result
        assert loglikelihood == pytest.approx(sum(p for p, _ in truth), abs=1e-4 * len(tokens))
        assert is_greedy == all(greedy for _, greedy in truth)
    assert found[0].loglikelihood == found[1].loglikelihood
    as_ids = llm.loglikelihood([(ids_of("x"), ids_of("y" * 40))])
    assert as_ids[0].token_logprobs == found[4].token_logprobs


def test_is_greedy_wants_all_tokens(llm: bg.LLM) -> None:
    [out] = llm.generate([[1, 2, 3]], bg.SamplingParams(max_tokens=5, ignore_eos=True))
    wrong = [*out.token_ids[:2], (out.token_ids[2] + 1) % 256, *out.token_ids[3:]]
    results = llm.loglikelihood([([1, 2, 3], out.token_ids), ([1, 2, 3], wrong)])
    assert [result.is_greedy for result in results] == [True, False]


def test_a_pair_that_is_too_long_is_an_error_or_loses_the_beginning(llm: bg.LLM, theirs: Any) -> None:
    context, tokens = [random.Random(0).randrange(256) for _ in range(90)], [4, 5, 6]
    pairs = [(context, tokens), ([1], [2] * (WINDOW + 1)), ([1], [2] * WINDOW)]
    error, too_long, fits = llm.loglikelihood(pairs)
    assert error.error is not None
    assert error.error.error_class is ErrorClass.CONTEXT_LENGTH
    assert math.isnan(error.loglikelihood)
    assert not error.is_greedy
    assert not too_long.ok
    assert fits.num_tokens == WINDOW
    cut, too_long, _ = llm.loglikelihood(pairs, overflow="truncate_left")
    truth = logprobs_after(theirs, (context + tokens)[-WINDOW - 1 :][:-3], tokens)
    assert cut.token_logprobs == pytest.approx([p for p, _ in truth], abs=1e-4)
    assert too_long.error is not None
    assert "the continuation alone has 65 tokens" in too_long.error.message


def test_bad_pairs_are_errors_of_their_own(llm: bg.LLM) -> None:
    bad: list[Any] = [("a", ""), ("a",), (None, "b"), ("a", None), ("a", [1]), ("a", "b")]
    results = llm.loglikelihood(bad)
    assert [r.error and r.error.error_class for r in results] == [
        ErrorClass.EMPTY_PROMPT,
        ErrorClass.MISSING_COLUMN,
        ErrorClass.NULL_PROMPT,
        ErrorClass.NULL_PROMPT,
        ErrorClass.INVALID_PARAM,
        None,
    ]
    with pytest.raises(UsageError, match="this is one pair"):
        llm.loglikelihood(("a", "b"))  # type: ignore[arg-type]


def rolling(ids: list[int], prefix: int, length: int) -> list[tuple[list[int], list[int]]]:
    """Windows as lm-evaluation-harness defines them: (context, what is predicted)."""
    windows, done = [], 0
    while done < len(ids):
        stop = min(done + length, len(ids))
        seen = ([prefix, *ids][:stop])[-length:]
        windows.append((seen[: len(seen) - (stop - done) + 1], ids[done:stop]))
        done = stop
    return windows


@pytest.mark.parametrize("length", [1, 63, 64, 65, 128, 200])
def test_perplexity_rolls_over_windows(llm: bg.LLM, theirs: Any, length: int) -> None:
    text = "".join(random.Random(length).choice("ab cä\n") for _ in range(length))
    while len(text.encode()) > length:
        text = text[:-1]
    ids = ids_of(text)
    [result] = llm.perplexity([text])
    truth = sum(
        p for context, tokens in rolling(ids, EOS, WINDOW) for p, _ in logprobs_after(theirs, context, tokens)
    )
    assert result.num_tokens == len(ids)
    assert result.loglikelihood == pytest.approx(truth, abs=1e-4 * len(ids))
    assert result.perplexity == pytest.approx(math.exp(-truth / len(ids)), rel=1e-3)
    assert result.num_bytes == len(text.encode())
    assert result.num_words == len(re.split(r"\s+", text))
    assert result.bits_per_byte == pytest.approx(-truth / math.log(2) / len(text.encode()), rel=1e-3)
    assert llm.perplexity([ids])[0].loglikelihood == result.loglikelihood


def test_prompt_logprobs(llm: bg.LLM, theirs: Any) -> None:
    ids = ids_of("The quick brown fox")
    params = bg.SamplingParams(max_tokens=3, prompt_logprobs=2, ignore_eos=True)
    out, one = llm.generate([ids, [7]], params)
    assert out.prompt_logprobs is not None
    assert out.prompt_logprobs[0] is None
    truth = logprobs_after(theirs, ids[:1], ids[1:])
    assert [t and t.logprob for t in out.prompt_logprobs[1:]] == pytest.approx(
        [p for p, _ in truth], abs=1e-4
    )
    assert all(t is not None and len(t.top) == 2 and t.top[0].rank == 1 for t in out.prompt_logprobs[1:])
    assert one.prompt_logprobs in (None, [None])
    plain = llm.generate([ids], bg.SamplingParams(max_tokens=3, ignore_eos=True))[0]
    assert plain.token_ids == out.token_ids
    assert plain.prompt_logprobs is None


def test_embeddings(llm: bg.LLM, folder: Path) -> None:
    model = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    texts = ["A short text", "Another one, which is a little longer", "x"]
    for pooling in ("last", "mean"):
        found = llm.embed(texts, pooling=pooling, normalize=False)
        unit = llm.embed(texts, pooling=pooling)
        for text, result, normal in zip(texts, found, unit, strict=True):
            with torch.inference_mode():
                states = model(torch.tensor([ids_of(text)])).last_hidden_state[0]
            truth = states[-1] if pooling == "last" else states.mean(0)
            assert result.embedding == pytest.approx(truth.numpy(), abs=1e-4)
            assert normal.embedding is not None
            assert normal.embedding == pytest.approx((truth / truth.norm()).numpy(), abs=1e-4)
            assert np.linalg.norm(normal.embedding) == pytest.approx(1, abs=1e-6)
    empty, _ = llm.embed(["", "a"])
    assert empty.embedding is None
    assert empty.error is not None


def test_pooling_is_what_the_files_beside_the_model_say(folder: Path, tmp_path: Path) -> None:
    from batchgen.models.pooling import find_pooling

    assert find_pooling(tmp_path) == "last"
    (tmp_path / "1_Pooling").mkdir()
    config = tmp_path / "1_Pooling" / "config.json"
    config.write_text(json.dumps({"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}))
    assert find_pooling(tmp_path) == "mean"
    config.write_text(json.dumps({"pooling_mode": "lasttoken"}))
    assert find_pooling(tmp_path) == "last"
    config.write_text(json.dumps({"pooling_mode_cls_token": True}))
    with pytest.raises(UsageError, match=r"pooling_mode_cls_token; set embedding.pooling: last or mean"):
        find_pooling(tmp_path)
    modules = [{"type": "sentence_transformers.models.Dense", "path": "2_Dense"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(UsageError, match="module Dense"):
        find_pooling(tmp_path)
    config.unlink()
    (tmp_path / "modules.json").write_text(json.dumps([{"type": "x.Pooling", "path": "1_Pooling"}]))
    with pytest.raises(UsageError, match="is missing"):
        find_pooling(tmp_path)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_classifier(tmp_path_factory.mktemp("classifier"))


def test_a_classifier_is_known_by_its_architecture(classifier: Path) -> None:
    model = AutoModelForSequenceClassification.from_pretrained(classifier, attn_implementation="eager").eval()
    texts = ["good", "bad and long", "neither"]
    with bg.LLM(str(classifier), max_model_len=64, kv_cache_memory=2**22) as llm:
        results = llm.classify(texts)
        for text, result in zip(texts, results, strict=True):
            with torch.inference_mode():
                truth = torch.softmax(model(torch.tensor([ids_of(text)])).logits[0], -1)
            assert result.scores == pytest.approx({"no": float(truth[0]), "yes": float(truth[1])}, abs=1e-4)
            assert result.label == ("yes" if truth[1] > truth[0] else "no")
            assert result.score == max(result.scores.values())
        assert llm.embed(texts)[0].ok
        for call in (llm.generate, llm.perplexity):
            with pytest.raises(UsageError, match="needs a next-token head"):
                call(["a"])


def test_a_model_without_classes_does_not_classify(llm: bg.LLM, folder: Path) -> None:
    with pytest.raises(UsageError, match="task='classify'"):
        llm.classify(["a"])
    with pytest.raises(UsageError, match="ends in ForSequenceClassification"):
        bg.LLM(str(folder), task="classify", max_model_len=64)
