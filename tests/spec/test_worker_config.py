"""What the job file says reaches the worker in the words of the worker."""

from __future__ import annotations

import msgpack
from job_files import SMALLEST, Write

from batchgen.engine.config import EngineConfig
from batchgen.job.load import load_job
from batchgen.job.worker_config import worker_config
from batchgen.sampling.resolve import resolve_sampling
from batchgen.text.prompt_spec import PromptSpec
from batchgen.types import SamplingParams


def test_the_worker_understands_it(job_file: Write) -> None:
    file = job_file(SMALLEST + "engine: {max_num_seqs: 4, kv_cache_memory: 1MB, deterministic: true}\n")
    spec = load_job(file, ["model.max_model_len=99", "sampling.stop=[a]", "sampling.temperature=1"])
    prompt = PromptSpec.from_dict(spec.prompt.model_dump()).bind(["prompt", "x"])
    config = msgpack.unpackb(msgpack.packb(worker_config(spec, prompt)))
    assert EngineConfig(model=config["model"], **config["engine"]) == EngineConfig(
        model="org/name", max_model_len=99, max_num_seqs=4, kv_cache_memory=1_000_000, deterministic=True
    )
    assert resolve_sampling(config["sampling"], {"top_p": 0.9}) == SamplingParams(
        temperature=1.0, top_p=0.9, stop=("a",)
    )
    assert PromptSpec.from_dict(config["prompt"]) == prompt
    assert prompt.sources == ("prompt",)
