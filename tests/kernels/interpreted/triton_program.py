"""The layers of decoders as one program for devices, interpreted, against transformers' own layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from families import FAMILIES, Family
from triton_cases import CPU, quiet

from batchgen.models.attention import ATTENTION_NAME, register_attention
from batchgen.models.device_decoder import read_device_decoder
from batchgen.models.fused import FusedDecoder
from batchgen.models.layer_attention import LayerAttention
from batchgen.models.probe import probe_model
from batchgen_kernels import AttentionMetadata
from batchgen_kernels.backend import allocate
from batchgen_kernels.metadata import NeededRows, RowsApart, rows_apart
from batchgen_kernels.program import DecoderLayer
from batchgen_kernels.triton_kernels import TritonBackend
from batchgen_kernels.triton_kernels.program import DeviceWeights, TritonProgram

FUSED = (
    *("llama", "mistral", "qwen2", "qwen3", "smollm3"),
    *("phi3", "phi3-partial", "gemma2", "gemma3", "olmo2", "granite"),
)
IDS = [[(7 + 31 * i + 13 * t) % 250 for t in range(length)] for i, length in enumerate((29, 6))]
TABLES = [[3, 1], [2]]
STEPS = [(23, 4), (5, 1), (1, 1)]
"""Rows of each sequence: a prompt longer than the window, a chunk beside a token, tokens alone."""
FEW_STEPS = [(7, 2), (1, 1)]
HALVES = ("qwen2", "qwen3", "gemma2", "olmo2", "granite")
BLOCK = 16


def family(name: str) -> Family:
    return next(f for f in FAMILIES if f.name == name)


class Fused:
    """A model with its layers read for a device, and caches of all layers in one group each."""

    def __init__(self, model: Any, max_rows: int = 0, fixed_split: int | None = None) -> None:
        self.body = model.get_decoder()
        self.probed: list[LayerAttention] = probe_model(model)
        model.set_attn_implementation("eager")
        found = read_device_decoder(self.body)
        assert isinstance(found, FusedDecoder), found
        self.preparation, self.weights = found.preparation, found.weights
        self.max_rows = max_rows
        self.fixed_split = fixed_split

    def program(self, weights: DeviceWeights | None = None) -> TritonProgram:
        weights, backend = weights or self.weights, TritonBackend(fixed_split=self.fixed_split)
        layers = [
            DecoderLayer(one.spec, allocate(backend, one.spec, 4, BLOCK, CPU, self.body.dtype), 0, one.sinks)
            for one in self.probed
        ]
        return weights.program(layers, backend, self.max_rows)

    @torch.inference_mode()
    def run(
        self,
        steps: list[tuple[int, int]] = STEPS,
        weights: DeviceWeights | None = None,
        read: Sequence[int] | None = None,
    ) -> list[torch.Tensor]:
        """Hidden states of the sequences, computed in so many rows at a time; of all of them, or of the rows
        of the last step that are read."""
        program, done, states = self.program(weights), [0, 0], [[], []]  # type: ignore[var-annotated]
        for counts in steps:
            spans = [range(n, n + c) for n, c in zip(done, counts, strict=True)]
            ids = torch.tensor([[IDS[s][t] for s, span in enumerate(spans) for t in span] + [0]])
            positions = torch.tensor([[t for span in spans for t in span] + [0]])
            done = [span.stop for span in spans]
            meta = AttentionMetadata.build(counts, done, TABLES, BLOCK, num_rows=sum(counts) + 1)
            embedded = self.body.embed_tokens(ids) * self.preparation.multiplier
            tables = self.preparation.tables(self.body.rotary_emb, embedded, positions)
            needed = read_rows(read, meta) if read is not None and counts == steps[-1] else None
            with quiet():
                hidden = program.run(embedded[0], tables, [meta], needed)
            assert hidden.dtype == self.body.dtype
            for s, rows in enumerate(hidden[: sum(counts)].split(counts)):
                states[s].append(rows)
        return [torch.cat(rows) for rows in states]


def read_rows(rows: Sequence[int], meta: AttentionMetadata) -> NeededRows:
    needed = np.array(rows, dtype=np.int64)
    apart = rows_apart(needed, meta.query_start_loc.numpy(), meta.seq_lens.numpy())
    longest = int(np.diff(apart[2]).max(initial=0))
    return NeededRows(needed, RowsApart(*map(torch.from_numpy, apart), longest))


def build(name: str, dtype: torch.dtype) -> Any:
    register_attention()
    return family(name).build(ATTENTION_NAME).to(dtype)


@torch.inference_mode()
def theirs(body: Any) -> list[torch.Tensor]:
    return [body(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0] for ids in IDS]


def error(got: list[torch.Tensor], want: list[torch.Tensor]) -> float:
    """Root mean square of the difference over that of the truth."""
    difference = torch.cat([a.float() - b for a, b in zip(got, want, strict=True)])
    return float(difference.square().mean().sqrt() / torch.cat(want).square().mean().sqrt())


@pytest.mark.parametrize("name", FUSED)
def test_in_float32_it_is_transformers(name: str) -> None:
    fused = Fused(build(name, torch.float32), max_rows=28)
    got, want = fused.run(), theirs(fused.body)
    assert error(got, want) < 1e-5


PIECES = [(15, 2), (8, 4)]
READ = {"the last of each": [7, 11], "some": [1, 2, 5, 8, 9, 11], "of one": [10], "none": []}


def last_rows(fused: Fused, read: Sequence[int] | None = None) -> torch.Tensor:
    """Hidden states of the rows of the last of two steps."""
    states = fused.run(PIECES, read=read)
    return torch.cat([rows[-count:] for rows, count in zip(states, PIECES[-1], strict=True)])


@pytest.mark.parametrize(("name", "split"), [("llama", None), ("gemma3", 64), ("olmo2", None), ("qwen3", 64)])
def test_of_the_last_layer_only_rows_that_are_read_are_computed(name: str, split: int | None) -> None:
    """Norms before products, around and behind them, of heads; windows; the same bits where that is asked."""
    fused = Fused(build(name, torch.float32), max_rows=28, fixed_split=split)
    whole, limit = last_rows(fused), 0 if split else 1e-5
    for rows in READ.values():
        got = last_rows(fused, rows)
        torch.testing.assert_close(got[rows], whole[rows], rtol=limit, atol=limit)
        assert got[np.setdiff1d(np.arange(12), rows)].isnan().all()


WRONG_ROWS = {
    "the sequence before": lambda rows, seq, starts, lens: (rows, seq * 0, starts, lens),
    "a key more": lambda rows, seq, starts, lens: (rows, seq, starts, lens + 1),
    "the row before": lambda rows, seq, starts, lens: (rows - 1, seq, starts, lens),
}


@pytest.mark.parametrize("name", WRONG_ROWS)
def test_a_wrong_row_is_noticed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fused, rows, right = Fused(build("llama", torch.float32)), READ["some"], rows_apart
    whole = last_rows(fused)
    monkeypatch.setitem(globals(), "rows_apart", lambda *args: WRONG_ROWS[name](*right(*args)))
    assert not torch.allclose(last_rows(fused, rows)[rows], whole[rows], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", HALVES)
def test_in_float16_it_rounds_no_more_than_transformers(name: str) -> None:
    fused, truth = Fused(build(name, torch.float16)), Fused(build(name, torch.float32))
    want = theirs(truth.body)
    assert error(fused.run(), want) < 1.5 * error(theirs(fused.body), want)


@pytest.mark.parametrize("name", ["qwen2", "granite"])
def test_bits_do_not_depend_on_company_or_chunks_where_splits_are_fixed(name: str) -> None:
    fused = Fused(build(name, torch.float32), fixed_split=64)
    whole = fused.run([(29, 6)])
    assert error(whole, theirs(fused.body)) < 1e-5
    assert all(torch.equal(a, b) for a, b in zip(fused.run(), whole, strict=True))


def test_the_model_keeps_its_weights_in_the_memory_of_the_joined_ones() -> None:
    model = build("qwen2", torch.float32)
    before = {name: p.clone() for name, p in model.named_parameters()}
    fused = Fused(model)
    joined = {tensor.untyped_storage().data_ptr() for tensor in fused.weights.tensors()}
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]), name
        if ".layers." in name:
            assert p.untyped_storage().data_ptr() in joined, name


MISTAKES: dict[str, tuple[str, Any]] = {
    "no positions": ("llama", lambda layer: replace(layer, rope=None)),
    "the other table": ("gemma3", lambda layer: replace(layer, rope=1 - layer.rope)),
    "positions where there are none": ("smollm3", lambda layer: replace(layer, rope=0)),
    "no norm of heads": ("qwen3", lambda layer: replace(layer, query_norm=None, key_norm=None)),
    "no bias": ("qwen2", lambda layer: replace(layer, qkv=replace(layer.qkv, bias=None))),
    "norms from 0": (
        "gemma2",
        lambda layer: replace(layer, mlp_norm=replace(layer.mlp_norm, unit_offset=False)),
    ),
    "no norm behind": ("olmo2", lambda layer: replace(layer, down_norm=None)),
    "no multiplier": ("granite", lambda layer: replace(layer, multiplier=1.0)),
    "another activation": ("phi3", lambda layer: replace(layer, activation="gelu_tanh")),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_noticed(name: str) -> None:
    model, change = MISTAKES[name]
    fused = Fused(build(model, torch.float32))
    wrong = replace(fused.weights, layers=[change(layer) for layer in fused.weights.layers])
    got = fused.run(FEW_STEPS, wrong)
    assert (
        error(got, [states[: len(rows)] for states, rows in zip(theirs(fused.body), got, strict=True)]) > 1e-2
    )
