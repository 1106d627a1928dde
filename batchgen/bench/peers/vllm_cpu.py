"""vLLM on the processor: compiled, with prefix caching, the engine in this process."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness import Row, Task


class Vllm:
    """`LLM.generate` on token ids, with parameters for each row."""

    def __init__(self, task: Task) -> None:
        os.environ["HF_HUB_OFFLINE"] = "1"
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        os.environ["VLLM_NO_USAGE_STATS"] = "1"
        os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "3")
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
        cores = sorted(os.sched_getaffinity(0))[: task.threads]
        os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
        import vllm

        self.version = f"vllm {vllm.__version__}"
        self._sampling = vllm.SamplingParams
        longest = max(len(row["prompt_ids"]) + row["max_new_tokens"] for row in task.rows)
        self._llm = vllm.LLM(
            model=task.model,
            dtype="float32",
            max_model_len=max(1024, longest),
            enable_prefix_caching=True,
            seed=0,
            **task.options,
        )

    def generate(self, rows: list[Row]) -> list[list[int]]:
        prompts: Any = [{"prompt_token_ids": row["prompt_ids"]} for row in rows]
        sampling = [
            self._sampling(
                temperature=0.0, max_tokens=row["max_new_tokens"], ignore_eos=True, detokenize=False
            )
            for row in rows
        ]
        return [list(o.outputs[0].token_ids) for o in self._llm.generate(prompts, sampling, use_tqdm=False)]

    def negative_logprob(self, windows: list[list[int]]) -> tuple[float, int]:
        total, count = 0.0, 0
        sampling = self._sampling(temperature=0.0, max_tokens=1, prompt_logprobs=0)
        prompts: Any = [{"prompt_token_ids": ids} for ids in windows]
        for ids, output in zip(windows, self._llm.generate(prompts, sampling, use_tqdm=False), strict=True):
            for token, scores in zip(ids[1:], output.prompt_logprobs[1:], strict=True):
                total -= scores[token].logprob
                count += 1
        return total, count


load = Vllm
