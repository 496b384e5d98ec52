"""Residual addition and RMSNorm: one pass over the bytes forward, one backward.

Legend: N tokens, C hidden width, P programs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flatout.kernels.fp8 import Scale, limits, slot, slots
from flatout.kernels.launch import cdiv, num_processors, width


@triton.jit
def _norm_forward(
    residual, delta, weight, summed, normed, rstd, scale, amax, N, C, delta_row, normed_row, eps, low, high,
    HAS_DELTA: tl.constexpr, FP8: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.arange(0, WIDTH)
    inside = (row[:, None] < N) & (col[None, :] < C)
    at = row[:, None].to(tl.int64) * C + col[None, :]
    x = tl.load(residual + at, mask=inside, other=0.0)
    if HAS_DELTA:
        # Rounded like the plain addition, so both paths carry the same residual.
        more = tl.load(delta + row[:, None].to(tl.int64) * delta_row + col[None, :], mask=inside, other=0.0)
        x = (x.to(tl.float32) + more.to(tl.float32)).to(x.dtype)
        tl.store(summed + at, x, mask=inside)
    x = x.to(tl.float32)
    r = tl.rsqrt(tl.sum(x * x, axis=1) / C + eps)
    tl.store(rstd + row, r, mask=row < N)
    w = tl.load(weight + col, mask=col < C, other=0.0).to(tl.float32)
    y = x * r[:, None] * w[None, :]
    if FP8:
        tl.atomic_max(amax + tl.program_id(0) % SLOTS, tl.max(tl.max(tl.abs(y), axis=1), axis=0))
        y = tl.minimum(tl.maximum(y * tl.load(scale), low), high)
    at = row[:, None].to(tl.int64) * normed_row + col[None, :]
    tl.store(normed + at, y.to(normed.dtype.element_ty), mask=inside)


@triton.jit
def _norm_backward(
    d_normed, d_summed, summed, rstd, weight, dx, d_weight, N, C, d_normed_row,
    HAS_SUMMED: tl.constexpr, LEARNS: tl.constexpr, TILES: tl.constexpr, ROWS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    col = tl.arange(0, WIDTH)
    w = tl.load(weight + col, mask=col < C, other=0.0).to(tl.float32)
    d_w = tl.zeros((WIDTH,), dtype=tl.float32)
    for tile in range(TILES):
        row = (tile * tl.num_programs(0) + tl.program_id(0)) * ROWS + tl.arange(0, ROWS)
        inside = (row[:, None] < N) & (col[None, :] < C)
        at = row[:, None].to(tl.int64) * C + col[None, :]
        dy_at = row[:, None].to(tl.int64) * d_normed_row + col[None, :]
        dy = tl.load(d_normed + dy_at, mask=inside, other=0.0).to(tl.float32)
        r = tl.load(rstd + row, mask=row < N, other=0.0)
        x = tl.load(summed + at, mask=inside, other=0.0).to(tl.float32) * r[:, None]
        g = dy * w[None, :]
        d = (g - x * (tl.sum(g * x, axis=1) / C)[:, None]) * r[:, None]
        if HAS_SUMMED:
            d += tl.load(d_summed + at, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + at, d.to(dx.dtype.element_ty), mask=inside)
        if LEARNS:
            d_w += tl.sum(dy * x, axis=0)
    if LEARNS:
        tl.store(d_weight + tl.program_id(0) * C + col, d_w, mask=col < C)


def add_norm(
    residual_NC: Tensor,
    delta_NC: Tensor | None,
    weight_C: Tensor,
    eps: float,
    *,
    into: Tensor | None = None,
    fp8: Scale | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(residual + delta, its RMSNorm, the norm's scale of each row).

    With `fp8` the norm comes in 8 bits, with `into` in the first columns of that matrix, else in `dtype`, or the
    residual's. Delta's rows may have gaps.
    """
    n, c = residual_NC.shape
    summed = residual_NC if delta_NC is None else torch.empty_like(residual_NC)
    dtype = dtype if fp8 is None else fp8.dtype
    normed = torch.empty_like(residual_NC, dtype=dtype) if into is None else into[:, :c]
    rstd = torch.empty(n, dtype=torch.float32, device=residual_NC.device)
    rows = max(1, 4096 // width(c))
    _norm_forward[(cdiv(n, rows),)](
        residual_NC, delta_NC, weight_C, summed, normed, rstd, *slot(fp8), n, c,
        c if delta_NC is None else delta_NC.stride(0), normed.stride(0), eps, *limits(fp8),
        HAS_DELTA=delta_NC is not None, FP8=fp8 is not None, SLOTS=slots(fp8),
        ROWS=rows, WIDTH=width(c), num_warps=4 if width(c) <= 4096 else 8,
    )  # fmt: skip
    return summed, normed, rstd


def add_norm_backward(
    d_normed_NC: Tensor,
    d_summed_NC: Tensor | None,
    summed_NC: Tensor,
    rstd_N: Tensor,
    weight_C: Tensor,
    *,
    learns: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Gradients of (residual, which is also delta's; the norm's weight, if it learns). Given rows may have gaps."""
    n, c = summed_NC.shape
    dx = torch.empty_like(summed_NC)
    rows = max(1, 2048 // width(c))
    programs = min(cdiv(n, rows), 4 * num_processors(summed_NC))
    partial = torch.empty(programs, c, dtype=torch.float32, device=dx.device) if learns else None
    _norm_backward[(programs,)](
        d_normed_NC, d_summed_NC, summed_NC, rstd_N, weight_C, dx, partial, n, c, d_normed_NC.stride(0),
        HAS_SUMMED=d_summed_NC is not None, LEARNS=learns, TILES=cdiv(n, rows * programs), ROWS=rows, WIDTH=width(c),
        num_warps=4 if width(c) <= 4096 else 8,
    )  # fmt: skip
    return dx, None if partial is None else partial.sum(0).to(weight_C.dtype)
