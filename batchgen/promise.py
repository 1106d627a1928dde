"""What is promised about a row's bits, and where.

One table: the engine acts on it, `plan` prints its line, docs/numerics.md shows it.

Imports no torch, so that `plan` can say it at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from batchgen.devices import CPU, CUDA
from batchgen.types import UsageError

QUANTIZATIONS = ("int8",)
"""What products can be computed in besides the dtype of the model; each has the promises of float32."""
STORED = ("float32", "bfloat16", "float16", "int8", "fp8")
_NARROW = ("bfloat16", "float16")
STORABLE: Mapping[str, tuple[str, ...]] = {
    "float32": STORED,
    **{dtype: (dtype, "int8", "fp8") for dtype in _NARROW},
}
"""What keys and values of a model in each dtype may be stored as; the kernels' own table says why."""


@dataclass(frozen=True, slots=True)
class Promise:
    """One line of the table; no two fit the same settings.

    Args:
        device: kind of device.
        dtypes: of the model.
        kv_dtypes: of keys and values in the cache.
        deterministic: values of `engine.deterministic`.
        checked: whether the engine pads its steps and checks itself at load.
        required: whether a failed check ends the job.
        sentence: what the user can count on.
    """

    device: str
    dtypes: tuple[str, ...]
    kv_dtypes: tuple[str, ...]
    deterministic: tuple[str | bool, ...]
    checked: bool
    required: bool
    sentence: str

    def fits(self, device: str, dtype: str, kv_dtype: str, deterministic: str | bool) -> bool:
        """Whether this line is about these settings."""
        return (
            self.device == device
            and dtype in self.dtypes
            and kv_dtype in self.kv_dtypes
            and deterministic in self.deterministic
        )


SAME = "a row has the same bits whatever shares its batch"
VARIES = "a row may differ in its last bits with what shares its batch"

PROMISES: tuple[Promise, ...] = (
    Promise(
        CPU,
        ("float32",),
        STORED,
        ("auto",),
        checked=True,
        required=False,
        sentence=f"{SAME}; checked at load, and said where the check fails",
    ),
    Promise(
        CPU,
        ("float32", *_NARROW),
        STORED,
        (True,),
        checked=True,
        required=True,
        sentence=f"{SAME}; checked at load, and nothing runs where the check fails",
    ),
    Promise(CPU, _NARROW, STORED, ("auto",), checked=False, required=False, sentence=VARIES),
    Promise(CPU, ("float32", *_NARROW), STORED, (False,), checked=False, required=False, sentence=VARIES),
    Promise(
        CUDA, ("float32", *_NARROW), STORED, ("auto", False), checked=False, required=False, sentence=VARIES
    ),
    Promise(
        CUDA,
        ("float32", *_NARROW),
        STORED,
        (True,),
        checked=True,
        required=True,
        sentence=f"{SAME}; checked at load, and nothing runs where the check fails",
    ),
)


def resolve_dtypes(dtype: str, kv_cache_dtype: str, device: str) -> tuple[str, str]:
    """What `auto` means on a kind of device: of the model, and of keys and values in the cache."""
    if dtype == "auto":
        dtype = "bfloat16" if device == CUDA else "float32"
    return dtype, dtype if kv_cache_dtype == "auto" else kv_cache_dtype


def check_quantization(quantization: str | None, dtype: str, device: str) -> None:
    """Refuse products in int8 of a model that computes in something else than float32, or not on a processor.

    Args:
        quantization: `int8`, or None.
        dtype: of the model, resolved.
        device: kind of device.

    Raises:
        UsageError: says what to use.
    """
    if quantization not in (None, *QUANTIZATIONS):
        raise UsageError(f"model.quantization: {quantization!r} is not allowed; use int8 or null")
    if quantization is not None and (dtype != "float32" or device != CPU):
        found = f"in {dtype}" if dtype != "float32" else f"on {device}"
        raise UsageError(
            f"model.quantization: {quantization} is for a model in float32 on a processor, not {found}; "
            "use model.dtype: float32 and engine.device: cpu, or leave model.quantization out"
        )


def check_kv_dtype(dtype: str, kv_dtype: str) -> None:
    """Refuse a cache that holds more than the model computes, or its numbers in the wrong way.

    Args:
        dtype: of the model, resolved.
        kv_dtype: of keys and values in the cache, resolved.

    Raises:
        UsageError: names what is allowed.
    """
    if kv_dtype not in STORABLE[dtype]:
        raise UsageError(
            f"engine.kv_cache_dtype: {kv_dtype} is not for a model in {dtype}, whose keys and values can be "
            f"stored as {' or '.join(STORABLE[dtype])}; use one of them, or auto"
        )


def promise(device: str, dtype: str, kv_dtype: str, deterministic: str | bool) -> Promise:
    """The line that holds; dtypes by their names, none of them `auto`.

    Raises:
        KeyError: there is none, which is a bug.
    """
    settings = (device, dtype, kv_dtype, deterministic)
    for line in PROMISES:
        if line.fits(*settings):
            return line
    raise KeyError(settings)
