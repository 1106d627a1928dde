"""Adapters to the flash-attn packages, where they are installed: `backend.py` is called by the engine.

**Cache.** A page holds keys [block_size, num_kv_heads, head_size] and then values of the same shape, as
flash-attn's paged functions read them; pages are a stride apart, elements of a vector are neighbours.

**FlashAttention 2** (`flash_attn`): pages of a multiple of 256 positions. Steps in which every sequence
has one row are `flash_attn_with_kvcache`, which divides keys among processors; all others are
`flash_attn_varlen_func` with a block table.

**FlashAttention 3** (`flash_attn_interface`, for compute capability 9.0): pages of any size; every step is
`flash_attn_with_kvcache` with `cu_seqlens_q`.

Both take the longest run of rows as a number of Python. What is known without waiting for the device is a
bound: each of S sequences has a row, so none has more than T - S + 1 of T. A larger number than need be costs
programs that end at once.

Left out: FlashAttention 4, whose interface still changes from one pre-release to the next; FlashInfer, which
plans a step on the host from lengths that it reads back, for which the engine would have to wait.
"""

from batchgen_kernels.flash_attention.backend import FlashAttention2, FlashAttention3

__all__ = ["FlashAttention2", "FlashAttention3"]
