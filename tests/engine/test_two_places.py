"""An engine from its start to its results while tensors of host and device must not meet."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import make_engine, run
from stand_in_gpu import stand_in_gpu
from tiny_models import save_tiny_classifier, save_tiny_llama
from two_places import MixedPlacesError, TwoPlaces

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))

from families import FAMILIES

import batchgen as bg
from batchgen.engine import reading
from batchgen.types import SamplingParams, UsageError

SETTINGS: dict[str, Any] = {
    "attention": "reference",
    "dtype": "float32",
    "max_model_len": 64,
    "max_num_batched_tokens": 16,
    "max_num_seqs": 2,
}
PROMPTS = [[3, 1, 4, 1, 5] * 4, [250]]
NAMED = {"gemma3n", "gpt_oss", "phimoe", "deepseek_v2"}


def test_places_are_told_apart() -> None:
    there = torch.device("cpu")
    with TwoPlaces() as places:
        host, device = torch.ones(3), torch.ones(3, device=there)
        moved = host.to(there)
        assert [places.holds(x) for x in (moved, host, device[1:] * 2, (device + moved).cpu())] == [
            True,
            False,
            True,
            False,
        ]
        for wrong in (
            lambda: host + device,
            lambda: torch.cat([device, host]),
            lambda: device[torch.arange(2)],
            lambda: torch.nn.functional.linear(device, host),
            lambda: device.numpy(),
        ):
            with pytest.raises(MixedPlacesError):
                wrong()
        host.copy_(device)
        assert device.tolist() == host.tolist()


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.name in NAMED], ids=lambda family: family.name)
def test_a_model_of_each_kind(family: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = family.save(tmp_path)
    stand_in_gpu(monkeypatch)
    kinds = [
        SamplingParams(max_tokens=2, temperature=1.0, top_k=5, logprobs=2, prompt_logprobs=1),
        SamplingParams(max_tokens=2, repetition_penalty=1.2),
    ]
    with TwoPlaces() as places:
        engine = make_engine(folder, **SETTINGS)
        assert all(output.ok for output in run(engine, PROMPTS, kinds))
    assert places.operations > 1000
    assert all(places.holds(tensor) for tensor in (*engine.core.runner.kv.buffers, engine.core.runner.hidden))


def test_every_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, classifier = save_tiny_llama(tmp_path / "llama"), save_tiny_classifier(tmp_path / "classifier")
    stand_in_gpu(monkeypatch)
    # Which takes what torch says is the host's as it is.
    monkeypatch.setattr(reading, "_on_host", lambda tensors: [tensor.cpu() for tensor in tensors])
    with TwoPlaces():
        llm = bg.LLM(folder, **SETTINGS)
        assert llm.perplexity(["a text"])[0].output.ok
        assert llm.loglikelihood([("a", " b")])[0].output.ok
        assert llm.embed(["a text"], pooling="mean")[0].output.ok
        assert all(out.ok for out in llm.generate(["a"], SamplingParams(max_tokens=3, n=3, temperature=1.0)))
        assert bg.LLM(classifier, **SETTINGS).classify(["a text"])[0].output.ok
        with pytest.raises(UsageError, match=r"engine\.deterministic"):
            bg.LLM(folder, deterministic=True, **SETTINGS)
