"""The engine worker process: `python -m batchgen.dist.worker --fd N`.

The supervisor starts one per device and talks to it over an inherited socket; the loop is in
`batchgen.dist.serve`. Here the engine is built: tokenizer and prompts first, then the weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from batchgen.dist.serve import ReadyEngine, serve
from batchgen.engine.build import Engine, build_engine, load_tokenizer, source_folder
from batchgen.engine.config import EngineConfig
from batchgen.models.pooling import find_pooling
from batchgen.sampling.overrides import RowSampling
from batchgen.sampling.resolve import generation_defaults, unused_defaults
from batchgen.scores import Pooling
from batchgen.text.prompt import PromptRenderer, PromptSpec
from batchgen.text.task_request import TaskRequests
from batchgen.types import Task


def build(config: Mapping[str, Any]) -> ReadyEngine:
    """The engine of a job.

    Args:
        config: the `start` message's configuration.

    Raises:
        BatchgenError: the job cannot run here as asked.
    """
    pinned = dict(config.get("pinned") or {})
    engine_config = _engine_config(config, pinned)
    tokenizer = load_tokenizer(engine_config)
    prompt = PromptSpec.from_dict(config["prompt"])
    renderer = PromptRenderer(prompt, tokenizer, _first_attempt(pinned))
    renderer.probe()
    engine = build_engine(engine_config, tokenizer, progress=False)
    model_defaults = engine.loaded.generation
    wanted = config.get("generation_defaults", "model") == "model"
    defaults = pinned.get("generation_defaults")
    if defaults is None:
        defaults = generation_defaults(model_defaults) if wanted else {}
    requests = _requests(config, engine, pinned)
    return ReadyEngine(
        core=engine.core,
        renderer=renderer,
        requests=requests,
        sampling=RowSampling(config["sampling"], defaults, prompt.per_row),
        max_num_seqs=engine.config.max_num_seqs or 1,
        pinned={
            **engine.pinned,
            "generation_defaults": defaults,
            **({"pooling": requests.pooling.value} if requests.task is Task.EMBED else {}),
            **_pinned_time(renderer),
        },
        facts=engine.facts,
        notes=[*engine.notes, *renderer.notes, *(_ignored(model_defaults) if wanted else [])],
    )


def _requests(config: Mapping[str, Any], engine: Engine, pinned: Mapping[str, Any]) -> TaskRequests:
    """What makes requests of rows; how embeddings are pooled was settled at the first attempt."""
    section = config.get("embedding") or {}
    asked = pinned.get("pooling") or section.get("pooling", "auto")
    task = Task(config["prompt"].get("task", Task.GENERATE))
    if asked == "auto":
        asked = find_pooling(source_folder(engine.config)) if task is Task.EMBED else Pooling.LAST
    return TaskRequests(
        task, engine.tokenizer, engine.core.max_model_len, Pooling(asked), section.get("normalize", True)
    )


def _ignored(model_defaults: Mapping[str, Any]) -> list[str]:
    return [
        f"the model's generation configuration sets {key}, which batchgen does not apply yet; "
        "set model.generation_defaults: none to say that this is meant"
        for key in unused_defaults(model_defaults)
    ]


def _first_attempt(pinned: Mapping[str, Any]) -> datetime | None:
    """What the first attempt took for the time, so that prompts of one job all tell the same date."""
    return datetime.fromisoformat(pinned["template_time"]) if "template_time" in pinned else None


def _pinned_time(renderer: PromptRenderer) -> dict[str, str]:
    return {"template_time": renderer.now.isoformat()} if renderer.tells_time else {}


def _engine_config(config: Mapping[str, Any], pinned: Mapping[str, Any]) -> EngineConfig:
    settings = dict(config["engine"])
    for name in ("dtype", "max_model_len", "kv_cache_dtype"):
        if pinned.get(name) is not None:
            settings[name] = pinned[name]
    return EngineConfig(
        model=config["model"],
        tokenizer=config.get("tokenizer"),
        sharers=config.get("workers", 1),
        **settings,
    )


if __name__ == "__main__":
    serve(build)
