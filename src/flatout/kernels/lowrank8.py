"""A frozen projection in 8 bits with its adapter beside it: `lowrank`, on the scales of `fp8`.

The weight is rounded once; with one scale, and room above its largest value, its adapter's columns lie in the same
matrix. What the adapter learns is computed from what lies in memory anyway, the 8-bit input and gradient, by a kernel
of our own: a library's matmul would want them the other way round.

Legend: N tokens, K inputs, M outputs, R columns of all adapters of one input.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from flatout.kernels import fp8
from flatout.kernels.launch import cdiv, num_processors, width
from flatout.kernels.lowrank import Home

# An adapter may grow to so many times the largest weight before it saturates.
HEADROOM = 8.0


@triton.jit
def _learn(
    wide, narrow, out, inverse, N, K, R, wide_row, narrow_row,
    TILES: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, WIDTH: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    col, r = tl.program_id(0) * COLS + tl.arange(0, COLS), tl.program_id(2) * WIDTH + tl.arange(0, WIDTH)
    sums = tl.zeros((COLS, WIDTH), dtype=tl.float32)
    for tile in range(TILES):
        row = (tile * tl.num_programs(1) + tl.program_id(1)) * ROWS + tl.arange(0, ROWS)
        far = row[:, None].to(tl.int64)
        x = tl.load(wide + far * wide_row + col[None, :], mask=(row[:, None] < N) & (col[None, :] < K), other=0.0)
        y = tl.load(narrow + far * narrow_row + r[None, :], mask=(row[:, None] < N) & (r[None, :] < R), other=0.0)
        sums += tl.dot(tl.trans(x.to(DOT)), y.to(DOT), input_precision=PRECISION)
    at = (tl.program_id(1) * K + col[:, None]) * R + r[None, :]
    tl.store(out + at, sums * tl.load(inverse), mask=(col[:, None] < K) & (r[None, :] < R))


def learnt(wide8_NK: Tensor, inverse: Tensor, narrow_NR: Tensor) -> Tensor:
    """wide.T @ narrow in fp32, [K, R], from 8 bits as they lie; rows may have gaps."""
    (n, k), r = wide8_NK.shape, narrow_NR.shape[1]
    rows, cols, columns = 64, 128, min(64, max(16, width(r)))
    across = cdiv(k, cols)
    down = max(1, min(cdiv(n, rows), 4 * num_processors(wide8_NK) // across))
    out = torch.empty(down, k, r, dtype=torch.float32, device=wide8_NK.device)
    exact = narrow_NR.dtype == torch.float32  # the tests' way
    _learn[(across, down, cdiv(r, columns))](
        wide8_NK, narrow_NR, out, inverse, n, k, r, wide8_NK.stride(0), narrow_NR.stride(0),
        TILES=cdiv(n, rows * down), ROWS=rows, COLS=cols, WIDTH=columns,
        DOT=tl.float32 if exact else tl.bfloat16, PRECISION="ieee" if exact else "tf32", num_warps=4, num_stages=3,
    )  # fmt: skip
    return out.sum(0)


class Frozen:
    """A weight at home, in 8 bits both ways round, and its adapter's matrices as `place` last took them in.

    `both` is [W | B] or [W ; A] as at home, `back` the same transposed; `apart` is A, or B transposed. Values of A or B
    beyond the range of the weight's scale saturate here, and not in the 16-bit product that is added beside.
    """

    def __init__(self, home: Home) -> None:
        weight = home.weight
        (m, k), r = weight.shape, len(home.a)
        largest = torch.finfo(fp8.FORWARD).max / (HEADROOM * float(weight.abs().max().clamp(min=1e-12)))
        self.home, self.wide = home, m > k
        self.scale = fp8.Scale.own(fp8.FORWARD, weight.device, 2.0 ** math.floor(math.log2(largest)))
        self.both = torch.zeros(home.both.shape, dtype=fp8.FORWARD, device=weight.device)
        self.back = torch.zeros(home.both.shape[::-1], dtype=fp8.FORWARD, device=weight.device)
        self.apart = torch.zeros(r, k if self.wide else m, dtype=fp8.FORWARD, device=weight.device)
        copy = fp8.quantise(weight.contiguous(), self.scale, count=False)
        _put(copy.rows, self.both[:m, :k])
        _put(copy.cols, self.back[:k, :m])

    def input(self, n: int) -> Tensor:
        """Where n inputs should be written: with room beside them where columns are to lie. So is `gradient`."""
        columns = self.both.shape[1] if self.wide else self.home.weight.shape[1]
        return torch.empty(n, columns, dtype=fp8.FORWARD, device=self.both.device)

    def gradient(self, n: int) -> Tensor:
        columns = self.home.weight.shape[0] if self.wide else self.back.shape[1]
        return torch.empty(n, columns, dtype=fp8.BACKWARD, device=self.both.device)

    def place(self, a_RK: Tensor, b_Mr: Tensor) -> None:
        self.home.place(a_RK, b_Mr)
        a, b = (self._eight(matrix) for matrix in (self.home.a, self.home.b))
        (m, k), beside = self.home.weight.shape, b if self.wide else a
        _put(beside, self.both[:, k:] if self.wide else self.both[m:])
        _put(beside.t(), self.back[k:] if self.wide else self.back[:, m:])
        _put(a if self.wide else b.t(), self.apart)

    def _eight(self, x: Tensor) -> Tensor:
        most = self.scale.largest
        return (x.float() * self.scale.scale).clamp_(-most, most).to(fp8.FORWARD)

    def forward(self, x8: Tensor, given: fp8.Scale, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """(y_NM, what lies between A and B), of an `input`."""
        (m, k), own = self.home.weight.shape, self.scale.inverse
        if self.wide:
            between = fp8.matmul(x8[:, :k], self.apart, given.inverse, own, dtype=dtype, fast=True)
            fp8.write(between, given, into=x8[:, k:], count=False)
            return fp8.matmul(x8, self.both, given.inverse, own, dtype=dtype, fast=True), between
        y = fp8.matmul(x8, self.both, given.inverse, own, dtype=dtype, fast=True)
        y, between = y.split((m, len(self.apart)), dim=1)
        return y.addmm_(between, self.home.b.t()), between.contiguous()

    def backward(
        self, dy8: Tensor, gradient: fp8.Scale, x8: Tensor, given: fp8.Scale, between: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of (x, A, B), from a `gradient`."""
        (m, k), own, dtype = self.home.weight.shape, self.scale.inverse, between.dtype
        if self.wide:
            dx = fp8.matmul(dy8, self.back, gradient.inverse, own, dtype=dtype, fast=True)
            dx, d_between = dx.split((k, len(self.apart)), dim=1)
            dx.addmm_(d_between, self.home.a)
        else:
            d_between = fp8.matmul(dy8[:, :m], self.apart, gradient.inverse, own, dtype=dtype, fast=True)
            fp8.write(d_between, gradient, into=dy8[:, m:], count=False)
            dx = fp8.matmul(dy8, self.back, gradient.inverse, own, dtype=dtype, fast=True)
        d_a = learnt(x8[:, :k], given.inverse, d_between).t()
        d_b = learnt(dy8[:, :m], gradient.inverse, between)
        d_a, d_b = self.home.learnt(d_a, d_b)
        return dx, d_a[None], d_b[None]


def _put(x8: Tensor, place: Tensor) -> None:
    """Bytes, because not every device copies 8-bit numbers between layouts."""
    place.view(torch.int8).copy_(x8.view(torch.int8))
