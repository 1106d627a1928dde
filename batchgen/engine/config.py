"""What the engine is told: everything is resolved here, nothing is read from a job file."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Settings of one engine. Values of None are chosen from the model and the machine.

    Args:
        model: hub id, folder, GGUF file, or `dummy:` and a shape.
        tokenizer: folder or hub id of another tokenizer.
        revision: branch, tag or commit of a hub id.
        task: decides with which head the model is loaded: one for the next token (`generate`,
            `loglikelihood`, `perplexity`; such a model can embed too), none (`embed`), or one for classes
            (`classify`); `auto` goes by the architecture that the configuration names.
        allow_pickle: whether weights may be `.bin` files.
        device: `auto` (a GPU if there is one), `cpu` or `cuda`.
        dtype: `auto` (bfloat16 on a GPU, float32 on the CPU), `float32`, `bfloat16` or `float16`.
        quantization: `int8` for products in int8, of a model in float32; None for none.
        max_model_len: longest prompt plus output, in tokens.
        attention: name of an attention backend, or `auto`.
        max_num_batched_tokens: token budget of a step.
        max_num_seqs: most requests running at once.
        block_size: tokens in a KV cache block.
        kv_cache_memory: bytes for the KV cache.
        kv_cache_dtype: what keys and values are stored as: `auto` (as `dtype`), `float32`, `bfloat16`,
            `float16`, `int8` or `fp8`.
        cuda_graphs: whether steps that only decode are captured: `auto` where the layers are one program on a
            GPU; True makes it an error where that cannot be.
        prefix_caching: share blocks of equal prefixes.
        deterministic: `auto` checks batch invariance where it is promised; False skips the padding it
            needs; True makes its absence an error.
        num_threads: CPU threads; None is this engine's share of those that the process may use.
        sharers: engines that share this machine's cores and memory, this one included.
        debug_checks: assert the scheduler's invariants after every step.
    """

    model: str
    tokenizer: str | None = None
    revision: str | None = None
    task: str = "generate"
    allow_pickle: bool = False
    device: str = "auto"
    dtype: str = "auto"
    quantization: str | None = None
    max_model_len: int | None = None
    attention: str = "auto"
    max_num_batched_tokens: int | None = None
    max_num_seqs: int | None = None
    block_size: int | None = None
    kv_cache_memory: int | None = None
    kv_cache_dtype: str = "auto"
    cuda_graphs: str | bool = "auto"
    prefix_caching: bool = True
    deterministic: str | bool = "auto"
    num_threads: int | None = None
    sharers: int = 1
    debug_checks: bool = False
