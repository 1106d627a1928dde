"""Choose the attention backend of an engine."""

from __future__ import annotations

from batchgen.engine.config import EngineConfig
from batchgen.engine.device import Device
from batchgen.engine.sizing import KV_DTYPE_NAMES
from batchgen.models.dtypes import DTYPES
from batchgen.models.layer_attention import LayerAttention
from batchgen.types import UsageError
from batchgen_kernels.backend import AttentionBackend
from batchgen_kernels.capability import CAPABILITIES
from batchgen_kernels.registry import BackendError, Selection, check_machine, select


def check_attention(name: str, device: Device, dtype: str, kv_dtype: str) -> None:
    """Whether the backend called `name` runs on the device and stores such a cache, whatever the model.

    Args:
        name: or `auto`.
        device: found.
        dtype: of the model, resolved.
        kv_dtype: of keys and values in the cache, resolved.

    Raises:
        UsageError: it does not; says why.
    """
    try:
        check_machine(name, device.place, DTYPES[dtype], KV_DTYPE_NAMES[kv_dtype])
    except BackendError as error:
        raise UsageError(f"engine.attention: {error}") from error


def choose_backend(config: EngineConfig, layers: list[LayerAttention], device: Device) -> Selection:
    """The backend that `config` asks for, or the fastest on the device.

    Where the same bits in every batch are asked for it is made to give them, if it can be.

    Raises:
        UsageError: none can run these layers, or not with blocks of that size, or quantised products.
    """
    specs = [layer.spec for layer in layers]
    dtype, kv_dtype = DTYPES[config.dtype], KV_DTYPE_NAMES[config.kv_cache_dtype]
    try:
        chosen = select(
            config.attention,
            specs,
            device.place,
            dtype,
            kv_dtype,
            invariant=config.deterministic is True,
        )
    except BackendError as error:
        raise UsageError(f"engine.attention: {error}") from error
    _check_products(chosen.backend, config.quantization)
    assert config.block_size is not None
    _check_block_size(chosen.backend, config.block_size)
    return chosen


def _check_products(backend: AttentionBackend, quantization: str | None) -> None:
    if quantization is not None and backend.name != "cpu":
        raise UsageError(
            f"model.quantization: {quantization} needs the cpu attention backend, and this is "
            f"{backend.name}; use engine.device: cpu and engine.attention: cpu, which says what it lacks, or "
            "leave model.quantization out"
        )


def _check_block_size(backend: AttentionBackend, block_size: int) -> None:
    multiple = CAPABILITIES[backend.name].block_size_multiple
    if block_size % multiple:
        raise UsageError(
            f"engine.block_size: {block_size} is not a multiple of {multiple}, which the {backend.name} "
            "attention backend needs"
        )
