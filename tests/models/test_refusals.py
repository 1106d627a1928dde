"""Who is refused before weights are fetched, with which reason, and what is said to do instead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from families import FAMILIES, Family
from tiny_models import save_tokenizer
from transformers import CONFIG_MAPPING, LlamaConfig, LlamaForCausalLM

from batchgen.engine.build import build_engine
from batchgen.engine.config import EngineConfig
from batchgen.models import fitness
from batchgen.models.fitness import check_fitness
from batchgen.models.refusals import refuse_config
from batchgen.types import Task, UsageError

STATE = "keeps a recurrent state, which blocks of keys and values do not hold"
OWN = "does not dispatch through transformers' attention interface"
ALIBI = "adds ALiBi distances to its scores"
SPARSE = "keys that an indexer chooses (sparse attention)"
CROSS = "is an encoder-decoder (cross attention)"

REFUSED: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("bloom", ALIBI, {}),
    ("mpt", ALIBI, {}),
    ("falcon", ALIBI, {"alibi": True}),
    ("falcon", OWN, {"alibi": False}),
    ("gpt_neo", OWN, {}),
    ("mamba", STATE, {}),
    ("mamba2", STATE, {}),
    ("falcon_mamba", STATE, {}),
    ("rwkv", STATE, {}),
    ("jamba", STATE, {}),
    ("bamba", STATE, {}),
    ("falcon_h1", STATE, {}),
    ("qwen3_next", STATE, {}),
    ("zamba", STATE, {}),
    ("zamba2", STATE, {}),
    ("recurrent_gemma", STATE, {}),
    ("xlstm", STATE, {}),
    ("nemotron_h", STATE, {}),
    ("granitemoehybrid", STATE, {}),
    ("kimi_linear", STATE, {}),
    ("lfm2", "has layers of type conv", {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}),
    ("minimax", "has layers of type linear_attention", {}),
    ("llama4", "has layers of type chunked_attention", {}),
    ("deepseek_v32", SPARSE, {}),
    ("glm_moe_dsa", SPARSE, {}),
    ("t5", CROSS, {}),
    ("bart", CROSS, {}),
    ("whisper", CROSS, {}),
    ("mllama", "has layers with cross attention", {}),
    ("musicgen", CROSS, {}),
    ("distilbert", "transformers has no causal language model of type distilbert", {}),
    ("vit", "transformers has no causal language model of type vit", {}),
)


@pytest.mark.parametrize(
    ("kind", "reason", "settings"), REFUSED, ids=[f"{kind}-{i}" for i, (kind, _, _) in enumerate(REFUSED)]
)
def test_refused_by_configuration(kind: str, reason: str, settings: dict[str, Any]) -> None:
    with pytest.raises(UsageError) as caught:
        refuse_config(CONFIG_MAPPING[kind](**settings))
    sentence = str(caught.value)
    assert sentence.startswith("model.path: this model cannot run on batchgen's paged cache: ")
    assert reason in sentence
    assert "; use a decoder-only model whose layers all attend over a KV cache" in sentence


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_families_pass(family: Family) -> None:
    refuse_config(CONFIG_MAPPING[family.build().config.model_type](**family.settings))


def test_refused_for_a_generate_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LlamaForCausalLM, "generate", lambda self: None)
    with pytest.raises(UsageError, match="LlamaForCausalLM does not generate a token at a time"):
        refuse_config(LlamaConfig())


def test_no_weights_are_asked_for(tmp_path: Path) -> None:
    """The folder has none: a configuration that is refused is refused before that is noticed."""
    save_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(UsageError, match="MambaForCausalLM keeps a recurrent state"):
        build_engine(EngineConfig(model=str(tmp_path)))


@pytest.mark.parametrize(
    ("task", "architectures", "said"),
    [
        (Task.CLASSIFY, ["LlamaForCausalLM"], "task: classify needs a head for classes"),
        (Task.GENERATE, ["LlamaForSequenceClassification"], "task: generate needs a head for the next token"),
        (Task.PERPLEXITY, ["LlamaForSequenceClassification"], "task: perplexity needs a head for the next"),
        (Task.CLASSIFY, ["LlamaForCausalLM", "LlamaForSequenceClassification"], None),
        (Task.CLASSIFY, None, None),
        (Task.EMBED, ["LlamaForSequenceClassification"], None),
        (Task.LOGLIKELIHOOD, ["LlamaModel"], None),
    ],
)
def test_refused_for_a_head_that_the_weights_lack(
    task: Task, architectures: list[str] | None, said: str | None
) -> None:
    config = LlamaConfig(architectures=architectures)
    if said is None:
        refuse_config(config, task)
    else:
        with pytest.raises(UsageError, match=said):
            refuse_config(config, task)


def test_a_process_without_torch_gets_the_same_sentences(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And asks once: what may run is remembered, what may not is asked again."""
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "mamba"}))
    with pytest.raises(UsageError) as caught:
        check_fitness(tmp_path, Task.GENERATE)
    monkeypatch.setenv("BATCHGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fitness, "_torch_is_here", lambda: False)
    with pytest.raises(UsageError) as told:
        check_fitness(tmp_path, Task.GENERATE)
    assert str(told.value) == str(caught.value)

    asked: list[Task] = []
    monkeypatch.setattr(fitness, "_ask", lambda folder, task: asked.append(task) or answers.pop(0))
    answers = [str(caught.value), None, "", ""]
    with pytest.raises(UsageError):
        check_fitness(tmp_path, Task.GENERATE)
    for task in (Task.GENERATE, Task.GENERATE, Task.GENERATE, Task.EMBED, Task.EMBED):
        check_fitness(tmp_path, task)
    assert asked == [Task.GENERATE] * 3 + [Task.EMBED]
    answers.append("")
    config.write_text(json.dumps({"model_type": "llama"}))
    check_fitness(tmp_path, Task.GENERATE)
    assert not answers
