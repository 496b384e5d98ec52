"""Rotary positions on a fused qkv projection, in place or with query and key norms, and their backward passes.

Legend: N tokens, W = (H + 2G) x D columns, H query heads, G key/value heads, D head width, E = D / 2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flatout.kernels.fp8 import Scale, limits, slot, slots
from flatout.kernels.launch import cdiv, num_processors, width


@triton.jit
def _rotate(
    qkv, cos, sin, N, W, PAIRS,
    E: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    pair = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = (row[:, None] < N) & (pair[None, :] < PAIRS)
    angle = row[:, None] * E + (pair % E)[None, :]
    c = tl.load(cos + angle, mask=inside, other=0.0)
    s = tl.load(sin + angle, mask=inside, other=0.0)
    first = row[:, None].to(tl.int64) * W + ((pair // E) * 2 * E + pair % E)[None, :]
    a = tl.load(qkv + first, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(qkv + first + E, mask=inside, other=0.0).to(tl.float32)
    tl.store(qkv + first, (a * c - b * s).to(qkv.dtype.element_ty), mask=inside)
    tl.store(qkv + first + E, (b * c + a * s).to(qkv.dtype.element_ty), mask=inside)


@triton.jit
def _rotate_back(
    dq, dk, dv, q_row, q_head, k_row, k_head, v_row, v_head, cos, sin, d_qkv, scale, amax, N, low, high,
    H: tl.constexpr, G: tl.constexpr, E: tl.constexpr, FP8: tl.constexpr, SLOTS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    pair = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    head, i = pair // E, pair % E
    known = row[:, None] < N
    r = row[:, None].to(tl.int64)
    in_q = known & (head < H)[None, :]
    in_k = known & ((head >= H) & (head < H + G))[None, :]
    in_v = known & ((head >= H + G) & (head < H + 2 * G))[None, :]
    at_q = r * q_row + (head * q_head + i)[None, :]
    at_k = r * k_row + ((head - H) * k_head + i)[None, :]
    at_v = r * v_row + ((head - H - G) * v_head + i)[None, :]
    a = tl.load(dq + at_q, mask=in_q, other=0.0).to(tl.float32)
    b = tl.load(dq + at_q + E, mask=in_q, other=0.0).to(tl.float32)
    a += tl.load(dk + at_k, mask=in_k, other=0.0).to(tl.float32)
    b += tl.load(dk + at_k + E, mask=in_k, other=0.0).to(tl.float32)
    a += tl.load(dv + at_v, mask=in_v, other=0.0).to(tl.float32)
    b += tl.load(dv + at_v + E, mask=in_v, other=0.0).to(tl.float32)
    turned = in_q | in_k
    angle = row[:, None] * E + i[None, :]
    c = tl.load(cos + angle, mask=turned, other=1.0)
    s = tl.load(sin + angle, mask=turned, other=0.0)
    da = a * c + b * s
    db = b * c - a * s
    if FP8:
        most = tl.max(tl.max(tl.maximum(tl.abs(da), tl.abs(db)), axis=1), axis=0)
        tl.atomic_max(amax + (tl.program_id(0) + tl.program_id(1)) % SLOTS, most)
        factor = tl.load(scale)
        da = tl.minimum(tl.maximum(da * factor, low), high)
        db = tl.minimum(tl.maximum(db * factor, low), high)
    out = r * ((H + 2 * G) * 2 * E) + (head * 2 * E + i)[None, :]
    written = turned | in_v
    tl.store(d_qkv + out, da.to(d_qkv.dtype.element_ty), mask=written)
    tl.store(d_qkv + out + E, db.to(d_qkv.dtype.element_ty), mask=written)


@triton.jit
def _norm_rotate(
    qkv, q_weight, k_weight, cos, sin, out, rstd, W, eps,
    H: tl.constexpr, G: tl.constexpr, E: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, HEADS)
    i = tl.arange(0, E)
    inside = (head < H + G)[:, None] & (i < E)[None, :]
    at = head[:, None] * (2 * E) + i[None, :]
    a = tl.load(qkv + row * W + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(qkv + row * W + at + E, mask=inside, other=0.0).to(tl.float32)
    r = tl.rsqrt((tl.sum(a * a, axis=1) + tl.sum(b * b, axis=1)) / (2 * E) + eps)
    tl.store(rstd + row * (H + G) + head, r, mask=head < H + G)
    is_q = (head < H)[:, None]
    w_a = tl.where(is_q, tl.load(q_weight + i)[None, :], tl.load(k_weight + i)[None, :]).to(tl.float32)
    w_b = tl.where(is_q, tl.load(q_weight + E + i)[None, :], tl.load(k_weight + E + i)[None, :]).to(tl.float32)
    a = a * r[:, None] * w_a
    b = b * r[:, None] * w_b
    c = tl.load(cos + row * E + i)[None, :]
    s = tl.load(sin + row * E + i)[None, :]
    to = out + row * ((H + G) * 2 * E) + at
    tl.store(to, (a * c - b * s).to(out.dtype.element_ty), mask=inside)
    tl.store(to + E, (b * c + a * s).to(out.dtype.element_ty), mask=inside)


@triton.jit
def _norm_rotate_back(
    d_qkv, qkv, rstd, q_weight, k_weight, d_weight, N, W,
    H: tl.constexpr, G: tl.constexpr, E: tl.constexpr, HEADS: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    head = tl.arange(0, HEADS)
    i = tl.arange(0, E)
    at = head[:, None] * (2 * E) + i[None, :]
    is_q = (head < H)[:, None]
    w_a = tl.where(is_q, tl.load(q_weight + i)[None, :], tl.load(k_weight + i)[None, :]).to(tl.float32)
    w_b = tl.where(is_q, tl.load(q_weight + E + i)[None, :], tl.load(k_weight + E + i)[None, :]).to(tl.float32)
    sum_a = tl.zeros((HEADS, E), dtype=tl.float32)
    sum_b = tl.zeros((HEADS, E), dtype=tl.float32)
    for tile in range(TILES):
        row = (tile * tl.num_programs(0) + tl.program_id(0)).to(tl.int64)
        known = head < tl.where(row < N, H + G, 0)
        inside = known[:, None] & (i < E)[None, :]
        # The gradient as rotated back, in the place of the projection's own.
        da = tl.load(d_qkv + row * W + at, mask=inside, other=0.0).to(tl.float32)
        db = tl.load(d_qkv + row * W + at + E, mask=inside, other=0.0).to(tl.float32)
        r = tl.load(rstd + row * (H + G) + head, mask=known, other=0.0)[:, None]
        a = tl.load(qkv + row * W + at, mask=inside, other=0.0).to(tl.float32) * r
        b = tl.load(qkv + row * W + at + E, mask=inside, other=0.0).to(tl.float32) * r
        sum_a += da * a
        sum_b += db * b
        ga = da * w_a
        gb = db * w_b
        mean = ((tl.sum(ga * a, axis=1) + tl.sum(gb * b, axis=1)) / (2 * E))[:, None]
        tl.store(d_qkv + row * W + at, ((ga - a * mean) * r).to(d_qkv.dtype.element_ty), mask=inside)
        tl.store(d_qkv + row * W + at + E, ((gb - b * mean) * r).to(d_qkv.dtype.element_ty), mask=inside)
    to = d_weight + tl.program_id(0) * (4 * E)
    tl.store(to + i, tl.sum(tl.where(is_q, sum_a, 0.0), axis=0))
    tl.store(to + E + i, tl.sum(tl.where(is_q, sum_b, 0.0), axis=0))
    tl.store(to + 2 * E + i, tl.sum(tl.where(is_q, 0.0, sum_a), axis=0))
    tl.store(to + 3 * E + i, tl.sum(tl.where(is_q, 0.0, sum_b), axis=0))


ROWS, BLOCK = 4, 512


def rotate_(qkv_NW: Tensor, cos_NE: Tensor, sin_NE: Tensor, *, rotated_heads: int) -> None:
    """Rotates the queries and keys of a projection by their positions, in place."""
    n, w = qkv_NW.shape
    e = cos_NE.shape[-1]
    pairs = rotated_heads * e
    _rotate[(cdiv(n, ROWS), cdiv(pairs, BLOCK))](
        qkv_NW, cos_NE, sin_NE, n, w, pairs, E=e, ROWS=ROWS, BLOCK=BLOCK, num_warps=4
    )


def rotate_back(
    dq_NHD: Tensor, dk_NGD: Tensor, dv_NGD: Tensor, cos_NE: Tensor, sin_NE: Tensor, *, fp8: Scale | None = None
) -> Tensor:
    """The projection's gradient from the gradients of q, k and v, concatenated."""
    dq, dk, dv = (x if x.stride(-1) == 1 else x.contiguous() for x in (dq_NHD, dk_NGD, dv_NGD))
    n, heads, d = dq.shape
    groups, e = dk.shape[1], d // 2
    dtype = dq.dtype if fp8 is None else fp8.dtype
    out = torch.empty(n, (heads + 2 * groups) * d, dtype=dtype, device=dq.device)
    _rotate_back[(cdiv(n, ROWS), cdiv((heads + 2 * groups) * e, BLOCK))](
        dq, dk, dv, dq.stride(0), dq.stride(1), dk.stride(0), dk.stride(1), dv.stride(0), dv.stride(1),
        cos_NE, sin_NE, out, *slot(fp8), n, *limits(fp8),
        H=heads, G=groups, E=e, FP8=fp8 is not None, SLOTS=slots(fp8),
        ROWS=ROWS, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return out


def norm_rotate(
    qkv_NW: Tensor, q_norm_D: Tensor, k_norm_D: Tensor, cos_NE: Tensor, sin_NE: Tensor, eps: float, *, heads: int,
    groups: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Normed and rotated queries and keys side by side, and the norms' scale of each head.

    Heads are a power of two wide.
    """
    n, w = qkv_NW.shape
    e = cos_NE.shape[-1]
    out = torch.empty(n, (heads + groups) * 2 * e, dtype=qkv_NW.dtype, device=qkv_NW.device)
    rstd = torch.empty(n, heads + groups, dtype=torch.float32, device=qkv_NW.device)
    _norm_rotate[(n,)](
        qkv_NW, q_norm_D, k_norm_D, cos_NE, sin_NE, out, rstd, w, eps,
        H=heads, G=groups, E=e, HEADS=width(heads + groups), num_warps=4,
    )  # fmt: skip
    return out, rstd


def norm_rotate_back_(
    d_qkv_NW: Tensor, qkv_NW: Tensor, rstd: Tensor, q_norm_D: Tensor, k_norm_D: Tensor, *, heads: int, groups: int
) -> tuple[Tensor, Tensor]:
    """Applies the backward pass of the norms to the gradient from `rotate_back`, in place; returns the norms' own."""
    n, w = qkv_NW.shape
    d = q_norm_D.shape[0]
    programs = min(n, 8 * num_processors(qkv_NW))
    partial = torch.empty(programs, 2 * d, dtype=torch.float32, device=qkv_NW.device)
    _norm_rotate_back[(programs,)](
        d_qkv_NW, qkv_NW, rstd, q_norm_D, k_norm_D, partial, n, w,
        H=heads, G=groups, E=d // 2, HEADS=width(heads + groups), TILES=cdiv(n, programs), num_warps=4,
    )  # fmt: skip
    q_gradient, k_gradient = partial.sum(0).split(d)
    return q_gradient.to(q_norm_D.dtype), k_gradient.to(k_norm_D.dtype)
