"""What an engine worker is told of a job: the `config` of its `start` message.

`run` makes it and hands it to the supervisor, which adds what belongs to an attempt (`pinned`, `counters`).
Plain values only, so that it can cross a process border without pickle.
"""

from __future__ import annotations

from typing import Any

from batchgen.data.row_result import INCLUDED
from batchgen.job.spec.job import JobSpec
from batchgen.text.prompt_spec import PromptSpec


def worker_config(spec: JobSpec, prompt: PromptSpec, commit: str | None = None) -> dict[str, Any]:
    """The part of a job that an engine worker needs.

    Args:
        spec: the job.
        prompt: its prompt section, bound to the input's columns.
        commit: what the model's revision was resolved to.
    """
    engine = spec.engine.model_dump(mode="json")
    for key in ("max_num_batched_tokens", "max_num_seqs", "block_size", "kv_cache_memory"):
        engine[key] = None if engine[key] == "auto" else engine[key]
    asked = {*spec.output.include, *(["reasoning"] if spec.sampling.reasoning is not None else [])}
    if spec.output.format == "openai_batch":
        # Its answers have a place for them, and a line of the input may ask.
        asked.add("logprobs")
    return {
        "model": spec.model.path,
        "tokenizer": spec.model.tokenizer,
        "generation_defaults": spec.model.generation_defaults,
        "prompt": prompt.to_dict(),
        "sampling": spec.sampling.model_dump(mode="json", exclude={"per_row", "turns"}),
        # What is shuffled stays in the order in which it arrives.
        "order": spec.run.order if spec.input.shuffle is None else "input",
        "samples": spec.samples is not None,
        "dedupe": spec.input.dedupe == "prompt",
        "row_timeout": spec.run.row_timeout,
        "embedding": spec.embedding.model_dump(mode="json"),
        "include": [key for key in INCLUDED if key in asked],
        "engine": {
            "task": spec.task,
            "dtype": spec.model.dtype,
            "quantization": spec.model.quantization,
            "max_model_len": spec.model.max_model_len,
            "revision": commit,
            "allow_pickle": spec.model.allow_pickle,
            **engine,
        },
    }
