"""Scores, embeddings and classes off the paged engine, against transformers' own forward pass.

Whatever the chunk size, the prefix cache, preemptions and the requests beside it: the same bits.
"""

from __future__ import annotations

import functools
import random
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import make_engine, small_pool
from tiny_models import save_tiny_llama, save_tokenizer, spread
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    GPT2Config,
    LlamaConfig,
    Qwen2Config,
)

from batchgen.engine import reading
from batchgen.engine.build import Engine
from batchgen.scores import Pooling, Scoring
from batchgen.types import ErrorClass, Output, Request, SamplingParams, Task

SCHEDULES = 6
ANY = SamplingParams(max_tokens=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_llama(tmp_path_factory.mktemp("llama"))


def pair(row: int, context: list[int], continuation: list[int], top_k: int = 0) -> Request:
    """A request for the scores of a continuation."""
    ids = context + continuation
    scoring = Scoring(len(context) - 1, tuple(continuation), top_k)
    return Request(row, ids[:-1], ANY, task=Task.LOGLIKELIHOOD, scoring=scoring)


def vector(row: int, ids: list[int], pooling: Pooling, *, normalize: bool = False) -> Request:
    return Request(row, ids, ANY, task=Task.EMBED, pooling=pooling, normalize=normalize)


def run_all(
    engine: Engine, requests: Sequence[Request], rng: random.Random | None = None
) -> dict[int, Output]:
    """Outputs by row; with `rng`, requests are preempted at random."""
    done = [output for request in requests if (output := engine.core.add(request)) is not None]
    scheduler = engine.core.scheduler
    while engine.core.num_unfinished:
        done += engine.core.step()
        if rng is not None and scheduler.running and rng.random() < 0.3:
            victim = rng.choice(list(scheduler.running))
            scheduler.hold(victim)
            scheduler.release(victim)
    engine.core.scheduler.check()
    assert len({output.request_id for output in done}) == len(done) == len(requests)
    return {output.request_id: output for output in done}


def some_pairs(rng: random.Random, count: int = 12) -> list[tuple[list[int], list[int]]]:
    shared = [rng.randrange(256) for _ in range(37)]
    return [
        (
            (shared if i % 2 else []) + [rng.randrange(256) for _ in range(rng.choice((1, 7, 30)))],
            [rng.randrange(256) for _ in range(rng.choice((1, 2, 9, 40)))],
        )
        for i in range(count)
    ]


@functools.cache
def their_model(folder: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def their_logprobs(folder: Path, ids: list[int]) -> torch.Tensor:
    """`(T, V)` log-softmax of transformers' logits."""
    with torch.inference_mode():
        return torch.log_softmax(their_model(folder)(torch.tensor([ids])).logits[0], dim=-1)


def test_scores_of_continuations_are_those_of_transformers(folder: Path) -> None:
    pairs = some_pairs(random.Random(1))
    engine = make_engine(folder, max_num_batched_tokens=24, max_num_seqs=3)
    outputs = run_all(engine, [pair(i, *p, top_k=5) for i, p in enumerate(pairs)])
    greedy = 0
    for row, (context, continuation) in enumerate(pairs):
        scores = outputs[row].scores
        assert scores is not None
        logprobs = their_logprobs(folder, context + continuation)[len(context) - 1 : -1]
        for i, token in enumerate(continuation):
            assert abs(scores.logprobs[i] - float(logprobs[i, token])) < 1e-4
            assert scores.ranks[i] == 1 + int((logprobs[i] > logprobs[i, token]).sum())
            top = torch.topk(logprobs[i], 5)
            assert [t.token_id for t in scores.top[i]] == top.indices.tolist()
            assert [t.logprob for t in scores.top[i]] == pytest.approx(top.values.tolist(), abs=1e-4)
        assert scores.is_greedy == bool((logprobs.argmax(-1) == torch.tensor(continuation)).all())
        greedy += scores.is_greedy
    assert engine.core.scheduler.stats.cached_tokens > 0


def test_a_greedy_continuation_is_seen_as_such(folder: Path) -> None:
    engine = make_engine(folder)
    prompt = [5, 6, 7]
    answer = run_all(engine, [Request(0, prompt, SamplingParams(max_tokens=6, ignore_eos=True))])[0].token_ids
    wrong = [*answer[:3], (answer[3] + 1) % 256, *answer[4:]]
    outputs = run_all(engine, [pair(1, prompt, answer), pair(2, prompt, wrong)])
    assert [outputs[i].scores.is_greedy for i in (1, 2)] == [True, False]  # type: ignore[union-attr]


def tasks_of_all_kinds(rng: random.Random) -> list[Request]:
    """Pairs, prompts with scores that also generate, vectors, documents in pieces, plain prompts."""
    requests = [pair(i, *p, top_k=i % 3) for i, p in enumerate(some_pairs(rng))]
    shared = requests[1].prompt_token_ids[:37]
    for row in range(20, 26):
        ids = shared + [rng.randrange(256) for _ in range(row)]
        requests.append(
            Request(
                row,
                ids,
                SamplingParams(max_tokens=5, temperature=0.7, ignore_eos=True),
                scoring=Scoring(0, tuple(ids[1:]), 2) if row % 2 else None,
            )
        )
        requests.append(vector(100 + row, ids, Pooling.MEAN if row % 2 else Pooling.LAST))
    first, *rest = [pair(200, ids[:1], ids[1:]) for ids in (shared, shared[::-1], shared[5:] + shared[:5])]
    first.following = tuple(rest)
    return [*requests, first]


def what_came(output: Output) -> tuple[object, ...]:
    scores = output.scores
    return (
        output.token_ids,
        output.prompt_tokens,
        None if scores is None else (scores.logprobs, scores.ranks, scores.top),
        output.embedding,
    )


def test_bits_do_not_depend_on_the_schedule(folder: Path) -> None:
    """Chunked, cached, preempted, among others: what is read off a step has the same bits."""
    rng = random.Random(7)
    alone = make_engine(folder, max_num_seqs=1, prefix_caching=False)
    assert alone.facts["batch_invariant"]
    truth = run_all(alone, tasks_of_all_kinds(random.Random(2)))
    assert all(output.ok for output in truth.values())
    preempted = cached = 0
    for _ in range(SCHEDULES):
        engine = small_pool(
            folder,
            tokens=rng.choice((160, 256, 2048)),
            max_model_len=112,
            max_num_seqs=rng.choice((2, 5, 16)),
            max_num_batched_tokens=rng.choice((16, 48, 512)),
            prefix_caching=rng.random() < 0.7,
        )
        requests = tasks_of_all_kinds(random.Random(2))
        rng.shuffle(requests)
        outputs = run_all(engine, requests, rng)
        assert {row: what_came(o) for row, o in outputs.items()} == {
            row: what_came(o) for row, o in truth.items()
        }
        preempted += sum(o.preemptions for o in outputs.values() if o.scores is not None)
        cached += sum(o.cached_tokens for o in outputs.values() if o.scores is not None)
    assert preempted > 0
    assert cached > 0


def test_what_was_read_before_a_preemption_is_kept(folder: Path) -> None:
    engine = make_engine(folder, max_num_batched_tokens=16)
    context, continuation = [1] * 3, list(range(60))
    expected = run_all(make_engine(folder), [pair(0, context, continuation)])[0]
    request = pair(0, context, continuation)
    assert engine.core.add(request) is None
    assert engine.core.step() == []
    assert request.num_read == 14
    engine.core.scheduler.hold(0)
    engine.core.scheduler.release(0)
    [output] = [o for _ in range(4) for o in engine.core.step()]
    assert output.preemptions == 1
    assert output.scores == expected.scores


def test_logits_never_take_more_rows_than_sampling_has(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(folder, max_num_seqs=8)
    most = -(-8 // engine.core.runner.row_multiple) * engine.core.runner.row_multiple
    rows = []
    head = engine.core.runner.head

    def counting(hidden: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden))
        return head(hidden)

    monkeypatch.setattr(engine.core.runner, "head", counting)
    run_all(engine, [pair(0, [1], list(range(100))), pair(1, [2], list(range(50)))])
    assert sum(rows) == 150
    assert max(rows) <= most


def test_the_scores_of_a_prompt_write_the_cache_and_do_not_read_it(folder: Path) -> None:
    engine = make_engine(folder)
    ids = list(range(50))
    scored = [Request(i, ids, ANY, scoring=Scoring(0, tuple(ids[1:]))) for i in range(2)]
    outputs = run_all(engine, scored)
    assert [outputs[i].cached_tokens for i in range(2)] == [0, 0]
    assert run_all(engine, [Request(2, ids, ANY)])[2].cached_tokens == 48
    logprobs = their_logprobs(folder, ids)
    own = [float(logprobs[i, token]) for i, token in enumerate(ids[1:])]
    assert list(outputs[1].scores.logprobs) == pytest.approx(own, abs=1e-4)  # type: ignore[union-attr]


def test_a_resumed_row_that_had_ended_still_has_its_scores(folder: Path) -> None:
    def request(row: int, known: list[int]) -> Request:
        ids = [9, 8, 7, 6]
        params = SamplingParams(max_tokens=4, ignore_eos=True)
        return Request(row, ids, params, known, scoring=Scoring(0, (8, 7, 6)))

    engine = make_engine(folder)
    whole = run_all(engine, [request(0, [])])[0]
    resumed = run_all(engine, [request(1, list(whole.token_ids))])[1]
    assert what_came(resumed) == what_came(whole)
    assert resumed.completion_tokens == 4


def test_vectors_are_the_pooled_hidden_states_of_transformers(folder: Path) -> None:
    rng = random.Random(3)
    prompts = [[rng.randrange(256) for _ in range(n)] for n in (1, 16, 33, 90)]
    model = AutoModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    for task in ("generate", "embed"):
        engine = make_engine(folder, task=task, max_num_batched_tokens=32)
        requests = [vector(i, ids, Pooling.LAST) for i, ids in enumerate(prompts)]
        requests += [vector(10 + i, ids, Pooling.MEAN, normalize=True) for i, ids in enumerate(prompts)]
        outputs = run_all(engine, requests)
        for i, ids in enumerate(prompts):
            with torch.inference_mode():
                hidden = model(torch.tensor([ids])).last_hidden_state[0]
            mean = torch.nn.functional.normalize(hidden.mean(0), dim=0)
            assert torch.tensor(outputs[i].embedding) == pytest.approx(hidden[-1], abs=1e-4)
            assert torch.tensor(outputs[10 + i].embedding) == pytest.approx(mean, abs=1e-4)
            assert outputs[i].completion_tokens == 0


CONFIGS = {
    "llama": LlamaConfig(
        vocab_size=259,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=256,
    ),
    "qwen2": Qwen2Config(
        vocab_size=259,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=0,
    ),
    "gpt2": GPT2Config(vocab_size=259, n_embd=32, n_layer=2, n_head=4, pad_token_id=256),
}


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("kind", ["single_label", "multi_label", "regression"])
def test_classes_are_those_of_the_head_of_transformers(name: str, kind: str, tmp_path: Path) -> None:
    config = CONFIGS[name]
    labels = {0: "bad"} if kind == "regression" else {0: "bad", 1: "fair", 2: "good"}
    config.id2label = labels
    config.label2id = {label: i for i, label in labels.items()}
    config.problem_type = "regression" if kind == "regression" else f"{kind}_classification"
    model = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager").eval()
    spread(model)
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    rng = random.Random(4)
    prompts = [[rng.randrange(1, 256) for _ in range(n)] for n in (1, 20, 70)]
    engine = make_engine(tmp_path, task="classify", max_num_batched_tokens=32)
    requests = [
        Request(i, ids, ANY, task=Task.CLASSIFY, pooling=Pooling.LAST) for i, ids in enumerate(prompts)
    ]
    outputs = run_all(engine, requests)
    for i, ids in enumerate(prompts):
        with torch.inference_mode():
            logits = model(torch.tensor([ids])).logits[0]
        expected = {
            "single_label": torch.softmax(logits, -1),
            "multi_label": torch.sigmoid(logits),
            "regression": logits,
        }[kind]
        found = outputs[i].classification
        assert found is not None
        assert [label for label, _ in found.scores] == list(labels.values())
        assert [score for _, score in found.scores] == pytest.approx(expected.tolist(), abs=1e-4)
        assert found.label == labels[int(logits.argmax())]


def test_what_is_not_finite_is_an_error_and_takes_no_other_with_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = some_pairs(random.Random(5), 4)
    expected = run_all(make_engine(folder), [pair(i, *p) for i, p in enumerate(pairs)])
    engine = make_engine(folder)
    real = reading.read_step

    def poisoned(*args: object) -> list[reading.Reading]:
        readings = real(*args)  # type: ignore[arg-type]
        return [
            reading.Reading(r.request, r.count, r.scores, r.hidden, 7 if r.request.request_id == 2 else None)
            for r in readings
        ]

    monkeypatch.setattr("batchgen.engine.core.read_step", poisoned)
    outputs = run_all(engine, [pair(i, *p) for i, p in enumerate(pairs)])
    assert outputs[2].error is not None
    assert outputs[2].error.error_class is ErrorClass.NONFINITE
    assert "logits at position 7" in outputs[2].error.message
    assert all(outputs[i].scores == expected[i].scores for i in (0, 1, 3))


def test_a_prompt_that_fills_the_context_is_read_and_a_longer_one_is_refused(folder: Path) -> None:
    engine = make_engine(folder, max_model_len=64)
    outputs = run_all(
        engine, [vector(0, [3] * 64, Pooling.LAST), vector(1, [3] * 65, Pooling.LAST), pair(2, [3], [4] * 64)]
    )
    assert [outputs[i].ok for i in range(3)] == [True, False, True]
    assert outputs[1].error is not None
    assert outputs[1].error.message == (
        "the row has 65 tokens and max_model_len is 64; shorten the prompt or raise max_model_len"
    )


def test_ties_are_ranked_by_id() -> None:
    scores = reading.score_rows(torch.tensor([[1.0, 2.0, 2.0, 0.0]] * 3), [2, 1, 3], top_k=2)
    assert scores.ranks == array("q", [2, 1, 4])
    assert [[t.token_id for t in top] for top in scores.top] == [[1, 2]] * 3
    assert not scores.is_greedy
