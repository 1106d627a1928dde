"""transformers' `generate` in padded batches, sorted by prompt length."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness import Row, Task


class Generate:
    """Options: `batch`, rows at once."""

    def __init__(self, task: Task) -> None:
        os.environ["HF_HUB_OFFLINE"] = "1"
        os.environ["TRANSFORMERS_VERBOSITY"] = "error"
        import torch
        import transformers

        torch.set_num_threads(task.threads)
        torch.set_grad_enabled(False)
        self.version = f"transformers {transformers.__version__}, torch {torch.__version__}"
        self._torch: Any = torch
        self._batch = int(task.options.get("batch", 16))
        causal: Any = transformers.AutoModelForCausalLM
        self._model: Any = causal.from_pretrained(task.model, dtype=torch.float32)
        self._model.eval()
        # Every row runs to its own length.
        self._model.generation_config.eos_token_id = None

    def generate(self, rows: list[Row]) -> list[list[int]]:
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]["prompt_ids"]))
        outputs: dict[int, list[int]] = {}
        for start in range(0, len(order), self._batch):
            numbers = order[start : start + self._batch]
            width, ids = self._run([rows[i] for i in numbers])
            for i, row in zip(numbers, ids, strict=True):
                outputs[i] = row[width : width + rows[i]["max_new_tokens"]]
        return [outputs[i] for i in range(len(rows))]

    def _run(self, rows: list[Row]) -> tuple[int, list[list[int]]]:
        torch = self._torch
        width = max(len(row["prompt_ids"]) for row in rows)
        missing = [width - len(row["prompt_ids"]) for row in rows]
        ids = torch.tensor([[2] * n + row["prompt_ids"] for n, row in zip(missing, rows, strict=True)])
        mask = torch.tensor([[0] * n + [1] * (width - n) for n in missing])
        done = self._model.generate(
            input_ids=ids,
            attention_mask=mask,
            max_new_tokens=max(row["max_new_tokens"] for row in rows),
            do_sample=False,
            pad_token_id=2,
        )
        return width, done.tolist()

    def negative_logprob(self, windows: list[list[int]]) -> tuple[float, int]:
        torch, total, count = self._torch, 0.0, 0
        for ids in windows:
            logits = self._model(torch.tensor([ids])).logits[0, :-1].double()
            total += float(torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum"))
            count += len(ids) - 1
        return total, count


load = Generate
