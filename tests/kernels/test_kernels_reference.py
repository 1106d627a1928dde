"""The reference backend against attention written a second time, with a dense mask and no cache."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from batchgen_kernels import AttentionMetadata, AttentionSpec
from batchgen_kernels.backend import allocate
from batchgen_kernels.metadata import write_tables
from batchgen_kernels.reference import ReferenceBackend

CPU = torch.device("cpu")


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, spec: AttentionSpec, sinks: torch.Tensor | None):
    """Explicit loops over queries and heads; q [n, h, d] are the last n positions of k [m, kv, d]."""
    n, m = len(q), len(k)
    out = torch.zeros(n, spec.num_heads, spec.v_head_size, dtype=torch.float64)
    for i in range(n):
        last = m - n + i
        first = 0 if spec.sliding_window is None else max(0, last - spec.sliding_window + 1)
        for h in range(spec.num_heads):
            kv = h // spec.group_size
            s = (k[first : last + 1, kv].double() @ q[i, h].double()) * spec.scale
            if spec.softcap is not None:
                s = spec.softcap * torch.tanh(s / spec.softcap)
            weights = s.exp()
            total = weights.sum() + (0 if sinks is None else sinks[h].double().exp())
            out[i, h] = (weights / total) @ v[first : last + 1, kv].double()
    return out.float()


@pytest.mark.parametrize("window", [None, 1, 7, 16, 100])
@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_reference_equals_dense(window: int | None, softcap: float | None, with_sinks: bool) -> None:
    torch.manual_seed(0)
    spec = AttentionSpec(
        num_heads=6,
        num_kv_heads=2,
        head_size=24,
        v_head_size=10,
        scale=0.3,
        sliding_window=window,
        softcap=softcap,
        has_sinks=with_sinks,
    )
    sinks = torch.randn(6) if with_sinks else None
    backend = ReferenceBackend()
    kv = allocate(backend, spec, 20, 4, CPU, torch.float32)
    histories = [(torch.randn(n, 2, 24), torch.randn(n, 2, 10)) for n in (1, 17, 30)]
    tables = [[3], [9, 1, 8, 2, 12], [4, 5, 6, 7, 10, 11, 13, 19]]
    seq_lens = [1, 17, 30]
    prefill = AttentionMetadata.build(seq_lens, seq_lens, tables, 4, num_rows=50)
    backend.write(kv, *(_pack([h[i] for h in histories], 50) for i in (0, 1)), prefill)
    query_lens = [1, 5, 30]
    queries = [torch.randn(n, 6, 24) for n in query_lens]
    meta = AttentionMetadata.build(query_lens, seq_lens, tables, 4, num_rows=40)
    got = backend.attend(_pack(queries, 40), kv, meta, spec, sinks)
    want = torch.cat([dense(q, k, v, spec, sinks) for q, (k, v) in zip(queries, histories, strict=True)])
    torch.testing.assert_close(got[:36], want, rtol=1e-5, atol=1e-5)
    assert not got[36:].any()


def _pack(parts: list[torch.Tensor], rows: int) -> torch.Tensor:
    packed = torch.cat(parts)
    return (
        torch.cat([packed, torch.full((rows - len(packed), *packed.shape[1:]), 7.0)])
        if rows > len(packed)
        else packed
    )


@given(st.lists(st.lists(st.integers(0, 2**31 - 1), max_size=9), max_size=6), st.data())
def test_block_tables_are_written_as_they_are(tables: list[list[int]], data: st.DataObject) -> None:
    counts = [data.draw(st.integers(0, len(ids))) for ids in tables]
    got = np.full((len(tables) + 1, max(counts, default=0) + 1), -1, dtype=np.int32)
    want = got.copy()
    for row, ids, count in zip(want, tables, counts, strict=False):
        row[:count] = ids[:count]
    given_ids = [array("i", ids) if i % 2 else ids for i, ids in enumerate(tables)]
    write_tables(got, given_ids, counts)
    assert (got == want).all()
