"""Attention in plain torch, one sequence at a time: the truth that the other backends are tested against.

Also what runs where no faster backend does. Cache layout: key [num_blocks, block_size, num_kv_heads,
head_size], value the same with v_head_size; scales of int8 and fp8 [num_blocks, block_size, num_kv_heads].
Blocks are a stride apart.
"""

from __future__ import annotations

import torch

from batchgen_kernels import backend as common
from batchgen_kernels.backend import KVCache, PagedBackend, Shapes
from batchgen_kernels.metadata import AttentionMetadata
from batchgen_kernels.spec import AttentionSpec
from batchgen_kernels.storage import dequantize, quantize, stored


class ReferenceBackend(PagedBackend):
    """See `AttentionBackend`. Computes in float32, or in float64 if the cache is float64."""

    name = "reference"

    def shapes(self, spec: AttentionSpec, block_size: int) -> Shapes:
        vectors = (block_size, spec.num_kv_heads)
        return vectors, (*vectors, spec.head_size), (*vectors, spec.v_head_size)

    def write(self, kv: KVCache, key: torch.Tensor, value: torch.Tensor, meta: AttentionMetadata) -> None:
        meta.check(kv.num_blocks)
        rows = (meta.slot_mapping >= 0).nonzero().squeeze(1)
        slots = meta.slot_mapping[rows]
        place = (slots // kv.block_size, slots % kv.block_size)
        for vectors, target, scales in ((key, kv.key, kv.key_scale), (value, kv.value, kv.value_scale)):
            if scales is None:
                target[place] = stored(vectors[rows], target.dtype)
            else:
                target[place], scales[place] = quantize(vectors[rows], target.dtype)

    def attend(
        self,
        query: torch.Tensor,
        kv: KVCache,
        meta: AttentionMetadata,
        spec: AttentionSpec,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        common.check_sinks(spec, sinks)
        meta.check(kv.num_blocks)
        out = query.new_zeros(query.shape[0], spec.num_heads, spec.v_head_size)
        starts = meta.query_start_loc.tolist()
        for s, seq_len in enumerate(meta.seq_lens.tolist()):
            rows = slice(starts[s], starts[s + 1])
            if rows.start < rows.stop:
                keys, values = _gather(kv, meta.block_table[s], seq_len)
                out[rows] = _attend_sequence(query[rows], keys, values, spec, sinks).to(out.dtype)
        return out


def _gather(kv: KVCache, table: torch.Tensor, seq_len: int) -> tuple[torch.Tensor, torch.Tensor]:
    blocks = table[: -(-seq_len // kv.block_size)].long()
    key, value, *scales = (tensor[blocks].flatten(0, 1)[:seq_len] for tensor in kv.tensors)
    if scales:
        key, value = dequantize(key, scales[0]), dequantize(value, scales[1])
    return key, value


def _attend_sequence(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    spec: AttentionSpec,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Query [n, heads, d] is the last n of the positions of key [m, kv_heads, d]."""
    compute = torch.promote_types(key.dtype, torch.float32)
    visible = _visible(query.shape[0], key.shape[0], spec.sliding_window, query.device)
    # Nothing that no row may see is multiplied at all: the null block and freed memory may hold NaN.
    used = visible.any(0)
    visible = visible[:, used]
    q, k, v = (x.to(compute) for x in (query, key[used], value[used]))
    k, v = (x.repeat_interleave(spec.group_size, dim=1) for x in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q, k) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        column = sinks.to(compute).view(-1, 1, 1).expand(-1, query.shape[0], 1)
        probabilities = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
    else:
        probabilities = scores.softmax(-1)
    return torch.einsum("hnm,mhd->nhd", probabilities, v)


def _visible(num_queries: int, num_keys: int, window: int | None, device: torch.device) -> torch.Tensor:
    """Bool [num_queries, num_keys]: causal, the last query on the last key, at most `window` keys back."""
    position = torch.arange(num_keys - num_queries, num_keys, device=device).unsqueeze(1)
    distance = position - torch.arange(num_keys, device=device)
    visible = distance >= 0
    return visible if window is None else visible & (distance < window)
