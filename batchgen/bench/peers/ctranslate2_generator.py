"""CTranslate2's `generate_batch`: a callback ends each row at its own length, what all share is static."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness import Row, Task

_LEAST_PREFIX = 16
_NEVER_GENERATED = "<repo_name>"


class Generator:
    """Options: `compute`, a type to compute in; `batch`, rows at once; `tokenizer`, a file with words."""

    def __init__(self, task: Task) -> None:
        import ctranslate2
        import tokenizers

        self.version = f"ctranslate2 {ctranslate2.__version__}"
        self._batch = int(task.options.get("batch", 16))
        self._generator: Any = ctranslate2.Generator(
            task.model,
            device="cpu",
            compute_type=task.options["compute"],
            inter_threads=1,
            intra_threads=task.threads,
        )
        self._words = tokenizers.Tokenizer.from_file(str(Path(task.options["tokenizer"]).expanduser()))

    def generate(self, rows: list[Row]) -> list[list[int]]:
        prompts: list[list[Any]] = [list(map(self._words.id_to_token, row["prompt_ids"])) for row in rows]
        shared = _common(prompts)
        static = prompts[0][:shared] if shared > _LEAST_PREFIX and len(prompts) > 1 else None
        if static is not None:
            prompts = [prompt[shared:] for prompt in prompts]
        # As the library sorts them itself, so that numbers in a batch are known.
        order = sorted(range(len(rows)), key=lambda i: len(prompts[i]), reverse=True)
        outputs: dict[int, list[int]] = {}
        for start in range(0, len(order), self._batch):
            numbers = order[start : start + self._batch]
            lengths = [rows[i]["max_new_tokens"] for i in numbers]
            done = self._run([prompts[i] for i in numbers], lengths, static)
            outputs.update(zip(numbers, done, strict=True))
        return [outputs[i] for i in range(len(rows))]

    def negative_logprob(self, windows: list[list[int]]) -> tuple[float, int]:
        texts = [list(map(self._words.id_to_token, ids)) for ids in windows]
        scored = self._generator.score_batch(texts, max_batch_size=1)
        return -sum(sum(s.log_probs) for s in scored), sum(len(s.log_probs) for s in scored)

    def _run(self, prompts: list[list[Any]], lengths: list[int], static: list[Any] | None) -> list[list[int]]:
        # A step's own number counts forced tokens of the prompt, too.
        generated = [0] * len(prompts)

        def is_over(step: Any) -> bool:
            generated[step.batch_id] += 1
            return bool(generated[step.batch_id] >= lengths[step.batch_id])

        results = self._generator.generate_batch(
            prompts,
            max_length=max(lengths),
            callback=is_over,
            sampling_topk=1,
            include_prompt_in_result=False,
            end_token=_NEVER_GENERATED,
            static_prompt=static,
            cache_static_prompt=True,
        )
        return [list(r.sequences_ids[0])[:n] for r, n in zip(results, lengths, strict=True)]


def _common(prompts: list[list[Any]]) -> int:
    """How many first words all have in common; at least one is left to each."""
    shared, most = 0, min(map(len, prompts)) - 1
    while shared < most and all(prompt[shared] == prompts[0][shared] for prompt in prompts):
        shared += 1
    return shared


load = Generator
