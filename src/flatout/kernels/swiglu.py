"""silu(gate) * up and its gradient, one pass each; in 8 bits as well.

Legend: N tokens, F intermediate width; gate and up are adjacent in rows of 2F.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flatout.kernels.fp8 import Scale, limits, slot, slots
from flatout.kernels.launch import cdiv


@triton.jit
def _swiglu_forward(
    gate_up, out, scale, amax, N, F, low, high,
    FP8: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = (row[:, None] < N) & (col[None, :] < F)
    at = row[:, None].to(tl.int64) * (2 * F) + col[None, :]
    gate = tl.load(gate_up + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + at + F, mask=inside, other=0.0).to(tl.float32)
    y = gate * tl.sigmoid(gate) * up
    if FP8:
        tl.atomic_max(amax + (tl.program_id(0) + tl.program_id(1)) % SLOTS, tl.max(tl.max(tl.abs(y), axis=1), axis=0))
        y = tl.minimum(tl.maximum(y * tl.load(scale), low), high)
    tl.store(out + row[:, None].to(tl.int64) * F + col[None, :], y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_backward(
    d_out, gate_up, d_gate_up, scale, amax, N, F, low, high,
    FP8: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = (row[:, None] < N) & (col[None, :] < F)
    at = row[:, None].to(tl.int64) * (2 * F) + col[None, :]
    gate = tl.load(gate_up + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + at + F, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(d_out + row[:, None].to(tl.int64) * F + col[None, :], mask=inside, other=0.0).to(tl.float32)
    sigma = tl.sigmoid(gate)
    d_up = dy * gate * sigma
    d_gate = dy * up * sigma * (1.0 + gate * (1.0 - sigma))
    if FP8:
        most = tl.max(tl.max(tl.maximum(tl.abs(d_up), tl.abs(d_gate)), axis=1), axis=0)
        tl.atomic_max(amax + (tl.program_id(0) + tl.program_id(1)) % SLOTS, most)
        factor = tl.load(scale)
        d_up = tl.minimum(tl.maximum(d_up * factor, low), high)
        d_gate = tl.minimum(tl.maximum(d_gate * factor, low), high)
    tl.store(d_gate_up + at, d_gate.to(d_gate_up.dtype.element_ty), mask=inside)
    tl.store(d_gate_up + at + F, d_up.to(d_gate_up.dtype.element_ty), mask=inside)


ROWS, COLS = 4, 512


def swiglu(gate_up_N2F: Tensor, *, fp8: Scale | None = None) -> Tensor:
    n, f = gate_up_N2F.shape[0], gate_up_N2F.shape[1] // 2
    dtype = gate_up_N2F.dtype if fp8 is None else fp8.dtype
    out = torch.empty(n, f, dtype=dtype, device=gate_up_N2F.device)
    _swiglu_forward[(cdiv(n, ROWS), cdiv(f, COLS))](
        gate_up_N2F, out, *slot(fp8), n, f, *limits(fp8),
        FP8=fp8 is not None, SLOTS=slots(fp8), ROWS=ROWS, COLS=COLS, num_warps=4,
    )  # fmt: skip
    return out


def swiglu_backward(d_out_NF: Tensor, gate_up_N2F: Tensor, *, fp8: Scale | None = None) -> Tensor:
    """The gradient of gate and up, concatenated."""
    n, f = d_out_NF.shape
    out = torch.empty_like(gate_up_N2F, dtype=None if fp8 is None else fp8.dtype)
    _swiglu_backward[(cdiv(n, ROWS), cdiv(f, COLS))](
        d_out_NF, gate_up_N2F, out, *slot(fp8), n, f, *limits(fp8),
        FP8=fp8 is not None, SLOTS=slots(fp8), ROWS=ROWS, COLS=COLS, num_warps=4,
    )  # fmt: skip
    return out
