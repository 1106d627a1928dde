"""The Triton backend of attention: `backend.py` is called by the engine, `*_kernel.py` run on the device.

Beside it `layers.py` has the kernels between attention and matrix products.

Importing it loads triton. Under TRITON_INTERPRET=1 the same kernels run on the processor, slowly, as tests.

**Cache.** A page holds one block of one layer, its parts one after the other, scales first:

```
int8, fp8:  key_scale   float32 [num_kv_heads, block_size]
            value_scale float32 [num_kv_heads, block_size]
            key         kv_dtype [num_kv_heads, block_size, head_size]
            value       kv_dtype [num_kv_heads, block_size, v_head_size]
```

A program reads one KV head: its keys, values and scales of a block are three runs of neighbouring bytes
(4 KiB of keys with 16 positions of 128 in 16 bits). Heads are not padded, so that nothing is read in vain.

**Rows.** A tile is `tokens` rows of one sequence times `heads` query heads of one KV head, packed, so that a
key is read once for all of them: 4 heads a KV head make 4 rows of one decoding token.

```
tile row    0      1      2      3      4      5  ...
token       t      t      t      t      t+1    t+1
head        4g     4g+1   4g+2   4g+3   4g     4g+1
```

Prompts, chunks and single tokens are one launch: sequence s owns the tiles from
`query_start_loc[s] // tokens + s`, which a program searches for its own; tiles beyond a sequence's rows end
at once. A group larger than the tile is cut into chunks.

**Keys** are walked in tiles of `keys` positions from a multiple of `keys`, those before the window's first
and after the tile's last row left out. Without a window the tiles that all rows see come first, and are read
and added up without masks, which took a third of all instructions. Where a block holds whole tiles one entry
of the block table is read for each, else one for each key. Vectors are cut into two powers of two (192 = 128
+ 64, 80 = 64 + 32 with a padding of 16), each a product of its own. Positions that no row of the tile sees
are never read. A position that one row of the tile sees and another does not is multiplied by 0 for the
other; so a stored NaN, which marks what overflowed, reaches rows of the same sequence before it, if they
share its step, and no other sequence.

**Sums.** The softmax is in base 2 and online: largest score, weight and sum of a row stay in float32
registers. Products of float32 are exact to float32 (`input_precision="ieee"`); in 16 bits the operands are
rounded, probabilities too. int8 and fp8 (e4m3) keys enter the product as they are stored and their scales
multiply scores; scales of values multiply probabilities, 16 rows of them in decoding and not a whole tile of
values, except in float16, where such a product may be too small. A sink joins the weight at the end. Before
8.9 a chip does not know e4m3: there its bytes become float16 by shifts, to the same numbers.

**Splits.** With fewer programs than the device runs at a time each tile's keys are divided further
(`tiles.choose_splits` has the formula); a second kernel adds the parts up. With `fixed_split` parts end at
multiples of it and tiles have one size, so that how a row is summed depends on its position alone.

**Shared keys.** Where sequences with one row each begin with the same blocks, and it saves time
(`shared_prefix.SharingCost` has the formula, `AttentionMetadata.shared` says which they are), a launch before
attends to these blocks alone: a group takes the place of a sequence, its members' rows fill tiles of 64 rows,
and all of them see all its keys, which are read by way of the first member's table.

```
group       0                       1
tile row    0..3  4..7  8..11 ...   0..3  4..7        4 heads a KV head
member      m0    m1    m2          m0    m1          sequences of the step, in the order of `members`
```

It leaves float32 sums, largest scores and weights of each sequence, in splits. The launch over all rows then
reads a member's own keys from there on, and adds those sums before it divides: no further launch merges them.
Layers with a window read all their keys, as do backends with `fixed_split`, whose bits must not depend on who
else is in the step.

**Sizes** of tiles and pipelines are in `tiles.TILE_LIMITS`; `make kernels-aot` prints what they take.
"""

from batchgen_kernels.triton_kernels.backend import TritonBackend

__all__ = ["TritonBackend"]
