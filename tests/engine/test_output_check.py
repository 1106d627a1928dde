"""A model whose output depends on how a batch is packed is refused at load, whatever the cause."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import make_engine
from tiny_models import save_tiny_llama
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaModel

from batchgen.models import substitutes
from batchgen.types import UsageError

DIFFERS = r"in pieces among other rows differs from what transformers computes, by \d"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_tiny_llama(tmp_path)


def test_positions_that_are_not_those_given(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a model that counts positions from the start of what it is given.

    Where the layers are one program it computes the positions' rotation itself, and cannot err so.
    """
    monkeypatch.setattr(substitutes, "read_decoder", lambda body, **how: "they are not to be fused")
    forward = LlamaModel.forward

    def counting(self: Any, input_ids: torch.Tensor, position_ids: torch.Tensor, **rest: Any) -> Any:
        return forward(self, input_ids, position_ids=torch.arange(input_ids.shape[1])[None], **rest)

    monkeypatch.setattr(LlamaModel, "forward", counting)
    with pytest.raises(UsageError, match=DIFFERS):
        make_engine(folder)


def test_tokens_that_see_their_neighbours(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a convolution, or any state, beside attention."""
    forward = LlamaMLP.forward

    def convolved(self: Any, x: torch.Tensor) -> torch.Tensor:
        return forward(self, x + torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1])

    monkeypatch.setattr(LlamaMLP, "forward", convolved)
    with pytest.raises(UsageError, match=DIFFERS):
        make_engine(folder)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rounding_is_no_difference(folder: Path, dtype: str) -> None:
    make_engine(folder, dtype=dtype, deterministic=False)
