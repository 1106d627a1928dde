"""What stands for flash-attn where it is not installed: functions of its documented signatures.

They check what the documentation says of arguments, strictly, and compute in plain torch.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

Window = tuple[int, int]


def _varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> torch.Tensor:
    """FlashAttention 2."""
    assert (dropout_p, alibi_slopes, deterministic, return_attn_probs) == (0.0, None, False, False)
    assert block_table is not None
    assert causal
    _check(q, k, v, pages=256)
    _check_index(block_table, dims=2)
    for starts in (cu_seqlens_q, cu_seqlens_k):
        _check_index(starts, dims=1)
        assert starts.tolist()[0] == 0
    assert cu_seqlens_q.shape == cu_seqlens_k.shape == (len(block_table) + 1,)
    lens = cu_seqlens_k.diff()
    assert type(max_seqlen_q) is type(max_seqlen_k) is int
    assert max_seqlen_q >= int(cu_seqlens_q.diff().max())
    assert int(lens.max()) <= max_seqlen_k <= block_table.shape[1] * k.shape[1]
    return _attend(
        q, k, v, cu_seqlens_q.tolist(), lens.tolist(), block_table, softmax_scale, window_size, softcap
    )


def _kvcache_2(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: None = None,
    v: None = None,
    rotary_cos: None = None,
    rotary_sin: None = None,
    cache_seqlens: torch.Tensor | int | None = None,
    cache_batch_idx: None = None,
    cache_leftpad: None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> torch.Tensor:
    """FlashAttention 2; queries are [batch, rows, heads, width]."""
    assert causal
    assert block_table is not None
    assert isinstance(cache_seqlens, torch.Tensor)
    batch, rows, heads, width = q.shape
    _check(q.flatten(0, 1), k_cache, v_cache, pages=256)
    _check_index(block_table, dims=2)
    _check_index(cache_seqlens, dims=1)
    assert len(cache_seqlens) == len(block_table) == batch
    starts = list(range(0, batch * rows + 1, rows))
    out = _attend(
        q.reshape(-1, heads, width),
        k_cache,
        v_cache,
        starts,
        cache_seqlens.tolist(),
        block_table,
        softmax_scale,
        window_size,
        softcap,
    )
    return out.view(batch, rows, heads, -1)


def _kvcache_3(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: None = None,
    v: None = None,
    qv: None = None,
    rotary_cos: None = None,
    rotary_sin: None = None,
    cache_seqlens: torch.Tensor | int | None = None,
    cache_batch_idx: None = None,
    cache_leftpad: None = None,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: None = None,
    q_descale: None = None,
    k_descale: None = None,
    v_descale: None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> torch.Tensor:
    """FlashAttention 3; with `cu_seqlens_q` queries are [rows of all, heads, width]."""
    assert causal
    assert page_table is not None
    assert cu_seqlens_q is not None
    assert isinstance(cache_seqlens, torch.Tensor)
    _check(q, k_cache, v_cache, pages=1)
    for index, dims in ((page_table, 2), (cache_seqlens, 1), (cu_seqlens_q, 1)):
        _check_index(index, dims)
    assert len(cache_seqlens) == len(page_table) == len(cu_seqlens_q) - 1
    # The varlen form cannot do without it.
    assert type(max_seqlen_q) is int
    assert max_seqlen_q >= int(cu_seqlens_q.diff().max())
    return _attend(
        q,
        k_cache,
        v_cache,
        cu_seqlens_q.tolist(),
        cache_seqlens.tolist(),
        page_table,
        softmax_scale,
        window_size,
        softcap,
    )


FLASH_ATTN = SimpleNamespace(flash_attn_varlen_func=_varlen_func, flash_attn_with_kvcache=_kvcache_2)
FLASH_ATTN_INTERFACE = SimpleNamespace(flash_attn_with_kvcache=_kvcache_3)


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, pages: int) -> None:
    assert q.dtype in (torch.float16, torch.bfloat16)
    assert q.dtype == k.dtype == v.dtype
    assert (q.dim(), k.dim(), v.dim()) == (3, 4, 4)
    assert q.stride(-1) == k.stride(-1) == v.stride(-1) == 1
    assert q.shape[2] == k.shape[3] <= 256
    assert q.shape[2] % 8 == 0
    assert q.shape[1] % k.shape[2] == 0
    assert k.shape[:3] == v.shape[:3]
    assert k.shape[1] % pages == 0
    # Rows and heads are addressed in steps of 16 bytes.
    assert all(stride % 8 == 0 for tensor in (q, k, v) for stride in tensor.stride()[:-1])


def _check_index(tensor: torch.Tensor, dims: int) -> None:
    assert tensor.dtype == torch.int32
    assert tensor.dim() == dims
    assert tensor.stride(-1) == 1


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    starts: list[int],
    lens: list[int],
    table: torch.Tensor,
    scale: float | None,
    window: Window,
    softcap: float,
) -> torch.Tensor:
    """Query i of n sees keys up to i + len - n, and of these the last window[0] + 1."""
    out = q.new_zeros(*q.shape[:2], v.shape[3])
    group = q.shape[1] // k.shape[2]
    for s, length in enumerate(lens):
        rows = range(starts[s], starts[s + 1])
        blocks = table[s, : -(-length // k.shape[1])].long()
        keys, values = (x[blocks].flatten(0, 1)[:length].float() for x in (k, v))
        for row in rows:
            last = row - rows.start + length - len(rows)
            first = 0 if window[0] < 0 else max(0, last - window[0])
            for head in range(q.shape[1]):
                seen = keys[first : last + 1, head // group]
                scores: Any = seen @ q[row, head].float() * (q.shape[2] ** -0.5 if scale is None else scale)
                if softcap:
                    scores = softcap * torch.tanh(scores / softcap)
                out[row, head] = (scores.softmax(0) @ values[first : last + 1, head // group]).to(out.dtype)
    return out
