"""A step on a device whose numbers nobody may ask for: meta tensors have none.

So what would make the host wait (a number read, a mask looked at, a copy back), or would mix tensors of two
devices, is an error here as it would be a stall or an error on a GPU. Kernels are replaced by a look at their
arguments.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import GenerationConfig

sys.path.insert(0, str(Path(__file__).parents[1] / "models"))

from families import FAMILIES, Family

from batchgen.core.scheduler import ScheduledRequest, SchedulerOutput
from batchgen.devices import CUDA
from batchgen.engine.device import Device
from batchgen.engine.inputs import PendingTokens
from batchgen.engine.kv_memory import plan_kv_layout
from batchgen.engine.runner import ModelRunner
from batchgen.engine.transfer import Transfer, size
from batchgen.models.attention import ATTENTION_NAME, register_attention
from batchgen.models.device_decoder import read_device_decoder
from batchgen.models.fused import FusedDecoder, Fusion
from batchgen.models.layer_attention import LayerAttention
from batchgen.models.loader import LoadedModel
from batchgen.models.parts import body_of
from batchgen.models.probe import probe_model
from batchgen.sampling.history import TokenHistory
from batchgen.sampling.on_device import draw
from batchgen.sampling.operations import AllowedTokens, BadWords, LogitBias, MinTokens, Penalties
from batchgen.sampling.sampler import SamplingRow
from batchgen.types import Request, SamplingParams, Task
from batchgen_kernels.triton_kernels import backend as triton_backend
from batchgen_kernels.triton_kernels import layers as triton_layers
from batchgen_kernels.triton_kernels.tiles import H100

META = torch.device("meta")
DEVICE = Device(CUDA, META)
COPY = torch.ops.aten.copy_.default
BLOCKS, BLOCK, VOCABULARY = 32, 16, 259
ASKING = {"phimoe"}
"""Families whose definition in transformers waits in every pass: for frequencies that the host makes anew."""


class Kernel:
    """Launched with tensors of one device and numbers, like a kernel of Triton.

    Attributes:
        launches: how often.
        rows: of the first tensor of each.
    """

    def __init__(self) -> None:
        self.launches = 0
        self.rows: list[int] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(isinstance(size, int) and size > 0 for size in grid), grid

        def launch(*arguments: Any, **constants: Any) -> None:
            self.launches += 1
            self.rows.append(len(arguments[0]))
            assert all(a.device == META for a in arguments if isinstance(a, torch.Tensor))
            assert not any(isinstance(c, torch.Tensor) for c in constants.values())

        return launch


class OneDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Every operation is on one device; only what the host does not wait for goes there.

    Attributes:
        copies: how often something went.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.copies = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        result = func(*args, **kwargs)
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        places = {t.device.type for t in (*tensors, *outputs) if t.dim() or t.device == META}
        if len(places) > 1:
            waits = not (args[2] if func is COPY else kwargs.get("non_blocking"))
            assert not waits, f"{func} is on {places}"
            assert result.device == META, "the host waits for a number"
            self.copies += 1
        return result


class MetaBackend(triton_backend.TritonBackend):
    """Triton's backend that takes the device."""

    def supports(self, *_: Any, **__: Any) -> str | None:
        return None


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> dict[str, Kernel]:
    stubs = {name: Kernel() for name in ("attend_kernel", "merge_kernel", "write_kernel")}
    for name, stub in stubs.items():
        monkeypatch.setattr(triton_backend, name, stub)
    for name in ("rms_norm_kernel", "gated_kernel", "rotate_and_write_kernel"):
        stubs[name] = Kernel()
        monkeypatch.setattr(triton_layers, name, stubs[name])
    monkeypatch.setattr(triton_backend, "_chip", lambda _: H100)
    return stubs


def on_device(part: Any) -> Any:
    """Weights without numbers."""
    if isinstance(part, torch.Tensor):
        return part.to(META, torch.bfloat16)
    if isinstance(part, list):
        return [on_device(one) for one in part]
    if dataclasses.is_dataclass(part) and not isinstance(part, type):
        fields = {field.name: on_device(getattr(part, field.name)) for field in dataclasses.fields(part)}
        return dataclasses.replace(part, **fields)
    return part


def runner_of(family: Family, *, fused: bool = False) -> ModelRunner:
    """The family's model without numbers, its layers as one program or not; only what is read needs some."""
    register_attention()
    model = family.build(ATTENTION_NAME)
    found = probe_model(model)
    decoder = None
    if fused:
        body = body_of(model, Task.GENERATE)
        read = read_device_decoder(body)
        assert isinstance(read, FusedDecoder), read
        decoder = on_device(read.weights)
        Fusion(model, body, FusedDecoder(decoder, read.preparation))
    model.to(META, torch.bfloat16)
    layers = [
        LayerAttention(layer.spec, None if layer.sinks is None else layer.sinks.to(META), layer.source)
        for layer in found
    ]
    loaded = LoadedModel(model, GenerationConfig(), torch.bfloat16)  # type: ignore[no-untyped-call]
    backend = MetaBackend()
    layout = plan_kv_layout(layers, backend, torch.bfloat16, block_size=BLOCK, max_chunk=64, max_tokens=160)
    return ModelRunner(
        loaded,
        layers,
        backend,
        layout,
        kv_dtype=torch.bfloat16,
        num_blocks=BLOCKS,
        block_size=BLOCK,
        row_multiple=1,
        device=DEVICE,
        decoder=decoder,
        max_rows=64,
    )


def step(runner: ModelRunner, *requests: tuple[Request, int, int, bool]) -> SchedulerOutput:
    groups = len(runner.layout.groups)
    scheduled = [
        ScheduledRequest(r, start, stop - start, samples, [list(range(1, 2 + stop // BLOCK))] * groups)
        for r, start, stop, samples in requests
    ]
    return SchedulerOutput(scheduled, sum(s.num_tokens for s in scheduled), [(1, 2), (3, 4)], [])


def request(number: int, length: int) -> Request:
    return Request(number, [5] * length, SamplingParams())


each_family = pytest.mark.parametrize(
    "family", [f for f in FAMILIES if f.name not in ASKING], ids=lambda family: family.name
)


@each_family
def test_a_step_waits_for_nothing_and_mixes_nothing(family: Family, kernels: dict[str, Kernel]) -> None:
    runner = runner_of(family)
    planned = step(
        runner, (request(0, 40), 39, 40, True), (request(1, 100), 20, 37, False), (request(2, 9), 0, 9, True)
    )
    with OneDevice() as watch:
        logits = runner.execute(planned)
    assert logits.device == META
    assert logits.shape == (2, VOCABULARY)
    assert watch.copies == 2, "block copies, and everything else in one"
    owners = sum(layer.source is None for layer in runner.layers)
    assert kernels["write_kernel"].launches == owners
    assert kernels["attend_kernel"].launches == len(runner.layers)


@pytest.mark.parametrize("name", ["llama", "gemma3", "olmo2", "qwen3"])
def test_a_program_waits_for_nothing_and_ends_with_rows_that_are_read(
    name: str, kernels: dict[str, Kernel]
) -> None:
    runner = runner_of(next(f for f in FAMILIES if f.name == name), fused=True)
    planned = step(
        runner, (request(0, 40), 39, 40, True), (request(1, 100), 20, 37, False), (request(2, 9), 0, 9, True)
    )
    with OneDevice() as watch:
        logits = runner.execute(planned)
    assert (logits.device, logits.shape) == (META, (2, VOCABULARY))
    assert runner.hidden.shape[0] == 27
    assert watch.copies == 2, "block copies, and everything else in one"
    before = [27] * (len(runner.layers) - 1)
    assert kernels["rotate_and_write_kernel"].rows == [*before, 27]
    for kernel in ("attend_kernel", "gated_kernel"):
        assert kernels[kernel].rows == [*before, 2]
    assert kernels["rms_norm_kernel"].rows[-1] == 2
    runner.execute(planned, whole=True)
    assert kernels["attend_kernel"].rows[-1] == kernels["rms_norm_kernel"].rows[-1] == 27


def test_tokens_that_are_pending_are_not_waited_for(kernels: dict[str, Kernel]) -> None:
    runner = runner_of(FAMILIES[0])
    planned = step(runner, (request(0, 40), 39, 40, True), (request(1, 41), 40, 42, True))
    planned.scheduled[1].pending = True
    pending = PendingTokens(torch.empty(3, dtype=torch.int64, device=META), {1: 2})
    with OneDevice() as watch:
        assert runner.execute(planned, pending).shape == (2, VOCABULARY)
    assert watch.copies == 3, "where the tokens are, and where they go"


def test_tokens_are_drawn_without_waiting(kernels: dict[str, Kernel]) -> None:
    runner = runner_of(FAMILIES[0])
    logits = runner.execute(step(runner, (request(0, 40), 39, 40, True), (request(1, 9), 0, 9, True)))
    kinds = [SamplingParams(), SamplingParams(temperature=0.7, top_k=5, top_p=0.8, min_p=0.01)]
    rows = [SamplingRow(kind, row, 0, 40) for row, kind in enumerate(kinds)]
    with OneDevice() as watch:
        assert draw(logits, rows, runner.transfer).tokens.shape == (2,)
        assert draw(logits, rows * 2, runner.transfer, [0, 1, 1, 1]).tokens.shape == (4,)
    assert watch.copies <= 4, "which logits are whose, and settings of those that are random"
    operations = (
        AllowedTokens([1, 2, 3]),
        BadWords([(1,), (2, 3)]),
        MinTokens(5, torch.tensor([2])),
        LogitBias({3: 1.0}),
        Penalties(1.1, 0.2, 0.3),
    )
    history = TokenHistory([1, 2], [2])
    edited = [SamplingRow(kind, row, 0, 40, operations, history) for row, kind in enumerate(kinds)]
    with OneDevice() as watch:
        assert draw(logits, edited, runner.transfer).tokens.shape == (2,)
    assert watch.copies <= 5, "which logits are whose, what is done to them, settings"


def test_a_graph_finds_its_numbers_where_they_were(kernels: dict[str, Kernel]) -> None:
    arrays = [np.arange(3), np.ones((2, 5), np.int32)]
    there = torch.empty(size(arrays) + 256, dtype=torch.uint8, device=META)
    with OneDevice():
        first, second = Transfer(DEVICE)(arrays, there)
    assert (first.dtype, second.shape) == (torch.int64, (2, 5))
    assert second.storage_offset() * 4 == 256
    assert first.untyped_storage()._cdata == there.untyped_storage()._cdata
