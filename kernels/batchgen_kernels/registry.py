"""Chooses the attention backend for a model. Called once at load, with the specs that the probe found."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch

from batchgen_kernels.backend import AttentionBackend
from batchgen_kernels.capability import CAPABILITIES, Capability
from batchgen_kernels.spec import AttentionSpec


class BackendError(ValueError):
    """No backend can do what was asked; the message says why and what to set instead."""


class Selection(NamedTuple):
    """The backend and, for the log, why it was chosen."""

    backend: AttentionBackend
    reason: str


def select(
    name: str,
    specs: AttentionSpec | Iterable[AttentionSpec],
    device: torch.device | str,
    dtype: torch.dtype = torch.float32,
    kv_dtype: torch.dtype | None = None,
    *,
    invariant: bool = False,
) -> Selection:
    """The backend called `name`, or for "auto" the first of the capability table that can run all `specs`.

    `dtype` is what the model computes in, `kv_dtype` what keys and values are stored as; None for `dtype`.
    With `invariant` a backend that can be made to is made so that a row's bits do not depend on its batch.

    Raises:
        BackendError: the name is unknown, or the backend refuses one of the specs.
    """
    device = torch.device(device)
    every = [specs] if isinstance(specs, AttentionSpec) else list(specs)

    def refusal_of(capability: Capability) -> str | None:
        refusals = (capability.refusal(spec, device, dtype, kv_dtype) for spec in every)
        return next(filter(None, refusals), None)

    if name != "auto":
        return _select_named(name, refusal_of, invariant)
    refusals: list[str] = []
    for capability in CAPABILITIES.values():
        refusal = refusal_of(capability)
        if refusal is None:
            why = "; ".join(refusals) or f"the fastest that runs this model on {device.type}"
            return Selection(_load(capability, invariant), f"{capability.name}: {why}")
        refusals.append(refusal)
    raise BackendError(f"no attention backend can run this model: {'; '.join(refusals)}")


def check_machine(name: str, device: torch.device | str, dtype: torch.dtype, kv_dtype: torch.dtype) -> None:
    """Whether the backend called `name` can run there at all, before a model is loaded; "auto" always can.

    Raises:
        BackendError: the name is unknown, or the backend runs elsewhere, or not in these dtypes.
    """
    if name != "auto":
        place = torch.device(device)
        _permit(name, lambda capability: capability.absence(place) or capability.storing(dtype, kv_dtype))


def _select_named(name: str, refusal_of: Callable[[Capability], str | None], invariant: bool) -> Selection:
    return Selection(_load(_permit(name, refusal_of), invariant), f"{name}: asked for by name")


def _permit(name: str, refusal_of: Callable[[Capability], str | None]) -> Capability:
    capability = CAPABILITIES.get(name)
    if capability is None:
        known = ", ".join(["auto", *CAPABILITIES])
        raise BackendError(f"attention backend {name!r} does not exist; use one of {known}")
    refusal = refusal_of(capability)
    if refusal is not None:
        raise BackendError(f"{refusal}; use 'auto' or another backend")
    return capability


def _load(capability: Capability, invariant: bool) -> AttentionBackend:
    module, _, attribute = capability.target.partition(":")
    options = capability.made_invariant if invariant else {}
    backend: AttentionBackend = getattr(importlib.import_module(module), attribute)(**options)
    return backend
