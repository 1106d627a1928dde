"""Paged attention behind one small protocol. The engine and the model adapters import it, never the reverse.

Importing this package loads torch only; numba and triton are loaded by the backend that needs them,
when it is selected.
"""

from batchgen_kernels.backend import AttentionBackend, KVCache
from batchgen_kernels.capability import CAPABILITIES, Capability
from batchgen_kernels.metadata import AttentionMetadata
from batchgen_kernels.registry import BackendError, Selection, select
from batchgen_kernels.spec import AttentionSpec

__all__ = [
    "CAPABILITIES",
    "AttentionBackend",
    "AttentionMetadata",
    "AttentionSpec",
    "BackendError",
    "Capability",
    "KVCache",
    "Selection",
    "select",
]
