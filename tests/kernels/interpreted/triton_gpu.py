"""The engine as it is on a GPU, with the Triton kernels interpreted: transformers' tokens, bits of a row."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import make_engine, record_logits, reschedule, run
from stand_in_gpu import StandInCapture, stand_in_gpu
from tiny_models import oracle, save_tiny_llama

sys.path.insert(0, str(Path(__file__).parents[2] / "models"))

from families import FAMILIES

from batchgen.types import SamplingParams
from batchgen_kernels.triton_kernels import TritonBackend

PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6] * 3 + [7], [250]]


def test_tokens_are_those_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model with windows, sinks and experts."""
    (family,) = [family for family in FAMILIES if family.name == "gpt_oss"]
    folder = family.save(tmp_path)
    stand_in_gpu(monkeypatch)
    engine = make_engine(
        folder,
        attention="triton",
        dtype="float32",
        max_model_len=48,
        max_num_batched_tokens=16,
        max_num_seqs=2,
    )
    assert (engine.facts["device"], engine.facts["attention"]) == ("cuda", "triton")
    outputs = run(engine, PROMPTS, SamplingParams(max_tokens=2))
    assert [output.token_ids for output in outputs] == oracle(folder, PROMPTS, 2)


SETTINGS: dict[str, Any] = {
    "attention": "triton",
    "dtype": "float32",
    "deterministic": True,
    "max_model_len": 48,
    "max_num_batched_tokens": 24,
    "max_num_seqs": 4,
}


@pytest.mark.parametrize("graphs", [False, True])
def test_prompts_that_begin_alike_are_attended_to_once(
    graphs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    capture, shared = StandInCapture(), 0
    attend = TritonBackend._attend_shared

    def counting(self: TritonBackend, *given: Any) -> Any:
        nonlocal shared
        sums = attend(self, *given)
        shared += sums is not None
        return sums

    stand_in_gpu(monkeypatch, capture)
    folder = save_tiny_llama(tmp_path, num_hidden_layers=1)
    settings = {"attention": "triton", "dtype": "float32", "max_model_len": 48, "max_num_batched_tokens": 64}
    engine = make_engine(folder, cuda_graphs=graphs, max_num_seqs=4, **settings)
    monkeypatch.setattr(TritonBackend, "_attend_shared", counting)
    prompts = [[*PROMPTS[0], *range(n)] for n in range(3)]
    outputs = run(engine, prompts, SamplingParams(max_tokens=3))
    engine.core.close()
    assert [output.token_ids for output in outputs] == oracle(folder, prompts, 3)
    assert shared > 0
    assert (capture.launched > 0) is graphs


@pytest.mark.parametrize("graphs", [False, "auto"])
def test_a_row_has_the_same_bits_in_every_batch_where_it_is_asked_for(
    graphs: bool | str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launched kernel by kernel, and in captured steps, which decode then."""
    capture = StandInCapture()
    stand_in_gpu(monkeypatch, capture)
    engine = make_engine(save_tiny_llama(tmp_path, num_hidden_layers=1), cuda_graphs=graphs, **SETTINGS)
    assert engine.facts["batch_invariant"]
    assert bool(capture.captured) == (graphs == "auto")
    prompts = [[(7 * i + j) % 250 for i in range(40)] for j in range(2)]
    greedy, before = SamplingParams(max_tokens=3, ignore_eos=True), capture.launched
    alone = reschedule(engine, 48, max_num_seqs=1, max_num_batched_tokens=48, prefix_caching=False)
    truth = record_logits(alone)
    run(alone, prompts[:1], greedy)
    together = reschedule(engine, 96, max_num_seqs=2, max_num_batched_tokens=24)
    seen = record_logits(together)
    run(together, prompts, greedy)
    assert all(torch.equal(seen[key], logits) for key, logits in truth.items())
    assert (capture.launched > before) == (graphs == "auto")
