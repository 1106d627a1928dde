"""What is counted, against sums by hand: rows, operations, agreement."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import torch
from tiny_models import save_tiny_llama
from transformers import GPT2Config, LlamaConfig, MixtralConfig

from batchgen.bench.accuracy import agreement, common_length, perplexity
from batchgen.bench.shapes import Product, Work, common_prefix, generating, model_shapes, needed
from batchgen.bench.workloads import LONG, NAMES, load_workload, warmup_rows, windows
from batchgen_kernels.spec import AttentionSpec

SPEC = AttentionSpec(num_heads=4, num_kv_heads=2, head_size=16, v_head_size=16, scale=0.25)


def llama(**settings: object) -> LlamaConfig:
    return LlamaConfig(
        vocab_size=259,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        **settings,
    )


@pytest.mark.parametrize(
    ("name", "prompt", "output", "references", "digest"),
    [
        ("shared-prefix", 51_586, 9_153, 128, "3733065c124df0d7"),
        ("unique", 36_762, 8_192, 32, "c2f12412128ba9d6"),
    ],
)
def test_the_standard_rows(name: str, prompt: int, output: int, references: int, digest: str) -> None:
    rows = load_workload(name).rows
    assert len(rows) == 128
    assert sum(len(row.prompt_ids) for row in rows) == prompt
    assert sum(row.max_new_tokens for row in rows) == output
    given = [row.reference for row in rows if row.reference is not None]
    assert len(given) == references
    assert all(row.reference is None or len(row.reference) == row.max_new_tokens for row in rows)
    text = json.dumps([[row.prompt_ids, row.max_new_tokens, row.reference] for row in rows])
    assert hashlib.sha256(text.encode()).hexdigest()[:16] == digest


def test_the_other_rows() -> None:
    assert [len(row.prompt_ids) for row in load_workload("prompts-500").rows] == [500] * 16
    [long] = load_workload("prompts-8000").rows
    assert [i for row in load_workload("prompts-500").rows for i in row.prompt_ids] == long.prompt_ids
    assert [row.max_new_tokens for row in load_workload("outputs-2048").rows] == [2048] * 8
    [single] = load_workload("single").rows
    assert (len(single.prompt_ids), single.max_new_tokens) == (64, 64)
    assert [len(ids) for ids in windows()] == [512] * 8
    assert len(load_workload("unique", 5).rows) == 5
    assert set(LONG) < set(NAMES)
    firsts = {tuple(row.prompt_ids[:20]) for row in warmup_rows()}
    assert not firsts & {tuple(row.prompt_ids[:20]) for row in load_workload("shared-prefix").rows}


@pytest.mark.parametrize(
    ("name", "count", "prompt", "output"), [("prefill", 32, 8000, 4), ("decode", 128, 1024, 256)]
)
def test_the_heavy_rows(name: str, count: int, prompt: int, output: int) -> None:
    rows = load_workload(name).rows
    assert [(len(row.prompt_ids), row.max_new_tokens) for row in rows] == [(prompt, output)] * count
    # No block of a prompt is that of another, nor of the other workload.
    both = [*rows, *load_workload({"prefill": "decode", "decode": "prefill"}[name]).rows]
    assert len({tuple(row.prompt_ids[:16]) for row in both}) == 160


def test_shapes_of_a_model() -> None:
    shapes = model_shapes(llama(), [SPEC] * 3)
    assert shapes is not None
    assert set(shapes.products) == {
        Product("qkv", 64, 64 + 2 * 32, 3),
        Product("output", 64, 64, 3),
        Product("gate_up", 64, 2 * 128, 3),
        Product("down", 128, 64, 3),
    }
    assert shapes.head == Product("lm_head", 64, 259, 1)
    assert shapes.body_flop == 3 * 2 * (64 * 128 + 64 * 64 + 64 * 256 + 128 * 64)


def test_shapes_are_those_of_the_weights(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    folder = save_tiny_llama(tmp_path / "m")
    model = AutoModelForCausalLM.from_pretrained(folder)
    layers = [m for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"]
    shapes = model_shapes(AutoConfig.from_pretrained(folder), [])
    assert shapes is not None
    assert shapes.body_flop == 2 * sum(layer.weight.numel() for layer in layers)
    assert shapes.head.flop == 2 * model.lm_head.weight.numel()


def test_a_model_of_transposed_products() -> None:
    shapes = model_shapes(GPT2Config(vocab_size=100, n_embd=32, n_layer=2, n_head=2), [])
    assert shapes is not None
    assert Product("c_attn", 32, 96, 2) in shapes.products
    # `c_proj` of attention and of the unit behind it are of different shapes.
    assert {p for p in shapes.products if p.kind == "c_proj"} == {
        Product("c_proj", 32, 32, 2),
        Product("c_proj", 128, 32, 2),
    }


def test_experts_are_not_counted() -> None:
    config = MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    assert model_shapes(config, []) is None


def by_hand(rows: list[Work], prefix: int) -> tuple[int, int, int]:
    """Tokens, operations of products and of attention, a token at a time."""
    tokens = products = attention = 0
    for number, row in enumerate(rows):
        for position in range(prefix if number else 0, len(row.prompt) + row.fed):
            tokens += 1
            products += 3 * 2 * (64 * 128 + 64 * 64 + 64 * 256 + 128 * 64)
            attention += 3 * 2 * 2 * 4 * 16 * (position + 1)
        products += row.read * 2 * 64 * 259
    return tokens, products, attention


def test_what_rows_need() -> None:
    shapes = model_shapes(llama(), [SPEC] * 3)
    assert shapes is not None
    rows = [generating([1, 2, 3, 4], 3), generating([1, 2, 5, 6, 7], 1), generating([1, 2, 9], 6)]
    for shared, prefix in ((True, 2), (False, 0)):
        need = needed(shapes, rows, shared=shared)
        assert (need.tokens, need.products, need.attention) == by_hand(rows, prefix)
        assert need.read == 10
        assert need.total == need.products + need.attention
    scored = [Work([1, 2, 3, 4], 0, 2)]
    assert needed(shapes, scored, shared=True).tokens == 4


def test_a_window_bounds_what_is_seen() -> None:
    windowed = AttentionSpec(
        num_heads=1, num_kv_heads=1, head_size=1, v_head_size=1, scale=1.0, sliding_window=4
    )
    shapes = model_shapes(llama(), [windowed])
    assert shapes is not None
    for start, stop in ((0, 3), (0, 10), (2, 9), (6, 8), (4, 4)):
        seen = sum(min(position + 1, 4) for position in range(start, stop))
        assert shapes.attention_flop(start, stop) == 4 * seen


def test_one_token_is_left_of_equal_prompts() -> None:
    assert common_prefix([[1, 2, 3], [1, 2, 3]]) == 2
    assert common_prefix([[1, 2, 3], [4]]) == 0


def test_agreement() -> None:
    assert agreement([[1, 2]], [None]) is None
    found = agreement([[1, 2, 3], [1, 9, 3], [4]], [[1, 2, 3], [1, 2, 3], None])
    assert found is not None
    assert (found.rows, found.exact) == (2, 1)
    assert found.share == pytest.approx((1 + 1 / 3) / 2)
    # Behind the reference's end of sequence nothing is compared, but an end at once is.
    ended = agreement([[5, 7, 7, 7], [3, 1]], [[5, 7, 2, 9], [2, 1]], eos=2)
    assert ended is not None
    assert (ended.exact, ended.share) == (1, 0.5)
    assert common_length([1, 2, 3], [1, 2]) == 2


def test_perplexity() -> None:
    assert perplexity(0.0, 3) == 1.0
    assert perplexity(6.0, 3) == pytest.approx(7.389056, rel=1e-6)
