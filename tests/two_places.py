"""Tell tensors of the host from tensors of a device where both are in the same memory.

For engines on a stand-in for a GPU (`stand_in_gpu.py`): what would be an error on a GPU is one under
`TwoPlaces`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

_CROSSING = {"copy_", "to", "__set__", "_has_compatible_shallow_copy_type"}
"""Between places, or no operation at all."""


class MixedPlacesError(AssertionError):
    """An operation on tensors of both places, or numbers of a device read as an array."""


class TwoPlaces(TorchFunctionMode):
    """Tensors that are made with a device named are on the device, and what is computed from them; all others
    are not.

    Naming a device is what makes the difference between code that works on a GPU and code that does not.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._there: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        self.operations = 0
        """On the device so far."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        given = _tensors((args, kwargs))
        there = [self.holds(tensor) for tensor in given]
        if name == "numpy" and any(there):
            raise MixedPlacesError("an array of numbers that are on the device")
        if name not in _CROSSING and any(there):
            self.operations += 1
            strangers = [t for t, on_device in zip(given, there, strict=True) if not on_device and t.dim()]
            if strangers:
                shapes = [tuple(t.shape) for t in given]
                raise MixedPlacesError(f"{name} of tensors {shapes}, of which on the device: {there}")
        result = func(*args, **kwargs)
        if name == "cpu":
            return result.clone()
        if name == "to" and (there[1:] == [True] or _names_device(args[1:], kwargs)):
            result = result if there[0] else result.clone()
            self._take(result)
        elif any(there) or kwargs.get("device") is not None:
            for tensor in _tensors(result):
                self._take(tensor)
        return result

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is on the device."""
        with torch._C.DisableTorchFunction():
            return tensor.layout is torch.strided and tensor.untyped_storage()._cdata in self._there

    def _take(self, tensor: torch.Tensor) -> None:
        with torch._C.DisableTorchFunction():
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self._there:
                self._there[key] = weakref.ref(storage, lambda _: self._there.pop(key, None))


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _names_device(args: Any, kwargs: Any) -> bool:
    return kwargs.get("device") is not None or any(isinstance(arg, (torch.device, str)) for arg in args)
