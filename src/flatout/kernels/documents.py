"""Causal attention inside short packed documents: all keys of a document fit in one tile.

The libraries' kernel is made for long sequences. It takes tiles of its own size however short a document is, gives the
gradients of keys and values once per query head, to be summed afterwards, and keeps what it summed. Here a program has
a document and the heads that share its keys: sums over those heads stay in registers, and nothing is kept but q, k, v,
the result, which the next projection keeps anyway, and the logarithm of each row's sum.

Legend: N tokens, S documents, H query heads, G key/value heads, D head width, T tokens of a tile, B queries at a time.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flatout.kernels.launch import width

# (queries at a time, warps, stages): the fastest of those tried on an H200 with heads of 64 and tiles of 128. The other
# sizes of the backward pass, which has the most to hold, are what its registers hold.
FORWARD = (64, 4, 2)


def _backward_sizes(tile: int, d: int) -> tuple[int, int, int]:
    if d > 64:
        return 32, 8, 2
    return (64, 4, 1) if tile <= 64 else (32, 4, 1)


@triton.jit
def _rows(x, first, step, row, d, known):
    """Rows of a document: one pointer to where it begins and short offsets, which take half the registers."""
    return tl.load(x + first + (row[:, None] * step + d[None, :]), mask=known, other=0.0)


@triton.jit
def _forward(
    q, k, v, out, logs, ends, N, q_row, q_head, k_row, k_head, v_row, v_head, scale,
    HEADS: tl.constexpr, D: tl.constexpr, T: tl.constexpr, B: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    begin = tl.load(ends + tl.program_id(0)).to(tl.int64)
    length = tl.load(ends + tl.program_id(0) + 1) - begin
    if length == 0:
        return
    group = tl.program_id(1)
    o_row = tl.num_programs(1) * HEADS * D
    col, d = tl.arange(0, T), tl.arange(0, D)
    inside = (col < length)[:, None]
    k_TD = _rows(k, begin * k_row + group * k_head, k_row, col, d, inside)
    v_TD = _rows(v, begin * v_row + group * v_head, v_row, col, d, inside)
    blocks = (length.to(tl.int32) + B - 1) // B
    for turn in range(HEADS * blocks):
        head = group * HEADS + turn // blocks
        row = turn % blocks * B + tl.arange(0, B)
        known = (row < length)[:, None]
        q_BD = _rows(q, begin * q_row + head * q_head, q_row, row, d, known)
        s_BT = tl.dot(q_BD, tl.trans(k_TD), input_precision=PRECISION) * scale
        s_BT = tl.where((row[:, None] >= col[None, :]) & (col[None, :] < length), s_BT, float("-inf"))
        most_B = tl.max(s_BT, axis=1)
        p_BT = tl.exp(s_BT - most_B[:, None])
        sum_B = tl.sum(p_BT, axis=1)
        mixed = tl.dot(p_BT.to(v_TD.dtype), v_TD, input_precision=PRECISION) / sum_B[:, None]
        tl.store(logs + head * N + begin + row, most_B + tl.log(sum_B), mask=row < length)
        at = row[:, None] * o_row + d[None, :]
        tl.store(out + begin * o_row + head * D + at, mixed.to(out.dtype.element_ty), mask=known)


@triton.jit
def _backward(
    q, k, v, out, logs, d_out, dq, dk, dv, ends, N, q_row, q_head, k_row, k_head, v_row, v_head, d_row, d_head, scale,
    HEADS: tl.constexpr, D: tl.constexpr, T: tl.constexpr, B: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    begin = tl.load(ends + tl.program_id(0)).to(tl.int64)
    length = tl.load(ends + tl.program_id(0) + 1) - begin
    if length == 0:
        return
    group = tl.program_id(1)
    groups = tl.num_programs(1)
    dq_row, dk_row = groups * HEADS * D, groups * D
    col, d = tl.arange(0, T), tl.arange(0, D)
    inside = (col < length)[:, None]
    k_TD = _rows(k, begin * k_row + group * k_head, k_row, col, d, inside)
    v_TD = _rows(v, begin * v_row + group * v_head, v_row, col, d, inside)
    dk_TD = tl.zeros((T, D), dtype=tl.float32)
    dv_TD = tl.zeros((T, D), dtype=tl.float32)
    blocks = (length.to(tl.int32) + B - 1) // B
    for turn in range(HEADS * blocks):
        head = group * HEADS + turn // blocks
        row = turn % blocks * B + tl.arange(0, B)
        known = (row < length)[:, None]
        q_BD = _rows(q, begin * q_row + head * q_head, q_row, row, d, known)
        d_BD = _rows(d_out, begin * d_row + head * d_head, d_row, row, d, known)
        o_BD = _rows(out, begin * dq_row + head * D, dq_row, row, d, known)
        log_B = tl.load(logs + head * N + begin + row, mask=row < length, other=0.0)
        along_B = tl.sum(d_BD.to(tl.float32) * o_BD.to(tl.float32), axis=1)
        # Keys by queries: without a transpose, the scores are the left operand of both sums over queries.
        s_TB = tl.dot(k_TD, tl.trans(q_BD), input_precision=PRECISION) * scale - log_B[None, :]
        p_TB = tl.where((col[:, None] <= row[None, :]) & inside, tl.exp(s_TB), 0.0)
        dv_TD += tl.dot(p_TB.to(d_BD.dtype), d_BD, input_precision=PRECISION)
        dp_TB = tl.dot(v_TD, tl.trans(d_BD), input_precision=PRECISION)
        ds_TB = (p_TB * (dp_TB - along_B[None, :]) * scale).to(k_TD.dtype)
        dk_TD += tl.dot(ds_TB, q_BD, input_precision=PRECISION)
        dq_BD = tl.dot(tl.trans(ds_TB), k_TD, input_precision=PRECISION)
        at = row[:, None] * dq_row + d[None, :]
        tl.store(dq + begin * dq_row + head * D + at, dq_BD.to(dq.dtype.element_ty), mask=known)
    first, at = begin * dk_row + group * D, col[:, None] * dk_row + d[None, :]
    tl.store(dk + first + at, dk_TD.to(dk.dtype.element_ty), mask=inside)
    tl.store(dv + first + at, dv_TD.to(dv.dtype.element_ty), mask=inside)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ends: Tensor, longest: int) -> Tensor:
        n, h, d = q.shape
        out, logs = q.new_empty(n, h, d), q.new_empty(h, n, dtype=torch.float32)
        _forward[(ends.shape[0] - 1, k.shape[1])](
            q, k, v, out, logs, ends, n, *_strides(q, k, v), d**-0.5, **_sizes(q, k, longest, FORWARD)
        )
        ctx.save_for_backward(q, k, v, out, logs, ends)
        ctx.longest = longest
        return out

    @staticmethod
    def backward(ctx: Any, d_out: Tensor) -> tuple[Any, ...]:
        q, k, v, out, logs, ends = ctx.saved_tensors
        d_out = d_out if d_out.stride(-1) == 1 else d_out.contiguous()
        n, _, d = q.shape
        dq, dk, dv = (x.new_empty(x.shape) for x in (q, k, v))
        sizes = _sizes(q, k, ctx.longest, _backward_sizes(_tile(ctx.longest), d))
        _backward[(ends.shape[0] - 1, k.shape[1])](
            q, k, v, out, logs, d_out, dq, dk, dv, ends, n, *_strides(q, k, v, d_out), d**-0.5, **sizes
        )
        return dq, dk, dv, None, None


def _strides(*tensors: Tensor) -> list[int]:
    return [stride for x in tensors for stride in x.stride()[:2]]


def _tile(longest: int) -> int:
    return max(16, width(longest))


def _sizes(q: Tensor, k: Tensor, longest: int, choice: tuple[int, int, int]) -> dict[str, Any]:
    queries, warps, stages = choice
    return {
        "HEADS": q.shape[1] // k.shape[1],
        "D": q.shape[2],
        "T": _tile(longest),
        "B": min(queries, _tile(longest)),
        "PRECISION": "ieee" if q.dtype == torch.float32 else "tf32",
        "num_warps": warps,
        "num_stages": stages,
    }


def attend(q_NHD: Tensor, k_NGD: Tensor, v_NGD: Tensor, ends_S: Tensor, longest: int) -> Tensor:
    """Attention of each token over its document up to itself. All tokens are in documents; empty ones may follow.

    No document may have more than `SHORT_DOCUMENT` tokens; heads have a power of two of columns, 16 to 128.
    """
    out: Tensor = _Attend.apply(q_NHD, k_NGD, v_NGD, ends_S, longest)
    return out
