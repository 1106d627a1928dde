"""The program of a decoder's layers, and its captured steps, on a device whose numbers nobody may ask for."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from families import FAMILIES
from test_device_path import DEVICE, META, VOCABULARY, Kernel, OneDevice, kernels, request, runner_of, step

from batchgen.engine.capture import Launch
from batchgen.models.device_decoder import read_device_decoder
from batchgen.models.fused import FusedDecoder, Fusion
from batchgen_kernels.triton_kernels import layers as layer_launches

__all__ = ["kernels"]
FUSED = ("llama", "qwen2", "qwen3", "gemma3", "olmo2", "granite", "phi3", "smollm3")


def without_numbers(value: Any) -> Any:
    """The same weights on the device."""
    if isinstance(value, torch.Tensor):
        return value.to(META)
    if isinstance(value, list):
        return [without_numbers(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return dataclasses.replace(value, **{name: without_numbers(getattr(value, name)) for name in names})
    return value


def captured(run: Launch) -> Launch:
    run()
    return run


@pytest.mark.parametrize("name", FUSED)
def test_a_program_waits_for_nothing_and_mixes_nothing(
    name: str, kernels: dict[str, Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    for kernel in ("rms_norm_kernel", "gated_kernel", "rotate_and_write_kernel"):
        kernels[kernel] = Kernel()
        monkeypatch.setattr(layer_launches, kernel, kernels[kernel])
    family = next(f for f in FAMILIES if f.name == name)
    found = read_device_decoder(family.build().to(torch.bfloat16).get_decoder())
    assert isinstance(found, FusedDecoder)
    runner = runner_of(family)
    runner.device = dataclasses.replace(DEVICE, capture=lambda: captured)
    weights = without_numbers(found.weights)
    model: Any = runner.parts._model  # type: ignore[union-attr]
    Fusion(model, model.get_decoder(), FusedDecoder(weights, found.preparation))
    runner.program = runner._program(weights, 8)
    planned = step(runner, (request(0, 40), 39, 40, True), (request(1, 100), 20, 37, False))
    with OneDevice() as watch:
        logits = runner.execute(planned)
    assert (logits.device, logits.shape) == (META, (1, VOCABULARY))
    assert watch.copies == 2, "block copies, and everything else in one"
    count = len(runner.layers)
    assert kernels["rotate_and_write_kernel"].launches == count
    assert kernels["attend_kernel"].launches == kernels["gated_kernel"].launches == count
    assert kernels["write_kernel"].launches == 0
    runner.capture([4, 2], 160)
    with OneDevice() as watch:
        logits = runner.execute(
            step(runner, *((request(i, 20 * i), 20 * i - 1, 20 * i, True) for i in (1, 2, 3)))
        )
    assert (logits.device, logits.shape, logits.dtype) == (META, (3, VOCABULARY), torch.float32)
    assert watch.copies == 3, "block copies, block tables, and everything else in one"
