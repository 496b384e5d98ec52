"""A frozen projection with a low-rank adapter beside it: y = x W' + bias + s (x A') B', and its gradients.

Library matmuls only. What lies between A and B is a few columns wide, and adding its product to a wide result would
read and write that result once more; so where the result is wider than the input, those columns are laid beside the
input instead, and one matmul does both. The other way round in the backward pass.

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


def forward(
    x_NK: Tensor,
    weight_MK: Tensor,
    bias_M: Tensor | None,
    a_RK: Tensor,
    b_MR: Tensor,
    scale: float,
    *,
    in_place: bool = False,
) -> tuple[Tensor, Tensor]:
    """(y_NM, what lies between the two matrices, which the backward pass needs)."""
    a, b = a_RK.to(x_NK.dtype), b_MR.to(x_NK.dtype)
    between_NR = (x_NK @ a.t()) * scale
    if weight_MK.shape[0] > weight_MK.shape[1]:
        beside = torch.cat((x_NK, between_NR), dim=1)
        return F.linear(beside, torch.cat((weight_MK, b), dim=1), bias_M), between_NR
    y = F.linear(x_NK, weight_MK, bias_M)
    # Out of place, addmm copies its first argument. Not where selective recomputation keeps the product.
    return (y.addmm_(between_NR, b.t()) if in_place else torch.addmm(y, between_NR, b.t())), between_NR


def backward(
    dy_NM: Tensor, x_NK: Tensor, between_NR: Tensor, weight_MK: Tensor, a_RK: Tensor, b_MR: Tensor, scale: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of (x, A, B); the last two in the types of A and B."""
    a, b = a_RK.to(x_NK.dtype), b_MR.to(x_NK.dtype)
    d_between_NR = (dy_NM @ b) * scale
    d_b = weight_gradient(dy_NM, between_NR, b_MR.dtype)
    d_a = weight_gradient(d_between_NR, x_NK, a_RK.dtype)
    if weight_MK.shape[1] > weight_MK.shape[0]:
        dx = torch.cat((dy_NM, d_between_NR), dim=1) @ torch.cat((weight_MK, a), dim=0)
    else:
        dx = (dy_NM @ weight_MK).addmm_(d_between_NR, a)
    return dx, d_a, d_b
