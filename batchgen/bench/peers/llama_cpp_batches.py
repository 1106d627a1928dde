"""llama.cpp's batches: sequences side by side, prompts in pieces, a common prefix computed once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness import Row, Task

_LEAST_PREFIX = 16
_FLOAT32 = 0


@dataclass
class _Slot:
    """A sequence: how much of its prompt is done, and the token that comes next."""

    number: int
    prompt: list[int]
    done: int
    next_token: int | None = None


class Batches:
    """Options: `slots`, sequences at once; `batch`, tokens at once."""

    def __init__(self, task: Task) -> None:
        import llama_cpp
        import numpy as np

        self.version = f"llama-cpp-python {llama_cpp.__version__}"
        self._c: Any = llama_cpp
        self._np: Any = np
        self._slots, self._most = int(task.options.get("slots", 32)), int(task.options.get("batch", 512))
        c = self._c
        c.llama_log_set(c.llama_log_callback(0), None)
        c.llama_backend_init()
        parameters = c.llama_model_default_params()
        parameters.n_gpu_layers = 0
        self._model = c.llama_model_load_from_file(task.model.encode(), parameters)
        self._context = c.llama_init_from_model(self._model, self._parameters(task))
        if not self._context:
            raise RuntimeError("llama_init_from_model failed")
        self._vocabulary = c.llama_vocab_n_tokens(c.llama_model_get_vocab(self._model))
        self._batch = c.llama_batch_init(self._most, 0, 1)

    def _parameters(self, task: Task) -> Any:
        p = self._c.llama_context_default_params()
        longest = max(len(row["prompt_ids"]) + row["max_new_tokens"] for row in task.rows) + 8
        p.n_ctx = max(longest, 256) * (self._slots + 1)
        p.n_batch = p.n_ubatch = self._most
        p.n_seq_max = self._slots + 1
        p.n_threads = p.n_threads_batch = task.threads
        p.type_k = p.type_v = _FLOAT32
        p.flash_attn_type, p.kv_unified, p.no_perf = 1, True, True
        return p

    def generate(self, rows: list[Row]) -> list[list[int]]:
        c = self._c
        memory = c.llama_get_memory(self._context)
        c.llama_memory_clear(memory, True)
        shared = self._share([row["prompt_ids"] for row in rows])
        waiting = list(range(len(rows)))[::-1]
        slots: list[_Slot | None] = [None] * self._slots
        outputs: list[list[int]] = [[] for _ in rows]
        while waiting or any(slots):
            for k in range(self._slots):
                if slots[k] is None and waiting:
                    number = waiting.pop()
                    c.llama_memory_seq_rm(memory, k, -1, -1)
                    if shared:
                        c.llama_memory_seq_cp(memory, self._slots, k, -1, -1)
                    slots[k] = _Slot(number, rows[number]["prompt_ids"], shared)
            for k, token in self._step(slots):
                slot = slots[k]
                assert slot is not None
                slot.next_token = token
                outputs[slot.number].append(token)
                if len(outputs[slot.number]) >= rows[slot.number]["max_new_tokens"]:
                    slots[k] = None
        return outputs

    def negative_logprob(self, windows: list[list[int]]) -> tuple[float, int]:
        np, memory = self._np, self._c.llama_get_memory(self._context)
        total, count = 0.0, 0
        for ids in windows:
            self._c.llama_memory_clear(memory, True)
            for start in range(0, len(ids), self._most):
                piece = ids[start : start + self._most]
                for j, token in enumerate(piece):
                    self._put(j, token, start + j, 0, True)
                self._decode(len(piece))
                for j, target in enumerate(ids[start + 1 : start + len(piece) + 1]):
                    logits = self._logits(j).astype(np.float64)
                    peak = logits.max()
                    total += float(peak + np.log(np.exp(logits - peak).sum()) - logits[target])
                    count += 1
        return total, count

    def _share(self, prompts: list[list[int]]) -> int:
        """Compute what all prompts begin with; returns its length."""
        shared, most = 0, min(map(len, prompts)) - 1
        while shared < most and all(prompt[shared] == prompts[0][shared] for prompt in prompts):
            shared += 1
        if shared < _LEAST_PREFIX or len(prompts) == 1:
            return 0
        for start in range(0, shared, self._most):
            piece = prompts[0][start : min(start + self._most, shared)]
            for j, token in enumerate(piece):
                self._put(j, token, start + j, self._slots, False)
            self._decode(len(piece))
        return shared

    def _step(self, slots: list[_Slot | None]) -> list[tuple[int, int]]:
        """One batch: a token of each sequence that generates, then pieces of prompts."""
        size, wanted = 0, []
        for k, slot in enumerate(slots):
            if slot is not None and slot.next_token is not None:
                self._put(size, slot.next_token, slot.done, k, True)
                slot.done += 1
                wanted.append((k, size))
                size += 1
        for k, slot in enumerate(slots):
            if slot is not None and slot.next_token is None and size < self._most:
                for token in slot.prompt[slot.done : slot.done + self._most - size]:
                    is_last = slot.done == len(slot.prompt) - 1
                    self._put(size, token, slot.done, k, is_last)
                    slot.done += 1
                    size += 1
                if slot.done == len(slot.prompt):
                    wanted.append((k, size - 1))
        self._decode(size)
        return [(k, self._likeliest(place)) for k, place in wanted]

    def _likeliest(self, place: int) -> int:
        return int(self._logits(place).argmax())

    def _logits(self, place: int) -> Any:
        logits = self._c.llama_get_logits_ith(self._context, place)
        return self._np.ctypeslib.as_array(logits, (self._vocabulary,))

    def _put(self, place: int, token: int, position: int, sequence: int, wanted: bool) -> None:
        batch = self._batch
        batch.token[place], batch.pos[place] = token, position
        batch.n_seq_id[place], batch.seq_id[place][0] = 1, sequence
        batch.logits[place] = wanted

    def _decode(self, size: int) -> None:
        self._batch.n_tokens = size
        code = self._c.llama_decode(self._context, self._batch)
        if code:
            raise RuntimeError(f"llama_decode gave {code}")


load = Batches
