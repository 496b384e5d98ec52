"""Rotary positions on a fused qkv projection, in place; and the way back.

Legend: N tokens, W = (H + 2G) x D columns, H query heads, G key/value heads, D head width, E = D / 2.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flatout.kernels.fp8 import Scale, limits, slot, slots
from flatout.kernels.launch import cdiv


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


ROWS, BLOCK = 4, 512


def rotate_(qkv_NW: Tensor, cos_NE: Tensor, sin_NE: Tensor, *, rotated_heads: int) -> None:
    """Turns the queries and keys of a projection by their positions, where they lie."""
    n, w = qkv_NW.shape
    e = cos_NE.shape[-1]
    pairs = rotated_heads * e
    _rotate[(cdiv(n, ROWS), cdiv(pairs, BLOCK))](
        qkv_NW, cos_NE, sin_NE, n, w, pairs, E=e, ROWS=ROWS, BLOCK=BLOCK, num_warps=4
    )


def rotate_back(
    dq_NHD: Tensor, dk_NGD: Tensor, dv_NGD: Tensor, cos_NE: Tensor, sin_NE: Tensor, *, fp8: Scale | None = None
) -> Tensor:
    """The projection's gradient from those of q, k and v as attention gives them, laid side by side."""
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
