"""A frozen projection with a low-rank adapter: y = x W' + bias + s (x A') B', and its gradients.

Library matmuls only. The product x A' is a few columns wide, so its cost is memory traffic, mostly of the wide matrices
it is computed from or added to. One matmul therefore does two things if the columns can be stored next to a matrix
that is read or written anyway:

    forward    wider than the input:  [x | x A'] [W | B]' ; the producer of x leaves columns free next to it
               otherwise:             x [W ; A]' gives y and x A', and B's product is added in place
    backward   the other way round

Legend: N tokens, K inputs, M outputs, R columns of all adapters of one input.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def weight_gradient(dy_NM: Tensor, x_NK: Tensor, dtype: torch.dtype) -> Tensor:
    """dy.T @ x in the weight's own type, without a rounding in between where the device can."""
    if dy_NM.is_cuda and dtype == torch.float32 and dy_NM.dtype != torch.float32:
        out: Tensor = torch.mm(dy_NM.t(), x_NK, out_dtype=dtype)
        return out
    return (dy_NM.t() @ x_NK).to(dtype)


class Stacked:
    """A frozen weight stacked with its adapter's matrices as the matmuls need them, in the weight's own type.

    `both` is [W | B] if there are more outputs than inputs, else [W ; A]: without it, each pass copies the weight.
    `layout` has, for each part of the output, its rows and which `rank` columns of B they have, if any.
    """

    def __init__(self, weight_MK: Tensor, layout: Sequence[tuple[int, int | None]], *, rank: int, scale: float) -> None:
        m, k = weight_MK.shape
        columns = rank * sum(index is not None for _, index in layout)
        more = _aligned(columns)
        if m > k:
            self.both = weight_MK.new_zeros(m, k + more)
            (self.weight, self.b), self.a = self.both.split((k, more), dim=1), weight_MK.new_zeros(more, k)
        else:
            self.both = weight_MK.new_zeros(m + more, k)
            (self.weight, self.a), self.b = self.both.split((m, more)), weight_MK.new_zeros(m, more)
        self.weight.copy_(weight_MK)
        self.scale, self._columns, self._layout, self._rank = scale, columns, layout, rank

    def update(self, a_RK: Tensor, b_Mr: Tensor) -> None:
        """Copies the current A and B in. The parts of `b_Mr` are one below the other, and are scaled."""
        self.a[: self._columns].copy_(a_RK)
        parts = self._parts(self.b)
        for place, part in zip(parts, b_Mr.split([len(place) for place in parts]), strict=True):
            torch.mul(part, self.scale, out=place)

    def gradients(self, d_a_RK: Tensor, d_b_MR: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of the arguments of `update`."""
        return d_a_RK[: self._columns], torch.cat(self._parts(d_b_MR)).mul_(self.scale)

    def _parts(self, b_MR: Tensor) -> list[Tensor]:
        rows = b_MR.split([rows for rows, _ in self._layout])
        indices = [index for _, index in self._layout]
        rank = self._rank
        return [part[:, i * rank : (i + 1) * rank] for part, i in zip(rows, indices, strict=True) if i is not None]


def input_buffer(x_NK: Tensor, stacked: Stacked | None) -> Tensor | None:
    """A buffer for the input with free columns for x A', if the stacked weights need one."""
    if stacked is None or stacked.weight.shape[0] <= stacked.weight.shape[1]:
        return None
    return x_NK.new_empty(x_NK.shape[0], stacked.both.shape[1], dtype=stacked.both.dtype)


def forward(
    x_NK: Tensor,
    weight_MK: Tensor,
    bias_M: Tensor | None,
    a_RK: Tensor,
    b_MR: Tensor,
    *,
    both: Tensor | None = None,
    buffer: Tensor | None = None,
    in_place: bool = False,
) -> tuple[Tensor, Tensor]:
    """(y_NM, x A', which the backward pass needs).

    `both` is that of the stacked weights, `buffer` the one that x was written to. `in_place` may give y with a gap
    after each row, and does not work with selective recomputation, which keeps values that would be overwritten.
    """
    m, k = weight_MK.shape
    if m > k:
        if buffer is None:
            between_NR = x_NK @ a_RK.t()
            buffer = torch.cat((x_NK, between_NR), dim=1)
        else:
            between_NR = buffer[:, k:]
            torch.mm(x_NK, a_RK.t(), out=between_NR)
        return F.linear(buffer, torch.cat((weight_MK, b_MR), dim=1) if both is None else both, bias_M), between_NR
    if not in_place or bias_M is not None:
        between_NR = x_NK @ a_RK.t()
        return torch.addmm(F.linear(x_NK, weight_MK, bias_M), between_NR, b_MR.t()), between_NR
    joined = torch.cat((weight_MK, a_RK)) if both is None else both
    y_NM, between_NR = (x_NK @ joined.t()).split((m, len(a_RK)), dim=1)
    # A copy, because the few columns would keep all of them alive.
    return y_NM.addmm_(between_NR, b_MR.t()), between_NR.contiguous()


def backward(
    dy_NM: Tensor,
    x_NK: Tensor,
    between_NR: Tensor,
    weight_MK: Tensor,
    a_RK: Tensor,
    b_MR: Tensor,
    dtype: torch.dtype,
    *,
    both: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of (x, A, B); the first maybe with a gap after each row, the last two in the type that is named."""
    m, k = weight_MK.shape
    if k > m:
        d_between_NR = dy_NM @ b_MR
        joined = torch.cat((weight_MK, a_RK)) if both is None else both
        dx = torch.cat((dy_NM, d_between_NR), dim=1) @ joined
    else:
        # A square weight is stacked as [W ; A], which cannot be used here.
        joined = torch.cat((weight_MK, b_MR), dim=1) if both is None or k == m else both
        dx, d_between_NR = (dy_NM @ joined).split((k, len(a_RK)), dim=1)
        dx.addmm_(d_between_NR, a_RK)
    return dx, weight_gradient(d_between_NR, x_NK, dtype), weight_gradient(dy_NM, between_NR, dtype)


def cast(a_RK: Tensor, b_MR: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Both matrices in the compute type, filled up with zeros; the scale goes into B, which is small."""
    more = _aligned(a_RK.shape[0]) - a_RK.shape[0]
    a, b = a_RK.to(dtype), (b_MR * scale).to(dtype)
    return (F.pad(a, (0, 0, 0, more)), F.pad(b, (0, more))) if more else (a, b)


def _aligned(columns: int) -> int:
    """As many as keep rows at multiples of 32 bytes in 16 bits, which kernels and matmuls read faster."""
    return -(-columns // 16) * 16
