"""Objects made of dataclasses and tensors, taken apart for a file of tensors and put together again."""

from __future__ import annotations

import dataclasses
import enum
import importlib
from collections.abc import Mapping
from typing import Any

import torch

_OURS = ("batchgen.", "batchgen_kernels.")


class NotStorableError(TypeError):
    """Something that cannot be taken apart; says what."""


def take_apart(value: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    """A tree that JSON knows, and the tensors that it names.

    Raises:
        NotStorableError: it holds something else than dataclasses and enumerations of batchgen, tensors,
            lists, tuples, and what JSON knows.
    """
    tensors: dict[str, torch.Tensor] = {}
    return _take_apart(value, "", tensors), tensors


def put_together(tree: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    """What was taken apart.

    Raises:
        ValueError, TypeError, KeyError, AttributeError, ImportError: it was something else.
    """
    if isinstance(tree, list):
        return [put_together(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = tree.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: put_together(item, tensors) for key, item in content.items()}
    if kind == "tuple":
        return tuple(put_together(item, tensors) for item in content)
    cls = _class(kind)
    if issubclass(cls, enum.Enum):
        return cls(content)
    return cls(**{name: put_together(item, tensors) for name, item in content.items()})


def _take_apart(value: Any, name: str, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors[name] = value.detach()
        return {"tensor": name}
    if isinstance(value, list):
        return [_take_apart(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"tuple": [_take_apart(item, f"{name}.{i}", tensors) for i, item in enumerate(value)]}
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise NotStorableError(f"a dict with keys that are no text in {name}")
        return {"dict": {key: _take_apart(item, f"{name}.{key}", tensors) for key, item in value.items()}}
    cls = type(value)
    ours = cls.__module__.startswith(_OURS)
    if ours and isinstance(value, enum.Enum):
        return {_path(cls): value.value}
    if ours and dataclasses.is_dataclass(value):
        fields = [field.name for field in dataclasses.fields(value)]
        return {_path(cls): {f: _take_apart(getattr(value, f), f"{name}.{f}", tensors) for f in fields}}
    if value is None or cls in (str, int, float, bool):
        return value
    raise NotStorableError(f"{cls.__name__} in {name}")


def _path(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _class(path: str) -> Any:
    module, _, name = path.partition(":")
    if not module.startswith(_OURS):
        raise ValueError(f"{path} is none of batchgen's")
    cls = getattr(importlib.import_module(module), name)
    if not (isinstance(cls, type) and (dataclasses.is_dataclass(cls) or issubclass(cls, enum.Enum))):
        raise ValueError(f"{path} is no kind of value")
    return cls
