"""What goes wrong in Python: `map`, `LLM`, `Job`; and models and prompts that no command gets as far as."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
from scripted_worker import Script
from stage import Stage
from tiny_models import save_tiny_llama

import batchgen as bg
from batchgen.dist.intake import Closed, Intake
from batchgen.dist.serve import WorkerLoop
from batchgen.types import BatchgenError, EngineError, InputError, UsageError


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
    wrong(data, model=Path("model"))


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
    stage.python(UsageError, lambda: bg.Job({"model": object(), "input": "prompts.jsonl", "output": "out"}))


def engines_in_this_process(stage: Stage) -> None:
    """A tiny model, asked for what it or this machine cannot do."""
    save_tiny_llama(Path("tiny"))

    def wrong(model: str = "tiny", **arguments: Any) -> None:
        stage.python(UsageError, lambda: bg.LLM(model, **{"attention": "reference", **arguments}))

    wrong(generation_defaults="some")
    wrong(max_len=3)
    wrong(max_model_len=1_000_000)
    wrong(kv_cache_memory=1 << 60)
    wrong(max_num_batched_tokens=1 << 40)
    wrong(kv_cache_memory=5000)
    wrong(attention="flash_attn")
    wrong(dtype="bfloat16", kv_cache_dtype="float16")
    wrong(tokenizer="gone")
    llm = bg.LLM(
        "tiny", attention="reference", max_model_len=64, kv_cache_memory=1 << 20, chat_template="{% x"
    )
    (output,) = llm.generate(["x" * 100])
    assert output.error is not None
    for prompts, arguments in (("abc", {}), ([1, 2], {}), (["a"], {"sampling": {"top_p": 1}})):
        stage.python(UsageError, lambda p=prompts, a=arguments: llm.stream(p, **a))
    dialogue = [{"role": "user", "content": "a"}]
    stage.python(UsageError, lambda: llm.chat([dialogue]))
    for sampling in (
        bg.SamplingParams(allowed_token_ids=(64,), bad_words=("a",)),
        bg.SamplingParams(logits_processors=(lambda ids, logits: logits[1:],)),
    ):
        (output,) = llm.generate(["x"], sampling)
        assert output.error is not None


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
    spoilt(hidden_act="unheard")
    spoilt(is_decoder=False, is_encoder_decoder=True, model_type="t5")


ALL = [
    calls_of_map,
    streams,
    jobs_as_values,
    engines_in_this_process,
    readers_that_break,
    models_that_do_not_load,
]
