"""A tiny model through the whole engine with the Triton kernels, interpreted: transformers' tokens."""

from __future__ import annotations

from pathlib import Path

from engine_harness import make_engine, run
from tiny_models import oracle, save_tiny_llama

from batchgen.types import SamplingParams

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6] * 3 + [7], [250]]


def test_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    folder = save_tiny_llama(tmp_path, num_hidden_layers=1)
    engine = make_engine(
        folder,
        attention="triton",
        max_model_len=48,
        max_num_batched_tokens=16,
        max_num_seqs=2,
    )
    assert engine.facts["attention"] == "triton"
    outputs = run(engine, PROMPTS, SamplingParams(max_tokens=3))
    engine.core.close()
    assert [output.token_ids for output in outputs] == oracle(folder, PROMPTS, 3)
