"""Scores and embeddings of the real model on real text: within 1e-4 a token of transformers'.

`BATCHGEN_TASK_PAIRS` sets how many pairs are compared (10 in the usual suite, 500 in `make tasks`).
"""

from __future__ import annotations

import gzip
import json
import os
from collections.abc import Iterator

import pytest
import torch
from real_model import MODEL, PROBLEMS, reference_model, tokenizer

import batchgen as bg

PAIRS = int(os.environ.get("BATCHGEN_TASK_PAIRS", "10"))
CUTS = (0.3, 0.5, 0.7, 1.0)


@pytest.fixture(scope="module")
def llm() -> Iterator[bg.LLM]:
    with bg.LLM(str(MODEL), max_model_len=1024, max_num_seqs=8, max_num_batched_tokens=256) as made:
        yield made


def pairs() -> list[tuple[str, str]]:
    """Programs cut in two: mostly a task and its solution, else a place within the task."""
    with gzip.open(PROBLEMS, "rt", encoding="utf-8") as f:
        problems = [json.loads(line) for line in f]
    found = []
    for i in range(PAIRS):
        problem, cut = problems[i % len(problems)], CUTS[(i // len(problems)) % len(CUTS)]
        text = problem["prompt"]
        where = int(len(text) * (cut if i >= len(problems) else 1))
        found.append((text[:where], (text[where:] or problem["canonical_solution"])[:400]))
    return found


@torch.inference_mode()
def theirs(ids: list[int], start: int) -> tuple[list[float], bool]:
    logits = reference_model()(torch.tensor([ids])).logits[0].float()
    rows, targets = torch.log_softmax(logits[start - 1 : -1], -1), torch.tensor(ids[start:])
    greedy = bool((rows.argmax(-1) == targets).all())
    return rows.gather(1, targets[:, None]).flatten().tolist(), greedy


def test_loglikelihoods_of_real_pairs(llm: bg.LLM) -> None:
    worst, tokens = 0.0, 0
    for (context, continuation), result in zip(pairs(), llm.loglikelihood(pairs()), strict=True):
        short = context.rstrip()
        whole, head = tokenizer().encode_batch([context + continuation, short])
        truth, greedy = theirs([*head, *whole[len(head) :]], len(head))
        assert result.num_tokens == len(truth)
        assert result.is_greedy == greedy
        differences = [abs(a - b) for a, b in zip(result.token_logprobs, truth, strict=True)]
        worst, tokens = max(worst, *differences), tokens + len(truth)
    print(f"{PAIRS} pairs, {tokens} tokens: at most {worst:.2e} apart")
    assert worst < 1e-4


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_embeddings_of_real_texts(llm: bg.LLM, pooling: str) -> None:
    texts = [context for context, _ in pairs()[: max(6, PAIRS // 10)]]
    body = reference_model().get_decoder()
    worst = 0.0
    for text, result in zip(texts, llm.embed(texts, pooling=pooling), strict=True):
        with torch.inference_mode():
            states = body(torch.tensor(tokenizer().encode_batch([text]))).last_hidden_state[0].float()
        truth = torch.nn.functional.normalize(states[-1] if pooling == "last" else states.mean(0), dim=0)
        worst = max(worst, float((torch.tensor(result.embedding) - truth).abs().max()))
    print(f"{len(texts)} texts, {pooling}: at most {worst:.2e} apart")
    assert worst < 1e-4
