"""Device code that draws tokens; `sampling.py` launches it and says what is drawn.

A row is one program's, which reads it block by block: once for its likeliest token, once to draw, and where
the row is cut by top-k or top-p a few times more to find the border. Nothing is sorted. Weights are
exp(x / temperature - largest), at most 1; borders are thresholds on their bits, which for numbers that are
not negative have the order of the numbers.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _mix(x):
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB
    return x ^ (x >> 31)


@triton.jit
def _uniform(numbers_ptr):
    """What `sampling.noise.uniform` gives for seed, row, sample and position at `numbers_ptr`, to the bit."""
    state = tl.full([], 0, tl.uint64)
    for i in range(4):
        state = _mix(state + 0x9E3779B97F4A7C15 + tl.load(numbers_ptr + i).to(tl.uint64))
    state = _mix(state + 0x9E3779B97F4A7C15)
    return (state >> 11).to(tl.float64) * 1.1102230246251565e-16


@triton.jit
def _likeliest(row_ptr, vocab, BLOCK: tl.constexpr, STAGES: tl.constexpr, BARRED: tl.constexpr):
    """The largest logit, the first token that has it, and how many are not finite as they should be."""
    column = tl.arange(0, BLOCK)
    best = tl.full([BLOCK], float("-inf"), tl.float32)
    place = tl.zeros([BLOCK], tl.int32)
    sick = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, vocab, BLOCK, num_stages=STAGES):
        inside = start + column < vocab
        x = tl.load(row_ptr + start + column, mask=inside, other=float("-inf")).to(tl.float32)
        size = x if BARRED else tl.abs(x)
        sick += tl.where(inside & ~(size < float("inf")), 1, 0)
        better = x > best
        best = tl.where(better, x, best)
        place = tl.where(better, start + column, place)
    largest = tl.max(best, 0)
    return largest, tl.min(tl.where(best == largest, place, vocab), 0), tl.sum(sick, 0)


@triton.jit
def _weights(row_ptr, start, vocab, temperature, largest, BLOCK: tl.constexpr):
    column = start + tl.arange(0, BLOCK)
    x = tl.load(row_ptr + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
    return tl.exp(tl.div_rn(x, temperature) - largest)


@triton.jit
def _total(row_ptr, vocab, temperature, largest, low, BLOCK: tl.constexpr, STAGES: tl.constexpr):
    """The sum of weights whose bits are not below `low`, and how many there are."""
    sums = tl.zeros([BLOCK], tl.float64)
    counts = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, vocab, BLOCK, num_stages=STAGES):
        weight = _weights(row_ptr, start, vocab, temperature, largest, BLOCK)
        kept = weight.to(tl.int32, bitcast=True) >= low
        sums += tl.where(kept, weight, 0.0).to(tl.float64)
        counts += kept.to(tl.int32)
    return tl.sum(sums, 0), tl.sum(counts, 0)


@triton.jit
def _border(
    row_ptr,
    vocab,
    temperature,
    largest,
    low,
    low_sum,
    low_count,
    wanted,
    MASS: tl.constexpr,
    PIVOTS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The highest threshold whose weights, those not below it, still sum up (MASS) or count to `wanted`.

    Those of `low` do. Each reading of the row cuts the interval in PIVOTS + 1, until one weight is left in it
    or all that are left are equal. Returns its ends, the sum and the count of weights from each end on.
    """
    high = tl.full([], 0x3F800001, tl.int32)
    high_sum = tl.full([], 0.0, tl.float64)
    high_count = tl.full([], 0, tl.int32)
    while (high - low > 1) & (low_count - high_count > 1):
        part = tl.arange(0, PIVOTS) + 1
        pivot = low + ((high - low).to(tl.int64) * part // (PIVOTS + 1)).to(tl.int32)
        sums = tl.zeros([PIVOTS, BLOCK], tl.float64)
        counts = tl.zeros([PIVOTS, BLOCK], tl.int32)
        for start in tl.range(0, vocab, BLOCK, num_stages=STAGES):
            weight = _weights(row_ptr, start, vocab, temperature, largest, BLOCK)
            kept = weight.to(tl.int32, bitcast=True)[None, :] >= pivot[:, None]
            if MASS:
                sums += tl.where(kept, weight.to(tl.float64)[None, :], 0.0)
            counts += kept.to(tl.int32)
        count = tl.sum(counts, 1)
        if MASS:
            mass = tl.sum(sums, 1)
            reached = mass >= wanted
            low_sum = tl.min(tl.where(reached, mass, low_sum), 0)
            high_sum = tl.max(tl.where(reached, high_sum, mass), 0)
        else:
            reached = count >= wanted
        low = tl.max(tl.where(reached, pivot, low), 0)
        high = tl.min(tl.where(reached, high, pivot), 0)
        low_count = tl.min(tl.where(reached, count, low_count), 0)
        high_count = tl.max(tl.where(reached, high_count, count), 0)
    return low, high, low_sum, high_sum, low_count, high_count


@triton.jit
def _draw(
    row_ptr,
    vocab,
    temperature,
    largest,
    low,
    high,
    ties,
    noise,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The token at which the mass of the kept first exceeds `noise` times their total.

    Kept are weights with bits from `high` on, and the first `ties` of those from `low` on, which are equal.
    First the block is found, then the token in it.
    """
    index = tl.arange(0, BLOCKS)
    above = tl.zeros([BLOCKS], tl.float64)
    equal = tl.zeros([BLOCKS], tl.int32)
    block = tl.full([], 0, tl.int32)
    for start in tl.range(0, vocab, BLOCK, num_stages=STAGES):
        weight = _weights(row_ptr, start, vocab, temperature, largest, BLOCK)
        bits = weight.to(tl.int32, bitcast=True)
        mass = tl.sum(tl.where(bits >= high, weight, 0.0).to(tl.float64), 0)
        count = tl.sum(((bits >= low) & (bits < high)).to(tl.int32), 0)
        above = tl.where(index == block, mass, above)
        equal = tl.where(index == block, count, equal)
        block += 1
    before = tl.cumsum(equal, 0) - equal
    tie = low.to(tl.float32, bitcast=True).to(tl.float64)
    masses = above + tl.minimum(tl.maximum(ties - before, 0), equal).to(tl.float64) * tie
    cumulated = tl.cumsum(masses, 0)
    target = noise * tl.max(cumulated, 0)
    block = tl.min(tl.where(cumulated > target, index, BLOCKS), 0)
    # Where rounding lets no sum exceed the target, the last token is drawn that may be.
    block = tl.where(block < BLOCKS, block, tl.max(tl.where(masses > 0, index, 0), 0))
    mass_before = tl.sum(tl.where(index < block, masses, 0.0), 0)
    ties = ties - tl.sum(tl.where(index == block, before, 0), 0)

    column = block * BLOCK + tl.arange(0, BLOCK)
    weight = _weights(row_ptr, block * BLOCK, vocab, temperature, largest, BLOCK)
    bits = weight.to(tl.int32, bitcast=True)
    is_tie = (bits >= low) & (bits < high)
    kept = (bits >= high) | (is_tie & (tl.cumsum(is_tie.to(tl.int32), 0) <= ties))
    mass = tl.cumsum(tl.where(kept, weight, 0.0).to(tl.float64), 0) + mass_before
    token = tl.min(tl.where(kept & (mass > target), column, vocab), 0)
    return tl.where(token < vocab, token, tl.max(tl.where(kept, column, 0), 0))


@triton.jit
def draw_kernel(
    tokens_ptr,
    logits_ptr,
    source_ptr,
    numbers_ptr,
    floats_ptr,
    vocab,
    row_stride,
    PIVOTS: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,
    BARRED: tl.constexpr,
):
    """One token. Grid: (tokens,). See `sampling.draw` for what is at the pointers."""
    row = tl.program_id(0)
    row_ptr = logits_ptr + tl.load(source_ptr + row) * row_stride
    numbers_ptr += row * 5
    temperature = tl.load(floats_ptr + row * 3).to(tl.float32)
    min_p = tl.load(floats_ptr + row * 3 + 1).to(tl.float32)
    top_p = tl.load(floats_ptr + row * 3 + 2)
    top_k = tl.load(numbers_ptr + 4)
    largest, token, sick = _likeliest(row_ptr, vocab, BLOCK, STAGES, BARRED)
    if sick > 0:
        token = -1
    elif largest == float("-inf"):
        token = -2
    elif temperature > 0:
        largest = tl.div_rn(largest, temperature)
        # The bits of the least weight that is kept; 1 is the smallest number above 0.
        low = tl.maximum(min_p.to(tl.int32, bitcast=True), 1)
        high = low
        ties = tl.full([], 0, tl.int32)
        cut_k = (top_k > 0) & (top_k < vocab)
        if cut_k | (top_p < 1):
            total, count = _total(row_ptr, vocab, temperature, largest, low, BLOCK, STAGES)
            if cut_k & (count > top_k):
                low, _, _, _, _, _ = _border(
                    row_ptr,
                    vocab,
                    temperature,
                    largest,
                    low,
                    total,
                    count,
                    top_k,
                    False,
                    PIVOTS,
                    BLOCK,
                    STAGES,
                )
                if top_p < 1:
                    total, count = _total(row_ptr, vocab, temperature, largest, low, BLOCK, STAGES)
            high = low
            if top_p < 1:
                wanted = tl.maximum(top_p * total, 1e-300)
                low, high, total, above, count, count_above = _border(
                    row_ptr,
                    vocab,
                    temperature,
                    largest,
                    low,
                    total,
                    count,
                    wanted,
                    True,
                    PIVOTS,
                    BLOCK,
                    STAGES,
                )
                # Of equal weights at the border the first are kept that bring the sum to what is wanted.
                tie = low.to(tl.float32, bitcast=True).to(tl.float64)
                there = (count - count_above).to(tl.float64)
                ties = tl.minimum(tl.maximum(tl.ceil((wanted - above) / tie), 1.0), there).to(tl.int32)
                if ties == count - count_above:
                    high = low
        noise = _uniform(numbers_ptr)
        token = _draw(
            row_ptr,
            vocab,
            temperature,
            largest,
            low,
            high,
            ties,
            noise,
            BLOCKS,
            BLOCK,
            STAGES,
        )
    tl.store(tokens_ptr + row, token.to(tl.int64))
