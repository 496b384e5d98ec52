"""Samples one token per row from its logits, with its log-probability, and updates the row's state in a single kernel.

Sampling inverts the cumulative probabilities: first the block is chosen by the blocks' sums, then the token inside it.
Top-k and top-p are thresholds, found by bisection over the bits of a logit.

Legend: R rows, V vocabulary, S tokens a row may generate, K stop tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flatout.kernels.launch import cdiv, width

BLOCK = 4096
# Low bits that are zero in every logit of this type once it is fp32: bisection can skip them.
_EMPTY_BITS = {torch.bfloat16: 16, torch.float16: 13, torch.float32: 0}


@triton.jit
def _ordered(x, SHIFT: tl.constexpr):
    """Maps floats to integers in the same order."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> SHIFT


@triton.jit
def _allowed(logits, base, col, stops, early, KNOWN, STOPS: tl.constexpr, EARLY: tl.constexpr):
    """The logits of a block in fp32; minus infinity for tokens that must not be sampled."""
    y = tl.load(logits + base + col, mask=col < KNOWN, other=float("-inf")).to(tl.float32)
    if EARLY:
        for i in range(STOPS):
            y = tl.where(col == tl.where(early, tl.load(stops + i), -1), float("-inf"), y)
    return y


@triton.jit
def _uniform(key, position):
    """`kernels.uniform.uniform`, in fp32; there is no number between the largest and 1."""
    x = key + (position + 1) * -7046029254386353131
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    x = x ^ ((x >> 31) & 0x1FFFFFFFF)
    u = ((x >> 11) & 0x1FFFFFFFFFFFFF).to(tl.float64) * 1.1102230246251565e-16
    return tl.minimum(u.to(tl.float32), 0.999999940395355224609375)


@triton.jit
def _draw(
    logits, keys, places, stops, token, position, count, alive, limit, ids, logprobs,
    V, KNOWN, S, temperature, top_p, top_k, min_tokens,
    GREEDY: tl.constexpr, TOP_P: tl.constexpr, TOP_K: tl.constexpr, STOPS: tl.constexpr, EARLY: tl.constexpr,
    SHIFT: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    place = tl.load(places + row)
    written = tl.load(count + place)
    early = written < min_tokens
    base = row * V
    i = tl.arange(0, BLOCK)
    block = tl.arange(0, BLOCKS)
    tops = tl.full((BLOCKS,), -1e30, dtype=tl.float32)  # of each block, the highest logit that may be sampled
    sums = tl.zeros((BLOCKS,), dtype=tl.float32)  # and the sum of its weights relative to that
    # The softmax over everything, at temperature 1.
    highest = -1e30
    total = 0.0
    best = float("-inf")
    chosen = 0
    for b in range(0, tl.cdiv(V, BLOCK)):
        col = b * BLOCK + i
        x = tl.load(logits + base + col, mask=col < V, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(highest, tl.max(x, axis=0))
        total = total * tl.exp(highest - higher) + tl.sum(tl.exp(x - higher), axis=0)
        highest = higher
        y = tl.where(col < KNOWN, x, float("-inf"))
        if EARLY:
            y = _allowed(logits, base, col, stops, early, KNOWN, STOPS, EARLY)
        if GREEDY:
            here = tl.max(y, axis=0)
            first = tl.min(tl.where(y == here, col, V), axis=0)
            chosen = tl.where(here > best, first, chosen)
            best = tl.maximum(best, here)
        else:
            here = tl.maximum(tl.max(y, axis=0), -1e30)
            tops = tl.where(block == b, here, tops)
            sums = tl.where(block == b, tl.sum(tl.exp((y - here) / temperature), axis=0), sums)
    if not GREEDY:
        peak = tl.max(tops, axis=0)
        least = -2147483647
        if TOP_K or TOP_P:
            # First how many, then how much of those.
            if TOP_K:
                low = -2147483647 >> SHIFT
                high = 2147483647 >> SHIFT
                while low < high:
                    middle = (low | high) - ((low ^ high) >> 1)  # rounded up, and never too large
                    found = 0
                    for b in range(0, tl.cdiv(KNOWN, BLOCK)):
                        y = _allowed(logits, base, b * BLOCK + i, stops, early, KNOWN, STOPS, EARLY)
                        found += tl.sum(((_ordered(y, SHIFT) >= middle) & (y > float("-inf"))).to(tl.int32), axis=0)
                    enough = found >= top_k
                    low = tl.where(enough, middle, low)
                    high = tl.where(enough, high, middle - 1)
                least = low
            if TOP_P:
                whole = 0.0
                for b in range(0, tl.cdiv(KNOWN, BLOCK)):
                    y = _allowed(logits, base, b * BLOCK + i, stops, early, KNOWN, STOPS, EARLY)
                    weight = tl.exp((y - peak) / temperature)
                    whole += tl.sum(tl.where(_ordered(y, SHIFT) >= least, weight, 0.0), axis=0)
                low = tl.maximum(least, -2147483647 >> SHIFT)
                high = 2147483647 >> SHIFT
                while low < high:
                    middle = (low | high) - ((low ^ high) >> 1)  # rounded up, and never too large
                    mass = 0.0
                    for b in range(0, tl.cdiv(KNOWN, BLOCK)):
                        y = _allowed(logits, base, b * BLOCK + i, stops, early, KNOWN, STOPS, EARLY)
                        weight = tl.exp((y - peak) / temperature)
                        mass += tl.sum(tl.where(_ordered(y, SHIFT) >= middle, weight, 0.0), axis=0)
                    enough = mass >= top_p * whole
                    low = tl.where(enough, middle, low)
                    high = tl.where(enough, high, middle - 1)
                least = low
            for b in range(0, tl.cdiv(KNOWN, BLOCK)):
                y = _allowed(logits, base, b * BLOCK + i, stops, early, KNOWN, STOPS, EARLY)
                weight = tl.where(_ordered(y, SHIFT) >= least, tl.exp((y - peak) / temperature), 0.0)
                sums = tl.where(block == b, tl.sum(weight, axis=0), sums)
        else:
            sums = sums * tl.exp((tops - peak) / temperature)
        target = _uniform(tl.load(keys + place), written) * tl.sum(sums, axis=0)
        until = tl.cumsum(sums, axis=0)
        # The first above the target that has any weight (by its rounding, a scan's sums need not rise steadily); the
        # last where none is above it.
        last = tl.max(tl.where(sums > 0, block, 0), axis=0)
        b = tl.minimum(tl.min(tl.where((until > target) & (sums > 0), block, BLOCKS), axis=0), last)
        before = tl.sum(tl.where(block < b, sums, 0.0), axis=0)
        col = b * BLOCK + i
        y = _allowed(logits, base, col, stops, early, KNOWN, STOPS, EARLY)
        weight = tl.exp((y - peak) / temperature)
        if TOP_K or TOP_P:
            weight = tl.where(_ordered(y, SHIFT) >= least, weight, 0.0)
        above = (before + tl.cumsum(weight, axis=0) > target) & (weight > 0)
        last = tl.max(tl.where(weight > 0, i, 0), axis=0)
        inner = tl.minimum(tl.min(tl.where(above, i, BLOCK), axis=0), last)
        chosen = b * BLOCK + inner
    chosen = tl.minimum(chosen, KNOWN - 1)
    logprob = tl.load(logits + base + chosen).to(tl.float32) - highest - tl.log(total)
    # Update the row's state.
    going = tl.load(alive + place)
    at = place * S + tl.minimum(written, S - 1)
    tl.store(ids + at, chosen.to(tl.int64), mask=going > 0)
    tl.store(logprobs + at, logprob, mask=going > 0)
    stopped = tl.max((tl.load(stops + tl.arange(0, STOPS)) == chosen).to(tl.int32), axis=0)
    tl.store(token + place, chosen.to(tl.int64), mask=going > 0)
    tl.store(count + place, written + going)
    tl.store(position + place, tl.load(position + place) + going)
    more = (written + going < tl.load(limit + place)) & (stopped == 0)
    tl.store(alive + place, tl.where(more, going, going * 0))


def draw_(
    logits_RV: Tensor, keys: Tensor, places_R: Tensor, stops_K: Tensor, rows: tuple[Tensor, ...], *,
    known: int, temperature: float, top_p: float, top_k: int, min_tokens: int,
) -> None:  # fmt: skip
    """Samples for the rows at `places` and updates their state: (token, position, count, alive, limit, ids, logprobs),
    as in `sample.state`. Only the first `known` tokens are sampled; the number of stop tokens is a power of two,
    padded with -1."""
    num_rows, vocab = logits_RV.shape
    block = min(BLOCK, max(16, width(vocab)))
    _draw[(num_rows,)](
        logits_RV, keys, places_R, stops_K, *rows, vocab, known, rows[-1].shape[1],
        temperature or 1.0, top_p, top_k, min_tokens,
        GREEDY=temperature == 0, TOP_P=top_p < 1, TOP_K=0 < top_k < known, STOPS=stops_K.shape[0],
        EARLY=min_tokens > 0, SHIFT=_EMPTY_BITS[logits_RV.dtype], BLOCK=block,
        BLOCKS=max(16, width(cdiv(vocab, block))), num_warps=8,
    )  # fmt: skip
