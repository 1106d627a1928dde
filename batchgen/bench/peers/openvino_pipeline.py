"""openvino-genai's continuous-batching pipeline, on token ids with a configuration for each row."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness import Row, Task

_CACHE_GIB = 3
_BATCHED_TOKENS = 512
_SEQUENCES = 256


class OpenVino:
    """Options: `prime` generates the first row alone, so that others find its prefix in the cache."""

    def __init__(self, task: Task) -> None:
        import openvino
        import openvino_genai

        self.version = f"openvino-genai {openvino_genai.__version__}"
        self._ov, self._genai = openvino, openvino_genai
        self._model, self._prime = Path(task.model), bool(task.options.get("prime"))
        self._properties = {
            "INFERENCE_NUM_THREADS": task.threads,
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_PRECISION_HINT": "f32",
        }
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = _CACHE_GIB
        scheduler.max_num_batched_tokens = _BATCHED_TOKENS
        scheduler.max_num_seqs = _SEQUENCES
        scheduler.enable_prefix_caching = scheduler.dynamic_split_fuse = True
        pipeline: Any = openvino_genai.ContinuousBatchingPipeline
        properties = {**self._properties, "KV_CACHE_PRECISION": "f32"}
        self._pipeline = pipeline(task.model, scheduler, "CPU", properties)

    def generate(self, rows: list[Row]) -> list[list[int]]:
        first = 1 if self._prime else 0
        return self._run(rows[:first]) + self._run(rows[first:])

    def _run(self, rows: list[Row]) -> list[list[int]]:
        import numpy as np

        if not rows:
            return []
        prompts = [self._ov.Tensor(np.array([row["prompt_ids"]], dtype=np.int64)) for row in rows]
        outputs = self._pipeline.generate(prompts, [self._config(row) for row in rows])
        return [list(output.m_generation_ids[0]) for output in outputs]

    def _config(self, row: Row) -> Any:
        config = self._genai.GenerationConfig()
        config.max_new_tokens, config.ignore_eos, config.do_sample = row["max_new_tokens"], True, False
        config.eos_token_id = 2
        return config

    def negative_logprob(self, windows: list[list[int]]) -> tuple[float, int]:
        import numpy as np

        file = str(self._model / "openvino_model.xml")
        compiled = self._ov.Core().compile_model(file, "CPU", self._properties)
        known = {name for port in compiled.inputs for name in port.get_names()}
        total, count = 0.0, 0
        for ids in windows:
            length = len(ids)
            inputs = {
                "input_ids": np.array([ids], dtype=np.int64),
                "attention_mask": np.ones((1, length), dtype=np.int64),
                "position_ids": np.arange(length, dtype=np.int64)[None],
                "beam_idx": np.zeros(1, dtype=np.int32),
            }
            request = compiled.create_infer_request()
            request.infer({name: value for name, value in inputs.items() if name in known})
            logits = request.get_tensor("logits").data[0, :-1].astype(np.float64)
            peak = logits.max(-1)
            norms = peak + np.log(np.exp(logits - peak[:, None]).sum(-1))
            total += float((norms - logits[np.arange(length - 1), ids[1:]]).sum())
            count += length - 1
        return (total, count) if math.isfinite(total) else (math.inf, count)


load = OpenVino
