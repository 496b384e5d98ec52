"""Attention while generating: tiles of queries, each reading one range of a pool of tokens.

A query may read several ranges in turn (the common prefix, its own prompt, its generated tokens): each call continues
the softmax of the one before. A range that many rows share is read once for all of them.

Legend: N queries, H query heads, G key/value heads, D head width, T tiles, Q queries per tile, P tokens of the pool.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from flatout.kernels.launch import width

# Keys per block.
BLOCK = 64
# Rows of a tile, queries times the heads that share a key: the minimum for a tensor core, and a full tile.
LEAST, FULL, READING = 16, 64, 128


@triton.jit(do_not_specialize=["N"])
def _read(
    q, k, v, out, sums, tops, totals, queries, starts, seen, firsts, N, q_row, q_head, pool_head, scale,
    H: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, QUERIES: tl.constexpr, ROWS: tl.constexpr,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, FIRST: tl.constexpr, LAST: tl.constexpr, WINDOW: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    group = tl.program_id(1)
    row = tl.arange(0, ROWS)
    d = tl.arange(0, WIDTH)
    which = row // GROUPS
    query = tl.load(queries + tile * QUERIES + which, mask=which < QUERIES, other=-1).to(tl.int64)
    known = (query >= 0) & (query < N)
    # Loaded unconditionally, so that no load waits for another one.
    limit = tl.where(known, tl.load(seen + tile * QUERIES + which, mask=which < QUERIES, other=0), 0)
    start = tl.load(starts + tile).to(tl.int64)
    most = tl.max(limit, axis=0)
    if most > 0:
        head = group * GROUPS + row % GROUPS
        inside = known[:, None] & (d < D)[None, :]
        x = tl.load(q + (query * q_row + head * q_head)[:, None] + d[None, :], mask=inside, other=0.0)
        at = query * H + head
        if FIRST:
            top = tl.full((ROWS,), -1e30, dtype=tl.float32)
            total = tl.zeros((ROWS,), dtype=tl.float32)
            summed = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
        else:
            top = tl.load(tops + at, mask=known, other=-1e30)
            total = tl.load(totals + at, mask=known, other=0.0)
            summed = tl.load(sums + at[:, None] * D + d[None, :], mask=inside, other=0.0)
        begin = group.to(tl.int64) * pool_head + start * D
        least = 0
        if WINDOW:
            low = tl.load(firsts + tile * QUERIES + which, mask=which < QUERIES, other=0)
            least = tl.min(tl.where(known, low, most), axis=0) // BLOCK * BLOCK
        for first in range(least, most, BLOCK):
            j = first + tl.arange(0, BLOCK)
            there = (j < most)[:, None] & (d < D)[None, :]
            place = begin + j[:, None] * D + d[None, :]
            keys = tl.load(k + place, mask=there, other=0.0)
            score = tl.dot(x, tl.trans(keys), input_precision=PRECISION) * scale
            visible = j[None, :] < limit[:, None]
            if WINDOW:
                visible = visible & (j[None, :] >= low[:, None])
            score = tl.where(visible, score, -1e30)
            higher = tl.maximum(top, tl.max(score, axis=1))
            share = tl.exp2(score - higher[:, None])
            if WINDOW:  # a query may see none of these keys
                share = tl.where(visible, share, 0.0)
            kept = tl.exp2(top - higher)
            values = tl.load(v + place, mask=there, other=0.0)
            summed = summed * kept[:, None] + tl.dot(share.to(values.dtype), values, input_precision=PRECISION)
            total = total * kept + tl.sum(share, axis=1)
            top = higher
        to = at[:, None] * D + d[None, :]
        if LAST:
            tl.store(out + to, (summed / total[:, None]).to(out.dtype.element_ty), mask=inside)
        else:
            tl.store(sums + to, summed, mask=inside)
            tl.store(tops + at, top, mask=known)
            tl.store(totals + at, total, mask=known)


@triton.jit
def _keep(
    k, v, k_pool, v_pool, places, k_row, k_head, v_row, v_head, pool_head,
    G: tl.constexpr, D: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)
    d = tl.arange(0, WIDTH)
    inside = (head < G)[:, None] & (d < D)[None, :]
    to = head[:, None].to(tl.int64) * pool_head + tl.load(places + row).to(tl.int64) * D + d[None, :]
    x = tl.load(k + row * k_row + head[:, None] * k_head + d[None, :], mask=inside, other=0.0)
    tl.store(k_pool + to, x, mask=inside)
    y = tl.load(v + row * v_row + head[:, None] * v_head + d[None, :], mask=inside, other=0.0)
    tl.store(v_pool + to, y, mask=inside)


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """The range of the pool that each query reads: tile t starts at `starts[t]`, and its query i reads `seen[t, i]`
    tokens, without those before `firsts[t, i]` if there is a window. An unused query is -1 and reads 0; queries beyond
    the given ones are skipped."""

    queries_TQ: Tensor
    seen_TQ: Tensor
    starts_T: Tensor
    firsts_TQ: Tensor | None = None

    @property
    def num_tiles(self) -> int:
        return self.queries_TQ.shape[0]

    def within(self, window: int, position_N: Tensor, begin: Tensor | int) -> Tiles:
        """The same ranges for queries at these positions that see a window; the ranges begin at position `begin`."""
        at_TQ = position_N[self.queries_TQ.long().clamp(0, len(position_N) - 1)]
        firsts_TQ = (at_TQ - window + 1 - begin).clamp(min=0).to(torch.int32)
        return replace(self, firsts_TQ=firsts_TQ)

    def first(self, num_tiles: int) -> Tiles:
        return Tiles(
            queries_TQ=self.queries_TQ[:num_tiles],
            seen_TQ=self.seen_TQ[:num_tiles],
            starts_T=self.starts_T[:num_tiles],
        )


@dataclass(frozen=True, kw_only=True)
class Partial:
    """The partial softmax sums of the queries; shared by all layers."""

    sums_NHD: Tensor
    tops_NH: Tensor
    totals_NH: Tensor

    @classmethod
    def make(cls, *, queries: int, heads: int, head_dim: int, device: torch.device) -> Partial:
        return cls(
            sums_NHD=torch.zeros(queries, heads, head_dim, device=device),
            tops_NH=torch.zeros(queries, heads, device=device),
            totals_NH=torch.ones(queries, heads, device=device),
        )


def reading_rows(head_dim: int, dtype: torch.dtype) -> int:
    """Rows of a prefill tile: a large one, if the registers can hold it."""
    return READING if head_dim * dtype.itemsize <= 256 else FULL


def _stages(query_size: int, key_size: int, like: Tensor) -> int:
    """How many blocks of keys and values are loaded at once: up to three, as shared memory allows."""
    if not like.is_cuda:
        return 3
    most: int = torch.cuda.get_device_properties(like.device).shared_memory_per_block_optin
    return int(max(1, min(3, (most // like.element_size() - query_size) // key_size)))


def per_tile(groups: int, rows: int) -> int:
    """How many queries a tile of this many rows holds."""
    return max(1, rows // groups)


def read(q_NHD: Tensor, k_GPD: Tensor, v_GPD: Tensor, ranges: list[Tiles], *, partial: Partial | None = None) -> Tensor:
    """Attention of each query over its ranges, of which the last one reaches every query.

    `partial` is needed if there are several. Queries are the rows of one buffer, with adjacent heads.
    """
    n, heads, d = q_NHD.shape
    groups = heads // k_GPD.shape[0]
    out = torch.empty(n, heads, d, dtype=q_NHD.dtype, device=q_NHD.device)
    # Softmax in powers of two.
    scale = d**-0.5 * 1.4426950408889634
    state = (out, out, out) if partial is None else (partial.sums_NHD, partial.tops_NH, partial.totals_NH)
    for i, tiles in enumerate(ranges):
        queries = tiles.queries_TQ.shape[1]
        rows, wide = max(LEAST, width(queries * groups)), max(16, width(d))
        _read[(tiles.num_tiles, k_GPD.shape[0])](
            q_NHD, k_GPD, v_GPD, out, *state, tiles.queries_TQ, tiles.starts_T, tiles.seen_TQ,
            tiles.seen_TQ if tiles.firsts_TQ is None else tiles.firsts_TQ,
            n, q_NHD.stride(0), q_NHD.stride(1), k_GPD.stride(0), scale,
            H=heads, GROUPS=groups, D=d, QUERIES=queries, ROWS=rows, WIDTH=wide, BLOCK=BLOCK,
            FIRST=i == 0, LAST=i == len(ranges) - 1, WINDOW=tiles.firsts_TQ is not None,
            PRECISION="ieee" if q_NHD.dtype == torch.float32 else "tf32",
            num_warps=(2 if rows <= LEAST else 8 if rows * wide > 64 * 128 else 4) * (q_NHD.element_size() // 2),
            num_stages=_stages(rows * wide, 2 * BLOCK * wide, q_NHD),
        )  # fmt: skip
    return out


def keep(k_NGD: Tensor, v_NGD: Tensor, k_GPD: Tensor, v_GPD: Tensor, places_N: Tensor) -> None:
    """Writes keys and values of tokens into the pool."""
    n, groups, d = k_NGD.shape
    _keep[(n,)](
        k_NGD, v_NGD, k_GPD, v_GPD, places_N, k_NGD.stride(0), k_NGD.stride(1), v_NGD.stride(0), v_NGD.stride(1),
        k_GPD.stride(0), G=groups, D=d, HEADS=width(groups), WIDTH=width(d), num_warps=1,
    )  # fmt: skip
