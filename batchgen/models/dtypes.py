"""Dtypes of models by their names in job files."""

from __future__ import annotations

import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def precision(quantization: str | None, others: set[str]) -> str:
    """How products are computed, for the end of a sentence about them.

    Args:
        quantization: `int8`, or None.
        others: what has weights and is not quantised.
    """
    if quantization is None:
        return ""
    return f" in {quantization}" + (f", but for {', '.join(sorted(others))}" if others else "")
