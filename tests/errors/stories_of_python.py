"""What goes wrong in Python: `map`, `LLM`, `Job`; and models and prompts that no command gets as far as."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import datasets
import torch
from scripted_worker import Script
from stage import Stage
from tiny_models import save_tiny_llama

import batchgen as bg
from batchgen.dist.intake import Closed, Intake
from batchgen.dist.serve import WorkerLoop
from batchgen.engine import first_start
from batchgen.types import BatchgenError, EngineError, InputError, Request, SamplingParams, UsageError


def calls_of_map(stage: Stage) -> None:
    """Arguments that do not fit, and streams that change."""
    data = datasets.Dataset.from_list([{"prompt": "a"}, {"prompt": "b"}])
    call: dict[str, Any] = {"model": "./model", "prompt": "{{ prompt }}", "output_column": "out"}

    def wrong(given: Any, **arguments: Any) -> None:
        stage.python(UsageError, lambda: bg.map(given, **{**call, **arguments}))

    wrong(data, engines={})
    wrong([{"prompt": "a"}])
    wrong(data, output_column="prompt")
    wrong(data, sampling={"stop": {1, 2}})
    wrong(data, sampling={("a", "b"): 1})
    wrong(data, output_column="")
    wrong(data, error_column="out")
    wrong(data, output=3)
    wrong(data, output="")
    wrong(data, output="s3://bucket/out")
    wrong(data, output="job.yaml")
    wrong(datasets.DatasetDict({"..": data}), output="kept")


def streams(stage: Stage) -> None:
    """Rows that no prompt can hold, and rows that are others when they are read again."""
    call: dict[str, Any] = {"model": "./model", "prompt": "{{ prompt }}", "output_column": "out"}
    call |= {"run": {"progress": "none"}, "launch": Script()}

    def wrong(kind: type[BatchgenError], rows: Callable[[], Iterator[dict[str, Any]]]) -> None:
        stream = datasets.IterableDataset.from_generator(rows)
        stage.python(kind, lambda: list(bg.map(stream, **call)))

    wrong(UsageError, lambda: iter([{"prompt": b"a"}]))
    count = itertools.count()
    wrong(InputError, lambda: iter([{"prompt": f"p{next(count)}"}]))


def jobs_as_values(stage: Stage) -> None:
    """Jobs that no job file could hold."""
    stage.python(UsageError, lambda: bg.Job({"model": b"m", "input": "prompts.jsonl", "output": "out"}))
    stage.python(UsageError, lambda: bg.Job("job.yaml"))  # type: ignore[arg-type]
    endless: dict[str, Any] = {}
    endless["model"] = endless
    stage.python(UsageError, lambda: bg.Job(endless))
    for overrides in (["input.limit=3"], {3: 3}):
        stage.python(UsageError, lambda o=overrides: bg.Job.from_yaml("job.yaml", o))


def columns_of_results(stage: Stage) -> None:
    """Columns that no row has."""
    stage.batchgen("run job.yaml", 0)
    results = bg.open("out")
    for columns in (["nope"], "row"):
        stage.python(UsageError, lambda c=columns: results.table(c))


def engines_in_this_process(stage: Stage) -> None:
    """A tiny model, asked for what it or this machine cannot do."""
    save_tiny_llama(Path("tiny"))

    def wrong(model: str = "tiny", **arguments: Any) -> None:
        stage.python(UsageError, lambda: bg.LLM(model, **{"attention": "reference", **arguments}))

    wrong(5)  # type: ignore[arg-type]
    wrong(generation_defaults="some")
    wrong(max_len=3)
    wrong(max_model_len=1_000_000)
    wrong(kv_cache_memory=1 << 60)
    wrong(max_num_batched_tokens=1 << 40)
    wrong(kv_cache_memory=5000)
    wrong(attention="flashinfer")
    wrong(dtype="bfloat16", kv_cache_dtype="float16")
    wrong(dtype="bfloat16", quantization="int8")
    wrong(quantization="int4")
    wrong(quantization="int8")
    wrong(deterministic=True)
    wrong(cuda_graphs="yes")
    wrong(cuda_graphs=True)
    wrong(tokenizer="gone")
    with stage.patched((first_start, "model_is_invariant", lambda *arguments: False)):
        wrong(deterministic=True)
    llm = bg.LLM(
        "tiny", attention="reference", max_model_len=64, kv_cache_memory=1 << 20, chat_template="{% x"
    )
    (output,) = llm.generate(["x" * 100])
    assert output.error is not None
    # Whoever drives the core has other ways to make rows than those that count tokens first.
    refused = llm._core.add(Request(0, [1] * 64, SamplingParams()))
    assert refused is not None
    stage.said += f"{refused.error}\n"
    params = SamplingParams()
    for prompts, arguments in (
        ("abc", {}),
        ([1, 2], {}),
        (["a"], {"sampling": {"top_p": 1}}),
        (["a", "b"], {"sampling": [params, None]}),
        (["a"], {"sampling": [params, params]}),
    ):
        stage.python(UsageError, lambda p=prompts, a=arguments: llm.stream(p, **a))
    dialogue = [{"role": "user", "content": "a"}]
    stage.python(UsageError, lambda: llm.chat([dialogue]))
    for sampling in (
        bg.SamplingParams(allowed_token_ids=(64,), bad_words=("a",)),
        bg.SamplingParams(logits_processors=(lambda ids, logits: logits[1:],)),
    ):
        (output,) = llm.generate(["x"], sampling)
        assert output.error is not None


def tasks_in_this_process(stage: Stage) -> None:
    """Scores, vectors and classes that a model or a row cannot have."""
    save_tiny_llama(Path("tiny"))
    small: dict[str, Any] = {"attention": "reference", "max_model_len": 64, "kv_cache_memory": 1 << 20}
    stage.python(UsageError, lambda: bg.LLM("tiny", task="sing", **small))
    stage.python(UsageError, lambda: bg.LLM("tiny", device="gpu", **small))
    with mock.patch.object(torch.version, "cuda", None), mock.patch.object(torch, "__version__", "2.0"):
        stage.python(UsageError, lambda: bg.LLM("tiny", device="cuda", **small))
    stage.python(UsageError, lambda: bg.LLM("tiny", task="classify", **small))
    vectors = bg.LLM("tiny", task="embed", **small)
    stage.python(UsageError, lambda: vectors.generate(["a"]))
    stage.python(UsageError, lambda: vectors.embed(["a"], pooling="max"))
    llm = bg.LLM("tiny", **small)
    stage.python(UsageError, lambda: llm.classify(["a"]))
    stage.python(UsageError, lambda: llm.loglikelihood(("a", "b")))  # type: ignore[arg-type]
    stage.python(UsageError, lambda: llm.loglikelihood([("a", "b")], overflow="truncate_right"))
    for pair in (("a",), ("a", ""), ("a" * 99, "b"), ("a", "b" * 99)):
        for overflow in ("error", "truncate_left"):
            llm.loglikelihood([pair], overflow=overflow)  # type: ignore[list-item]
    Path("tiny/1_Pooling").mkdir()
    how, modules = Path("tiny/1_Pooling/config.json"), Path("tiny/modules.json")
    for pooling in ('{"pooling_mode_cls_token": true}', "{"):
        how.write_text(pooling)
        stage.python(UsageError, lambda: llm.embed(["a"]))
    how.unlink()
    for kind in ("Pooling", "Dense"):
        modules.write_text(
            json.dumps([{"type": f"sentence_transformers.models.{kind}", "path": "1_Pooling"}])
        )
        stage.python(UsageError, lambda: llm.embed(["a"]))


def headless_tokenizers(stage: Stage) -> None:
    """A tokenizer that has no token to begin a text with."""
    save_tiny_llama(Path("tiny"))
    file = Path("tiny/tokenizer_config.json")
    settings = json.loads(file.read_text())
    file.write_text(json.dumps({k: v for k, v in settings.items() if k != "eos_token"}))
    llm = bg.LLM("tiny", attention="reference", max_model_len=64, kv_cache_memory=1 << 20)
    assert not llm.perplexity(["a"])[0].ok


def classifiers_that_do_more(stage: Stage) -> None:
    """Heads that are not a score of the last token."""
    from torch import nn
    from transformers import LlamaConfig, LlamaForSequenceClassification

    from batchgen.models.loader import load_model
    from batchgen.models.parts import ModelParts
    from batchgen.types import Task

    config = LlamaConfig(
        vocab_size=300, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    LlamaForSequenceClassification(config).save_pretrained("classes")
    model: Any = load_model(Path("classes"), task=Task.CLASSIFY).model
    linear = model.score
    linear.forward = lambda states: nn.functional.linear(states.cumsum(-2), linear.weight)
    stage.python(UsageError, lambda: ModelParts(model, Task.CLASSIFY))
    model.score = None
    stage.python(UsageError, lambda: ModelParts(model, Task.CLASSIFY))


def readers_that_break(stage: Stage) -> None:
    """A library of a worker's reading side that panics instead of raising."""
    loop = WorkerLoop.__new__(WorkerLoop)
    closed = Closed(BaseException("index out of bounds"))
    with stage.patched((Intake, "control", lambda intake: iter([closed]))):
        loop._intake = Intake.__new__(Intake)
        stage.python(EngineError, loop._handle_control)


def models_that_do_not_load(stage: Stage) -> None:
    """Models that are spoilt, of a kind that does not run here, or bring code."""
    save_tiny_llama(Path("tiny"))
    config = json.loads(Path("tiny/config.json").read_text())

    def spoilt(**changes: Any) -> None:
        Path("tiny/config.json").write_text(json.dumps({**config, **changes}))
        stage.python(UsageError, lambda: bg.LLM("tiny", attention="reference"))

    spoilt(model_type="unheard")
    spoilt(model_type="unheard", auto_map={"AutoConfig": "code.Config"})
    spoilt(num_hidden_layers=3)
    spoilt(hidden_size=48, head_dim=12)
    spoilt(max_position_embeddings="many")
    spoilt(max_position_embeddings=0)
    spoilt(hidden_act="unheard")
    spoilt(is_decoder=False, is_encoder_decoder=True, model_type="t5")

    for architecture, task in (
        ("LlamaForCausalLM", "classify"),
        ("LlamaForSequenceClassification", "generate"),
    ):
        Path("tiny/config.json").write_text(json.dumps({**config, "architectures": [architecture]}))
        stage.python(UsageError, lambda task=task: bg.LLM("tiny", task=task))


ALL = [
    calls_of_map,
    streams,
    jobs_as_values,
    columns_of_results,
    engines_in_this_process,
    readers_that_break,
    models_that_do_not_load,
    tasks_in_this_process,
    headless_tokenizers,
    classifiers_that_do_more,
]
