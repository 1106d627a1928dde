"""Keys that a job file may hold in a later version. Used by the loader of job files.

Each is accepted, and does nothing, with a value that means "off"; any other value is refused, because a
key that is silently ignored is worse than an error. `MEANS_OFF` lists those values, the first being the
one a message suggests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MEANS_OFF: Mapping[tuple[str, ...], tuple[Any, ...]] = {
    ("slurm",): (None,),
    ("eval",): (None,),
    ("model", "adapter"): (None,),
    ("model", "trust_remote_code"): (False,),
    ("prompt", "images"): (None,),
    ("sampling", "structured"): (None,),
    ("output", "parse"): (False,),
    ("run", "executor"): ("local",),
    ("run", "join"): (False,),
    ("engine", "speculative"): (None,),
    ("engine", "tensor_parallel"): (1,),
    ("engine", "pipeline_parallel"): (1,),
    ("engine", "kv_offload"): (None,),
}


def means_off(path: tuple[str, ...], value: Any) -> bool:
    """Whether `value` leaves the key at `path` off; `True` is never taken for 1."""
    return any(value == off and isinstance(value, bool) == isinstance(off, bool) for off in MEANS_OFF[path])
