"""`engine` of a job file."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator

from batchgen.job.spec.section import Rule, Section
from batchgen.job.spec.values import COUNT, Auto, Count, KVDtypeName, PositiveBytes, dtype_name


class EngineSpec(Section):
    """How the engine runs; only `kv_cache_dtype` blocks a resume."""

    device: Annotated[Literal["auto", "cpu", "cuda"], Rule("auto, cpu or cuda")] = "auto"
    attention: Annotated[
        Literal["auto", "cpu", "reference", "triton", "flash_attn", "flash_attn_3"],
        Rule("auto, cpu, reference, triton, flash_attn or flash_attn_3"),
    ] = "auto"
    max_num_batched_tokens: Annotated[Count | Auto, Rule(f"auto or {COUNT}")] = "auto"
    max_num_seqs: Annotated[Count | Auto, Rule(f"auto or {COUNT}")] = "auto"
    block_size: Annotated[Count | Auto, Rule(f"auto or {COUNT}")] = "auto"
    kv_cache_memory: Annotated[Auto | PositiveBytes, Rule("auto or a size such as 4GB")] = "auto"
    kv_cache_dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16", "int8", "fp8"],
        BeforeValidator(dtype_name, json_schema_input_type=KVDtypeName),
        Rule("auto, float32, bfloat16, float16, int8 or fp8"),
    ] = "auto"
    cuda_graphs: Annotated[Auto | bool, Rule("auto, true or false")] = "auto"
    prefix_caching: Annotated[bool, Rule("true or false")] = True
    deterministic: Annotated[Auto | bool, Rule("auto, true or false")] = "auto"
