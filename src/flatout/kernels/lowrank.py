"""A frozen projection with a low-rank adapter: y = x W' + bias + s (x A') B', and its gradients.

Library matmuls only. The product x A' is a few columns wide, so its cost is memory traffic, mostly of the wide matrices
it is computed from or added to. One matmul therefore does two things if the columns can be stored next to a matrix
that is read or written anyway:

    forward    wider than the input:  [x | x A'] [W | B]' ; the producer of x leaves columns free next to it
               otherwise:             x [W ; A]' gives y and x A', and B's product is added in place
    backward   the other way round

A bank has several adapters for one projection. All of them are stacked, and each token has a weight for each adapter
(`mix_NE`), which its columns of x A' are multiplied by: a token's own adapter has weight 1 and the others 0, or it is a
weighted mix. The few columns of the other adapters cost less than sorting the tokens and a pass over y per adapter.

Legend: N tokens, K inputs, M outputs, R columns of all adapters of one input, E adapters of a bank.
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
    `layout` has, for each part of the output, its rows and which `rank` columns of B they have, if any; `count` is the
    number of adapters of a bank.
    """

    def __init__(
        self, weight_MK: Tensor, layout: Sequence[tuple[int, int | None]], *, rank: int, scale: float, count: int = 1
    ) -> None:
        m, k = weight_MK.shape
        columns = count * rank * sum(index is not None for _, index in layout)
        more = _aligned(columns)
        if m > k:
            self.both = weight_MK.new_zeros(m, k + more)
            (self.weight, self.b), self.a = self.both.split((k, more), dim=1), weight_MK.new_zeros(more, k)
        else:
            self.both = weight_MK.new_zeros(m + more, k)
            (self.weight, self.a), self.b = self.both.split((m, more)), weight_MK.new_zeros(m, more)
        self.weight.copy_(weight_MK)
        self.scale, self.columns, self._layout, self._rank, self.count = scale, columns, layout, rank, count

    def update(self, a: Tensor, b: Tensor) -> None:
        """Copies the current A and B of each adapter in. The parts of B are one below the other, and are scaled."""
        self.a[: self.columns].copy_(a.flatten(0, 1))
        for e in range(self.count):
            parts = self._parts(self.b, e)
            for place, part in zip(parts, b[e].split([len(place) for place in parts]), strict=True):
                torch.mul(part, self.scale, out=place)

    def gradients(self, d_a_RK: Tensor, d_b_MR: Tensor) -> tuple[Tensor, Tensor]:
        """The gradients of the arguments of `update`."""
        d_a = d_a_RK[: self.columns].unflatten(0, (self.count, -1))
        d_b = torch.stack([torch.cat(self._parts(d_b_MR, e)) for e in range(self.count)])
        return d_a, d_b.mul_(self.scale)

    def _parts(self, b_MR: Tensor, adapter: int) -> list[Tensor]:
        rows = b_MR.split([rows for rows, _ in self._layout])
        indices = [index for _, index in self._layout]
        rank, first = self._rank, adapter * self.columns // self.count
        return [
            part[:, first + i * rank : first + (i + 1) * rank]
            for part, i in zip(rows, indices, strict=True)
            if i is not None
        ]


class Mixed:
    """The weight of each adapter of a bank for each token, applied to the columns of x A' in both passes.

    Legend: E adapters, C columns of one adapter, R = E x C columns of all, before those that only fill up.
    """

    def __init__(self, mix_NE: Tensor, *, columns: int, dtype: torch.dtype, learns: bool = False) -> None:
        """`columns` are those of all adapters. `learns`: the weights need a gradient, and x A' is kept for it."""
        self._mix_NE1, self._columns, self._learns = mix_NE.to(dtype)[:, :, None], columns // mix_NE.shape[1], learns
        self.raw: Tensor | None = None  # x A' before the weights were applied

    def forward_(self, between_NR: Tensor) -> None:
        part_NEC = self._part(between_NR)
        self.raw = part_NEC.clone() if self._learns else None
        part_NEC.mul_(self._mix_NE1)

    def backward_(self, d_between_NR: Tensor, raw_NEC: Tensor | None) -> Tensor | None:
        """Turns the gradient of the weighted columns into that of x A', and returns the gradient of the weights."""
        part_NEC = self._part(d_between_NR)
        d_mix = None if raw_NEC is None else (part_NEC.float() * raw_NEC).sum(-1)
        part_NEC.mul_(self._mix_NE1)
        return d_mix

    def _part(self, between_NR: Tensor) -> Tensor:
        num = self._mix_NE1.shape[1]
        return between_NR[:, : num * self._columns].unflatten(1, (num, self._columns))


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
    mixed: Mixed | None = None,
) -> tuple[Tensor, Tensor]:
    """(y_NM, x A', which the backward pass needs, weighted by `mixed` in a bank).

    `both` is that of the stacked weights, `buffer` the one that x was written to. `in_place` may give y with a gap
    after each row, and does not work with selective recomputation, which keeps values that would be overwritten.
    """
    m, k = weight_MK.shape
    if m > k:
        if buffer is None:
            between_NR = x_NK @ a_RK.t()
            if mixed is not None:
                mixed.forward_(between_NR)
            buffer = torch.cat((x_NK, between_NR), dim=1)
        else:
            between_NR = buffer[:, k:]
            torch.mm(x_NK, a_RK.t(), out=between_NR)
            if mixed is not None:
                mixed.forward_(between_NR)
        return F.linear(buffer, torch.cat((weight_MK, b_MR), dim=1) if both is None else both, bias_M), between_NR
    if not in_place or bias_M is not None:
        between_NR = x_NK @ a_RK.t()
        if mixed is not None:
            mixed.forward_(between_NR)
        return torch.addmm(F.linear(x_NK, weight_MK, bias_M), between_NR, b_MR.t()), between_NR
    joined = torch.cat((weight_MK, a_RK)) if both is None else both
    y_NM, between_NR = (x_NK @ joined.t()).split((m, len(a_RK)), dim=1)
    if mixed is not None:
        mixed.forward_(between_NR)
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
    mixed: Mixed | None = None,
    raw: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of (x, A, B, the weights of a bank if `raw` has x A' before they were applied).

    The first maybe has a gap after each row, those of A and B are in the type that is named.
    """
    m, k = weight_MK.shape
    d_mix = None
    if k > m:
        d_between_NR = dy_NM @ b_MR
        if mixed is not None:
            d_mix = mixed.backward_(d_between_NR, raw)
        joined = torch.cat((weight_MK, a_RK)) if both is None else both
        dx = torch.cat((dy_NM, d_between_NR), dim=1) @ joined
    else:
        # A square weight is stacked as [W ; A], which cannot be used here.
        joined = torch.cat((weight_MK, b_MR), dim=1) if both is None or k == m else both
        dx, d_between_NR = (dy_NM @ joined).split((k, len(a_RK)), dim=1)
        if mixed is not None:
            d_mix = mixed.backward_(d_between_NR, raw)
        dx.addmm_(d_between_NR, a_RK)
    return dx, weight_gradient(d_between_NR, x_NK, dtype), weight_gradient(dy_NM, between_NR, dtype), d_mix


def cast(a_RK: Tensor, b_MR: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Both matrices in the compute type, filled up with zeros; the scale goes into B, which is small."""
    more = _aligned(a_RK.shape[0]) - a_RK.shape[0]
    a, b = a_RK.to(dtype), (b_MR * scale).to(dtype)
    return (F.pad(a, (0, 0, 0, more)), F.pad(b, (0, more))) if more else (a, b)


def _aligned(columns: int) -> int:
    """As many as keep rows at multiples of 32 bytes in 16 bits, which kernels and matmuls read faster."""
    return -(-columns // 16) * 16
