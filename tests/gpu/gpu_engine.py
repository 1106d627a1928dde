"""The whole engine on the GPU against transformers on the same GPU, and against itself."""

from __future__ import annotations

import dataclasses
import gc
import logging
from typing import Any
from unittest import mock

import torch
from gpu_notes import Notes, Place

from batchgen.engine.config import EngineConfig
from batchgen.models.loader import load_model
from batchgen.models.source import find_model
from batchgen.types import SamplingParams, UsageError

_SMALL = "num_hidden_layers={layers}&hidden_size=64&intermediate_size=96&num_attention_heads=4"
_SMALL += "&num_key_value_heads=2&vocab_size=400&head_dim=16"
_WINDOW = "&sliding_window=21"
TINY = {
    "llama": "dummy:llama-3.1-8b?" + _SMALL,
    "qwen3": "dummy:qwen3-8b?" + _SMALL,
    "mixtral": "dummy:mixtral-8x7b?num_local_experts=4&" + _SMALL,
    "gemma2": "dummy:gemma2-9b?query_pre_attn_scalar=16&" + _SMALL + _WINDOW,
    "gemma3": "dummy:gemma3-27b?query_pre_attn_scalar=16&" + _SMALL + _WINDOW,
    "gpt-oss": "dummy:gpt-oss-20b?num_local_experts=4&" + _SMALL + _WINDOW,
    "phi": "dummy:phi-4?" + _SMALL.replace("&head_dim=16", ""),
}
REAL = ("dummy:smollm2-135m", "dummy:qwen3-0.6b", "dummy:gemma3-1b", "dummy:llama-3.1-8b?num_hidden_layers=4")
ALLOWED = 1.5
"""Times the error of transformers in the same dtype, as a root mean square over tokens."""


def tokens(notes: Notes, place: Place) -> None:
    """Greedy tokens in float32 are those of `generate`."""
    models = {name: path.format(layers=3) for name, path in TINY.items()}
    models |= {path.removeprefix("dummy:"): path for path in (*REAL[:2], REAL[3])}
    if place.dry:
        models = {"llama": TINY["llama"].format(layers=1)}
    for name, path in models.items():
        prompts = _prompts((9, 3) if place.dry else (1, 7, 33, 90, 90, 17), 400)
        count = 2 if place.dry else 32
        try:
            got = _generate(place, path, prompts, count, dtype="float32")
            want = _transformers(place, path, prompts, count)
            same = sum(a == b for a, b in zip(got, want, strict=True))
            notes.check(f"tokens of {name} in float32", got == want, f"{same} of {len(want)} rows equal")
        except Exception as error:
            notes.crashed(f"tokens of {name} in float32", error)
        _forget(place)


def errors(notes: Notes, place: Place) -> None:
    """Logprobs in 16 bits are about as far from float32 as those of transformers in 16 bits."""
    for path in (TINY["llama"].format(layers=1),) if place.dry else REAL:
        name = path.removeprefix("dummy:").partition("?")[0]
        prompts = _prompts((9, 5) if place.dry else (200, 64, 31, 150, 301), 400)
        sampling = SamplingParams(
            max_tokens=2 if place.dry else 48, ignore_eos=True, logprobs=0, prompt_logprobs=0
        )
        try:
            with place.llm(path, dtype=place.half, max_model_len=512, kv_cache_memory=1 << 28) as llm:
                outputs = llm.generate(prompts, sampling)
            _forget(place)
            _compare(notes, place, name, path, prompts, outputs)
        except Exception as error:
            notes.crashed(f"logprobs of {name} in {place.half}", error)
        _forget(place)


@torch.inference_mode()
def _compare(
    notes: Notes, place: Place, name: str, path: str, prompts: list[list[int]], outputs: list[Any]
) -> None:
    model = _model(place, path, place.half)
    ours, halves = [], []
    whole = [p + list(o.token_ids) for p, o in zip(prompts, outputs, strict=True)]
    for output in outputs:
        prompt = list(output.scores.logprobs)
        ours.append(torch.tensor([*prompt, *output.samples[0].scores.logprobs], dtype=torch.float64))
    halves = [_logprobs(model, ids, place) for ids in whole]
    model.float()
    exact = [_logprobs(model, ids, place) for ids in whole]
    del model
    # The first token of a prompt has no logprob; where there are more, those of the end are compared.
    size = [min(len(a), len(b)) for a, b in zip(ours, exact, strict=True)]
    error = _rms([a[-n:] - b[-n:] for a, b, n in zip(ours, exact, size, strict=True)])
    theirs = _rms([a[-n:] - b[-n:] for a, b, n in zip(halves, exact, size, strict=True)])
    notes.figure(f"error of logprobs of {name}, of transformers'", error / max(theirs, 1e-12), "x")
    text = f"root mean square {error:.2e}, of transformers {theirs:.2e}, over {sum(size)} tokens"
    notes.check(f"logprobs of {name} in {place.half}", error <= ALLOWED * theirs + 1e-4, text)


def graphs(notes: Notes, place: Place) -> None:
    """With captured steps and without: the same tokens in float32, and how many in 16 bits."""
    if "cuda_graphs" not in {field.name for field in dataclasses.fields(EngineConfig)}:
        notes.skip("captured steps", "the engine captures none")
        return
    path = TINY["llama"].format(layers=1) if place.dry else REAL[0]
    prompts = _prompts((5, 3) if place.dry else tuple(range(3, 40)), 400)
    count = 2 if place.dry else 48
    for dtype in ("float32", place.half):
        got = [
            _generate(place, path, prompts, count, dtype=dtype, cuda_graphs=on)
            for on in ((False, "auto") if place.dry else (False, True))
        ]
        same = sum(a == b for a, b in zip(*got, strict=True)) / len(prompts)
        notes.figure(f"rows that are the same with captured steps in {dtype}", 100 * same, "%")
        if dtype == "float32":
            notes.check("captured steps give the same tokens in float32", same == 1)
        _forget(place)


def alike(notes: Notes, place: Place) -> None:
    """Prompts that begin alike, which attention reads once, give the tokens that they give without that."""
    from batchgen_kernels.triton_kernels import TritonBackend

    path = TINY["llama"].format(layers=1) if place.dry else REAL[3]
    first, *rest = _prompts((20, 1, 2) if place.dry else (1200, *range(3, 51)), 400)
    prompts, count = [first + prompt for prompt in rest], 2 if place.dry else 24
    sizes = {"max_model_len": 1280, "max_num_batched_tokens": 2048, "max_num_seqs": 64}
    sizes["kv_cache_memory"] = 1 << 30
    steps = 0

    def counting(self: TritonBackend, *given: Any) -> Any:
        nonlocal steps
        sums = attend(self, *given)
        steps += sums is not None
        return sums

    attend = TritonBackend._attend_shared
    for graphs in (False,) if place.dry else (False, True):
        got = []
        for replaced in ({"_attend_shared": counting}, {"sharing": lambda *_: None}):
            with mock.patch.multiple(TritonBackend, **replaced):
                given = {} if place.dry else sizes
                got.append(
                    _generate(place, path, prompts, count, dtype="float32", cuda_graphs=graphs, **given)
                )
        name = f"prompts that begin alike, {'captured steps' if graphs else 'launched kernel by kernel'}"
        notes.check(f"{name}: the same tokens", got[0] == got[1])
        notes.check(f"{name}: what they share is read once", steps > 0, f"in {steps} launches")
        steps = 0
        _forget(place)


def invariance(notes: Notes, place: Place) -> None:
    """`deterministic: true`: a row alone and among others has the same logprobs to the bit."""
    path = TINY["llama"].format(layers=1) if place.dry else REAL[3]
    prompts = _prompts((9, 5) if place.dry else (5, 130, 17, 700, 64, 33, 1, 257), 400)
    sampling = SamplingParams(max_tokens=2 if place.dry else 24, ignore_eos=True, logprobs=0)
    dtype = "float32" if place.dry else "bfloat16"
    try:
        llm = place.llm(path, dtype=dtype, deterministic=True, max_model_len=1024, kv_cache_memory=1 << 28)
    except UsageError as error:
        notes.skip("deterministic", str(error))
        return
    together = [_bits(output) for output in llm.generate(prompts, sampling)]
    alone = [_bits(llm.generate([prompt], sampling)[0]) for prompt in prompts]
    llm.close()
    same = sum(a == b for a, b in zip(together, alone, strict=True))
    notes.check(
        "a row has the same bits in every batch", same == len(prompts), f"{same} of {len(prompts)} rows"
    )


def memory(notes: Notes, place: Place) -> None:
    """A step that finds no memory is halved; and `close` returns what was taken."""
    path = TINY["llama"].format(layers=1) if place.dry else REAL[0]
    prompts = _prompts((24, 9) if place.dry else (600, 300, 50, 700), 400)
    sampling = SamplingParams(max_tokens=2, ignore_eos=True)
    _forget(place)
    before = _taken(place)
    llm = place.llm(
        path, dtype="float32", max_model_len=1024, kv_cache_memory=1 << 26, max_num_batched_tokens=512
    )
    want = [list(o.token_ids) for o in llm.generate(prompts, sampling)]
    runner, limit, said = llm._core.runner, 8 if place.dry else 256, _Said()
    execute = runner.execute

    def refusing(planned: Any, *more: Any, **options: Any) -> Any:
        if planned.total_tokens > limit:
            raise torch.OutOfMemoryError("CUDA out of memory, as the check wants it")
        return execute(planned, *more, **options)

    runner.execute = refusing
    logging.getLogger("batchgen").addHandler(said)
    # Other prompts, as these are in the prefix cache.
    others = [[(i + 1) % 400 for i in prompt] for prompt in prompts]
    outputs = llm.generate(others, sampling)
    notes.check("steps without memory are halved", "ran out of memory, halved" in said.text, said.text[:200])
    notes.check("rows of halved steps are computed", all(o.error is None for o in outputs))
    del runner.execute
    again = [list(o.token_ids) for o in llm.generate(prompts, sampling)]
    notes.check("the engine goes on behind that", again == want)
    llm.close()
    del llm, runner, outputs
    _forget(place)
    if place.dry:
        notes.skip("memory after close", "only a GPU's memory is counted")
    else:
        left = _taken(place) - before
        notes.check("close returns memory", left < 64 << 20, f"{left / 2**20:.0f} MiB more than before")


class _Said(logging.Handler):
    text = ""

    def emit(self, record: logging.LogRecord) -> None:
        self.text += record.getMessage() + "\n"


def _generate(
    place: Place, path: str, prompts: list[list[int]], count: int, **settings: Any
) -> list[list[int]]:
    sizes = {"max_model_len": 160, "max_num_batched_tokens": 64, "max_num_seqs": 4}
    with place.llm(path, **{"kv_cache_memory": 1 << 27, **sizes, **settings}) as llm:
        outputs = llm.generate(prompts, SamplingParams(max_tokens=count, ignore_eos=True))
    for output in outputs:
        if output.error is not None:
            raise RuntimeError(f"a row failed: {output.error.message}")
    return [list(output.token_ids) for output in outputs]


@torch.inference_mode()
def _transformers(place: Place, path: str, prompts: list[list[int]], count: int) -> list[list[int]]:
    model, rows = _model(place, path, "float32"), []
    for prompt in prompts:
        ids = torch.tensor([prompt], device=place.device)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            do_sample=False,
            eos_token_id=-1,
            pad_token_id=0,
        )
        rows.append(out[0, len(prompt) :].tolist())
    return rows


def _model(place: Place, path: str, dtype: str) -> Any:
    model: Any = load_model(find_model(path).weights_folder(), dtype, place=place.device).model
    model.set_attn_implementation("eager")
    return model


def _logprobs(model: Any, ids: list[int], place: Place) -> torch.Tensor:
    """Of each token but the first."""
    logits = model(input_ids=torch.tensor([ids], device=place.device), use_cache=False).logits[0, :-1]
    scores = torch.log_softmax(logits.float(), -1)
    return scores.gather(1, torch.tensor(ids[1:], device=place.device).unsqueeze(1))[:, 0].double().cpu()


def _rms(differences: list[torch.Tensor]) -> float:
    return float(torch.cat(differences).square().mean().sqrt())


def _prompts(lengths: tuple[int, ...], vocabulary: int) -> list[list[int]]:
    """The fourth and fifth begin alike."""
    g = torch.Generator().manual_seed(5)
    rows = [torch.randint(3, vocabulary, (n,), generator=g).tolist() for n in lengths]
    if len(rows) > 4 and min(len(rows[3]), len(rows[4])) > 60:
        rows[4][:50] = rows[3][:50]
    return rows


def _bits(output: Any) -> tuple[Any, ...]:
    return (list(output.token_ids), list(output.samples[0].scores.logprobs))


def _taken(place: Place) -> int:
    if place.dry:
        return 0
    free, total = torch.cuda.mem_get_info()
    return total - free


def _forget(place: Place) -> None:
    gc.collect()
    if not place.dry:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
