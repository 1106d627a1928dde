"""Tiny models through the whole engine with the Triton kernels, interpreted: transformers' tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from engine_harness import make_engine, run
from families import FAMILIES
from parity import Oracle
from stand_in_gpu import StandInCapture, stand_in_gpu
from tiny_models import oracle, save_tiny_llama
from triton_cases import quiet

from batchgen.types import SamplingParams

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6] * 3 + [7], [250]]
SETTINGS: dict[str, Any] = {
    "attention": "triton",
    "dtype": "float32",
    "max_model_len": 48,
    "max_num_batched_tokens": 16,
    "max_num_seqs": 2,
}


def test_tokens_are_those_of_transformers(tmp_path: Path) -> None:
    folder = save_tiny_llama(tmp_path, num_hidden_layers=1)
    engine = make_engine(folder, **SETTINGS)
    assert engine.facts["attention"] == "triton"
    outputs = run(engine, PROMPTS, SamplingParams(max_tokens=3))
    engine.core.close()
    assert [output.token_ids for output in outputs] == oracle(folder, PROMPTS, 3)


def test_on_a_gpu_layers_are_a_program_whose_steps_are_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    family, capture = next(f for f in FAMILIES if f.name == "gemma3"), StandInCapture()
    stand_in_gpu(monkeypatch, capture)
    with quiet():
        engine = make_engine(family.save(tmp_path), **SETTINGS)
        outputs = run(engine, PROMPTS, SamplingParams(max_tokens=4, ignore_eos=True))
    assert "layers: one program of our own kernels and the library's products" in engine.notes
    assert "CUDA graphs: 2 steps of up to 2 rows captured" in engine.notes
    engine.core.close()
    assert capture.launched >= 3
    truth = Oracle(family.build())
    assert [output.token_ids for output in outputs] == [truth.generate(prompt, 4) for prompt in PROMPTS]
