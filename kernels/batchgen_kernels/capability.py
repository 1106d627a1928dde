"""What each backend can do, as data. `registry.select` and the backends' own `supports` read this table."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from batchgen_kernels.spec import AttentionSpec
from batchgen_kernels.storage import LARGEST


@dataclass(frozen=True, slots=True, kw_only=True)
class Capability:
    """Limits of one backend.

    Args:
        target: "module:class" of the implementation, imported when it is selected.
        devices: torch device types.
        dtypes: of queries, keys and values.
        kv_dtypes: what keys and values can be stored as; `KV_DTYPES` says which of them a dtype allows.
        requires: modules that must be installed, checked without importing them.
        block_size_multiple: block sizes are multiples of this.
        max_head_size: largest head_size and v_head_size.
        head_size_multiple: both are multiples of this.
        one_head_size: whether they are equal.
        sinks: whether layers may have attention sinks.
        chips: major numbers of the compute capabilities that it is for; empty for all.
        batch_invariant: a row's output has the same bits whatever shares its step.
        made_invariant: arguments of the implementation with which it has.
    """

    name: str
    target: str
    devices: frozenset[str]
    dtypes: frozenset[torch.dtype]
    kv_dtypes: frozenset[torch.dtype]
    requires: tuple[str, ...] = ()
    block_size_multiple: int = 1
    max_head_size: int = 1024
    head_size_multiple: int = 1
    one_head_size: bool = False
    sinks: bool = True
    chips: tuple[int, ...] = ()
    batch_invariant: bool = False
    made_invariant: Mapping[str, Any] = field(default_factory=dict)

    def refusal(
        self,
        spec: AttentionSpec,
        device: torch.device,
        dtype: torch.dtype,
        kv_dtype: torch.dtype | None = None,
    ) -> str | None:
        """Why this backend cannot run `spec` on `device` in `dtype`, or None if it can.

        `kv_dtype` is what keys and values are stored as; None for `dtype`.
        """
        absent = self.absence(device)
        if absent is not None:
            return absent
        lacking = self.storing(dtype, dtype if kv_dtype is None else kv_dtype)
        if lacking is not None:
            return lacking
        return self._shape_refusal(spec)

    def page_refusal(self, spec: AttentionSpec, block_size: int, kv_dtype: torch.dtype) -> str | None:
        """Why pages of such blocks cannot hold the cache of `spec`, or None if they can."""
        if kv_dtype not in self.kv_dtypes:
            return self._not_stored(kv_dtype)
        if block_size < 1 or block_size % self.block_size_multiple:
            return (
                f"the {self.name} attention backend takes block sizes that are multiples of "
                f"{self.block_size_multiple}, not {block_size}"
            )
        return self._shape_refusal(spec)

    def _not_stored(self, kv_dtype: torch.dtype) -> str:
        return (
            f"the {self.name} attention backend stores keys and values as {_names(self.kv_dtypes)}, "
            f"not as {_name(kv_dtype)}"
        )

    def _shape_refusal(self, spec: AttentionSpec) -> str | None:
        widest = max(spec.head_size, spec.v_head_size)
        if widest > self.max_head_size:
            return (
                f"the {self.name} attention backend takes head sizes up to {self.max_head_size}, not {widest}"
            )
        odd = [n for n in (spec.head_size, spec.v_head_size) if n % self.head_size_multiple]
        if odd:
            return (
                f"the {self.name} attention backend takes head sizes that are multiples of "
                f"{self.head_size_multiple}, not {odd[0]}"
            )
        if self.one_head_size and spec.head_size != spec.v_head_size:
            return (
                f"the {self.name} attention backend takes values as wide as keys, not {spec.v_head_size} "
                f"and {spec.head_size}"
            )
        if spec.has_sinks and not self.sinks:
            return f"the {self.name} attention backend has no attention sinks"
        return None

    def storing(self, dtype: torch.dtype, kv_dtype: torch.dtype) -> str | None:
        """Why this backend cannot run any layer in `dtype` with a cache in `kv_dtype`, or None if it can."""
        if dtype not in self.dtypes:
            return (
                f"the {self.name} attention backend computes in {_names(self.dtypes)}, not in {_name(dtype)}"
            )
        if kv_dtype not in KV_DTYPES[dtype]:
            return (
                f"keys and values of a {_name(dtype)} model are stored as {_names(KV_DTYPES[dtype])}, "
                f"not as {_name(kv_dtype)}"
            )
        if kv_dtype not in self.kv_dtypes:
            return self._not_stored(kv_dtype)
        return None

    def absence(self, device: torch.device) -> str | None:
        """Why this backend cannot run any layer on `device`, or None if it can run some."""
        missing = [m for m in self.requires if importlib.util.find_spec(m) is None]
        if missing:
            return f"the {self.name} attention backend needs {', '.join(missing)}, which is not installed"
        if device.type not in self.devices:
            return f"the {self.name} attention backend runs on {_names(self.devices)}, not on {device.type}"
        if self.chips and device.type == "cuda" and torch.cuda.is_available():
            major, minor = torch.cuda.get_device_capability(device)
            if major not in self.chips:
                chips = " or ".join(f"{chip}.x" for chip in self.chips)
                return (
                    f"the {self.name} attention backend is for compute capability {chips}, not "
                    f"{major}.{minor}"
                )
        return None


def _name(value: str | torch.dtype) -> str:
    return "fp8" if value == torch.float8_e4m3fn else str(value).removeprefix("torch.")


def _names(values: Iterable[str] | Iterable[torch.dtype]) -> str:
    return " or ".join(sorted(map(_name, values)))


KV_DTYPES: Mapping[torch.dtype, frozenset[torch.dtype]] = {
    torch.float64: frozenset({torch.float64}),
    torch.float32: frozenset({torch.float32, torch.bfloat16, torch.float16, *LARGEST}),
    torch.bfloat16: frozenset({torch.bfloat16, *LARGEST}),
    torch.float16: frozenset({torch.float16, *LARGEST}),
}
"""What keys and values of each dtype may be stored as.

More than the model computes with would cost memory and hold nothing more; of the two 16-bit dtypes, each
lacks range or precision that the other has.
"""


FIXED_SPLIT = 512
"""Keys of a split of Triton's attention where bits must not depend on the batch: 8 of its largest tiles of
keys, so that writing and reading a split's sums is little beside its keys, and a sequence of 8k keys is 16
programs."""


def _triton(interpreted: bool) -> Capability:
    """On a GPU; on the processor only by triton's interpreter, which gets bfloat16 wrong."""
    floats = {torch.float32, torch.float16} | (set() if interpreted else {torch.bfloat16})
    return Capability(
        name="triton",
        target="batchgen_kernels.triton_kernels:TritonBackend",
        devices=frozenset({"cuda", "cpu"} if interpreted else {"cuda"}),
        dtypes=frozenset(floats),
        kv_dtypes=frozenset(floats | set(LARGEST)),
        requires=("triton",),
        block_size_multiple=16,
        max_head_size=256,
        made_invariant={"fixed_split": FIXED_SPLIT},
    )


def _flash(
    name: str, target: str, module: str, *, block_size_multiple: int, chips: tuple[int, ...]
) -> Capability:
    """Of flash-attn; behind our own, as nothing has been measured beside it."""
    halves = frozenset({torch.bfloat16, torch.float16})
    return Capability(
        name=name,
        target=f"batchgen_kernels.flash_attention:{target}",
        devices=frozenset({"cuda"}),
        dtypes=halves,
        kv_dtypes=halves,
        requires=(module,),
        block_size_multiple=block_size_multiple,
        max_head_size=256,
        head_size_multiple=8,
        one_head_size=True,
        sinks=False,
        chips=chips,
    )


# In the order in which 'auto' tries them.
CAPABILITIES: dict[str, Capability] = {
    c.name: c
    for c in (
        Capability(
            name="cpu",
            target="batchgen_kernels.cpu:CpuBackend",
            devices=frozenset({"cpu"}),
            dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16}),
            kv_dtypes=frozenset({torch.float32, torch.bfloat16, torch.float16, torch.int8}),
            requires=("numba",),
            block_size_multiple=16,
            batch_invariant=True,
        ),
        _triton(interpreted=os.environ.get("TRITON_INTERPRET") == "1"),
        _flash("flash_attn", "FlashAttention2", "flash_attn", block_size_multiple=256, chips=(8, 9, 10, 12)),
        _flash("flash_attn_3", "FlashAttention3", "flash_attn_interface", block_size_multiple=16, chips=(9,)),
        Capability(
            name="reference",
            target="batchgen_kernels.reference:ReferenceBackend",
            devices=frozenset({"cpu", "cuda"}),
            dtypes=frozenset(KV_DTYPES),
            kv_dtypes=frozenset(KV_DTYPES) | set(LARGEST),
        ),
    )
}
