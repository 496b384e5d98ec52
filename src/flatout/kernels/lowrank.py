"""A frozen projection with a low-rank adapter beside it: y = x W' + bias + s (x A') B', and its gradients.

Library matmuls only. What lies between A and B is a few columns wide, so it costs bytes, not operations, and the bytes
are those of the wide matrices it is computed from or added to. One matmul therefore does two things wherever the
columns can lie beside a matrix that is read or written anyway:

    forward    wider than the input:  [x | x A'] [W | B]' ; whoever makes x leaves room beside it
               otherwise:             x [W ; A]' gives y and what lies between, and B's product is added in place
    backward   the other way round

Legend: N tokens, K inputs, M outputs, R columns of all adapters of one input.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def weight_gradient(dy_NM: Tensor, x_NK: Tensor, dtype: torch.dtype) -> Tensor:
    """dy.T @ x in the weight's own type, without a rounding in between where the device can."""
    if dy_NM.is_cuda and dtype == torch.float32 and dy_NM.dtype != torch.float32:
        out: Tensor = torch.mm(dy_NM.t(), x_NK, out_dtype=dtype)
        return out
    return (dy_NM.t() @ x_NK).to(dtype)


def room(x_NK: Tensor, weight_MK: Tensor, a_RK: Tensor | None) -> Tensor | None:
    """Where an input like this should be written if columns are to lie beside it."""
    if a_RK is None or weight_MK.shape[0] <= weight_MK.shape[1]:
        return None
    return x_NK.new_empty(x_NK.shape[0], weight_MK.shape[1] + _aligned(a_RK.shape[0]))


def forward(
    x_NK: Tensor,
    weight_MK: Tensor,
    bias_M: Tensor | None,
    a_RK: Tensor,
    b_MR: Tensor,
    scale: float,
    *,
    beside: Tensor | None = None,
    in_place: bool = False,
) -> tuple[Tensor, Tensor]:
    """(y_NM, x A', which the backward pass needs).

    `beside` is the room that x was written to. `in_place` may give y with a gap after each row, and is not for
    selective recomputation, which keeps what would be written over.
    """
    k, (a, b) = x_NK.shape[1], _cast(a_RK, b_MR, scale, x_NK.dtype)
    if weight_MK.shape[0] > weight_MK.shape[1]:
        if beside is None:
            between_NR = x_NK @ a.t()
            beside = torch.cat((x_NK, between_NR), dim=1)
        else:
            between_NR = beside[:, k:]
            torch.mm(x_NK, a.t(), out=between_NR)
        return F.linear(beside, torch.cat((weight_MK, b), dim=1), bias_M), between_NR
    if not in_place or bias_M is not None:
        between_NR = x_NK @ a.t()
        return torch.addmm(F.linear(x_NK, weight_MK, bias_M), between_NR, b.t()), between_NR
    both = x_NK @ torch.cat((weight_MK, a)).t()
    y_NM, between_NR = both.split((weight_MK.shape[0], a.shape[0]), dim=1)
    # A copy, or the few columns would keep all of them alive.
    return y_NM.addmm_(between_NR, b.t()), between_NR.contiguous()


def backward(
    dy_NM: Tensor, x_NK: Tensor, between_NR: Tensor, weight_MK: Tensor, a_RK: Tensor, b_MR: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of (x, A, B); the first maybe with a gap after each row, the last two in the types of A and B."""
    r, (a, b) = a_RK.shape[0], _cast(a_RK, b_MR, scale, x_NK.dtype)
    if weight_MK.shape[1] > weight_MK.shape[0]:
        d_between_NR = dy_NM @ b
        dx = torch.cat((dy_NM, d_between_NR), dim=1) @ torch.cat((weight_MK, a))
    else:
        both = dy_NM @ torch.cat((weight_MK, b), dim=1)
        dx, d_between_NR = both.split((weight_MK.shape[1], a.shape[0]), dim=1)
        dx.addmm_(d_between_NR, a)
    d_a = weight_gradient(d_between_NR, x_NK, a_RK.dtype)
    d_b = weight_gradient(dy_NM, between_NR, b_MR.dtype)
    return dx, d_a[:r], d_b[:, :r] * scale


def _cast(a_RK: Tensor, b_MR: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Both matrices in the compute type, filled up with zeros; the scale goes into B, which is small."""
    more = _aligned(a_RK.shape[0]) - a_RK.shape[0]
    a, b = a_RK.to(dtype), (b_MR * scale).to(dtype)
    return (F.pad(a, (0, 0, 0, more)), F.pad(b, (0, more))) if more else (a, b)


def _aligned(columns: int) -> int:
    """As many as keep rows at multiples of 32 bytes in 16 bits, which kernels and matmuls read faster."""
    return -(-columns // 16) * 16
