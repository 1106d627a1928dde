"""`model` of a job file."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator

from batchgen.job.spec.section import Rule, Section
from batchgen.job.spec.values import COUNT, Count, DtypeName, Text, dtype_name


class ModelSpec(Section):
    """Which model, and the numeric choices about it."""

    path: Annotated[Text, Rule("a hub id such as org/name, a local folder, or a .gguf file")]
    revision: Annotated[Text | None, Rule("null, or a branch, tag or commit of a hub id")] = None
    tokenizer: Annotated[Text | None, Rule("null, a folder or a hub id")] = None
    allow_pickle: Annotated[bool, Rule("true or false")] = False
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16", "float16"],
        BeforeValidator(dtype_name, json_schema_input_type=DtypeName),
        Rule("auto, float32, bfloat16 or float16"),
    ] = "auto"
    quantization: Annotated[Literal["int8"] | None, Rule("null or int8")] = None
    max_model_len: Annotated[Count | None, Rule(f"null or {COUNT}")] = None
    generation_defaults: Annotated[Literal["model", "none"], Rule("model or none")] = "model"
