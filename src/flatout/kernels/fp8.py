"""8-bit matmuls: matrices in FP8 with one scale each, by rows and by columns, as Hopper's tensor cores need them.

A matrix x is stored as x * scale. Weights are scaled by their current largest value; activations and gradients by a
recent largest value (delayed scaling), because a kernel does not know it before it has written them. Values beyond
the range saturate. Forward values take e4m3, gradients e5m2, which has less precision and more range.

Both operands of an FP8 matmul must be contiguous along the summed dimension, so a matrix that is multiplied along its
rows in one product and along its columns in another is stored twice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flatout.kernels.launch import cdiv

FORWARD, BACKWARD = torch.float8_e4m3fn, torch.float8_e5m2
# Programs write their largest value to one of this many slots, to avoid contention.
SLOTS = 64
# How fast an old largest value is forgotten, and how far above it the range ends.
MEMORY, HEADROOM = 0.95, 2.0


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The scale of one matrix that is written again and again, and the largest values seen since the last step."""

    dtype: torch.dtype
    scale: Tensor
    inverse: Tensor
    amax: Tensor

    @classmethod
    def own(cls, dtype: torch.dtype, device: torch.device, value: float = 1.0) -> Scale:
        """A scale that the owner of the matrix sets, without delay."""
        scale = torch.tensor(value, device=device)
        return cls(dtype=dtype, scale=scale, inverse=1.0 / scale, amax=torch.zeros(1, device=device))

    @property
    def largest(self) -> float:
        return float(torch.finfo(self.dtype).max)

    def empty(self, n: int, m: int, *, device: torch.device) -> Both:
        return Both(
            rows=torch.empty(n, m, dtype=self.dtype, device=device),
            cols=torch.empty(m, n, dtype=self.dtype, device=device),
            inverse=self.inverse,
        )


def slot(fp8: Scale | None) -> tuple[Tensor | None, Tensor | None]:
    """A kernel's arguments for an optional scale, like `limits` and `slots`."""
    return (None, None) if fp8 is None else (fp8.scale, fp8.amax)


def limits(fp8: Scale | None) -> tuple[float, float]:
    return (0.0, 0.0) if fp8 is None else (-fp8.largest, fp8.largest)


def slots(fp8: Scale | None) -> int:
    return 1 if fp8 is None else fp8.amax.numel()


@dataclass(frozen=True, kw_only=True)
class Both:
    """A matrix [n, m] in 8 bits, by rows and by columns ([m, n])."""

    rows: Tensor
    cols: Tensor
    inverse: Tensor


class Scales:
    """All delayed scales of a model in a few buffers, so that one small update serves them all.

    A scale takes a row of four, because the matmul wants it at a multiple of 16 bytes.
    """

    def __init__(self, dtypes: list[torch.dtype], device: torch.device) -> None:
        self.dtypes = dtypes
        self.scale = torch.ones(len(dtypes), 4, device=device)
        self.inverse = torch.ones_like(self.scale)
        self.recent = torch.zeros(len(dtypes), 1, device=device)
        self.amax = torch.zeros(len(dtypes), SLOTS, device=device)
        self._largest = torch.tensor([float(torch.finfo(d).max) for d in dtypes], device=device)[:, None]

    def __getitem__(self, i: int) -> Scale:
        return Scale(dtype=self.dtypes[i], scale=self.scale[i, 0], inverse=self.inverse[i, 0], amax=self.amax[i])

    @torch.no_grad()
    def advance(self) -> None:
        """Updates the scales from the last step's values. They are powers of two, so that scaling rounds nothing."""
        seen = self.amax.amax(dim=1, keepdim=True)
        self.recent.copy_(torch.maximum(seen, self.recent * MEMORY))
        wanted = torch.exp2(torch.floor(torch.log2(self._largest / (HEADROOM * self.recent))))
        # A matrix that was never seen, or was all zero or not finite, keeps its scale.
        known = (self.recent > 0) & torch.isfinite(wanted) & (wanted > 0)
        self.scale.copy_(torch.where(known, wanted, self.scale))
        self.inverse.copy_(1.0 / self.scale)
        self.recent.copy_(torch.where(torch.isfinite(self.recent), self.recent, 0.0))
        self.amax.zero_()


@triton.jit
def _quantise(
    x, out, out_t, scale, amax, N, M, low, high,
    COUNT: tl.constexpr, BOTH: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = (row[:, None] < N) & (col[None, :] < M)
    at = row[:, None].to(tl.int64) * M + col[None, :]
    y = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    if COUNT:
        tl.atomic_max(amax + (tl.program_id(0) + tl.program_id(1)) % SLOTS, tl.max(tl.max(tl.abs(y), axis=1), axis=0))
    y = tl.minimum(tl.maximum(y * tl.load(scale), low), high).to(out.dtype.element_ty)
    tl.store(out + at, y, mask=inside)
    if BOTH:
        tl.store(out_t + col[:, None].to(tl.int64) * N + row[None, :], tl.trans(y), mask=tl.trans(inside))


@triton.jit
def _transpose(x, out, N, M, ROWS: tl.constexpr, COLS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(1) * COLS + tl.arange(0, COLS)
    inside = (row[:, None] < N) & (col[None, :] < M)
    y = tl.load(x + row[:, None].to(tl.int64) * M + col[None, :], mask=inside, other=0)
    tl.store(out + col[:, None].to(tl.int64) * N + row[None, :], tl.trans(y), mask=tl.trans(inside))


def quantise(x_NM: Tensor, fp8: Scale, *, count: bool = True, into: Both | None = None) -> Both:
    """A matrix in 8 bits, by rows and by columns; its largest value is recorded unless the scale is its own."""
    n, m = x_NM.shape
    both = fp8.empty(n, m, device=x_NM.device) if into is None else into
    # Triton 3.6 transposes 8-bit tiles wrongly where they were made from 32-bit ones: those take a second pass.
    at_once = x_NM.dtype.itemsize == 2
    _quantise[(cdiv(n, 64), cdiv(m, 64))](
        x_NM, both.rows, both.cols, *slot(fp8), n, m, *limits(fp8),
        COUNT=count, BOTH=at_once, SLOTS=slots(fp8), ROWS=64, COLS=64, num_warps=4,
    )  # fmt: skip
    if not at_once:
        transposed(both.rows, into=both.cols)
    return both


def transposed(x8_NM: Tensor, *, into: Tensor | None = None) -> Tensor:
    """The columns of a matrix that was written by rows."""
    n, m = x8_NM.shape
    out = torch.empty(m, n, dtype=x8_NM.dtype, device=x8_NM.device) if into is None else into
    _transpose[(cdiv(n, 128), cdiv(m, 64))](
        x8_NM.view(torch.int8), out.view(torch.int8), n, m, ROWS=128, COLS=64, num_warps=4
    )
    return out


class Weight:
    """A weight's 8-bit copies, refreshed once per step with its current scale."""

    def __init__(self, weight: Tensor) -> None:
        self.scale = Scale.own(FORWARD, weight.device)
        self.both = self.scale.empty(*weight.shape, device=weight.device)

    @staticmethod
    @torch.no_grad()
    def refresh(weights: list[Tensor], copies: list[Weight]) -> None:
        """All weights at once: their largest values in one pass, then a pass over each."""
        largest = torch.stack(torch._foreach_norm(weights, ord=float("inf")))
        scales = torch.exp2(torch.floor(torch.log2(torch.finfo(FORWARD).max / largest.clamp(min=1e-12))))
        inverses = 1.0 / scales
        for i, (weight, copy) in enumerate(zip(weights, copies, strict=True)):
            copy.scale.scale.copy_(scales[i])
            copy.scale.inverse.copy_(inverses[i])
            quantise(weight.detach(), copy.scale, count=False, into=copy.both)


def matmul(a: Tensor, b_t: Tensor, a_inverse: Tensor, b_inverse: Tensor, *, dtype: torch.dtype, fast: bool) -> Tensor:
    """a @ b_t.T of 8-bit matrices, both contiguous along the summed dimension. `fast` sums in fewer bits."""
    if not a.is_cuda:  # the tests' way: exact products of the same 8-bit values
        product = (a.float() * a_inverse) @ (b_t.float() * b_inverse).t()
        return product.to(dtype)
    out: Any = torch._scaled_mm(a, b_t.t(), scale_a=a_inverse, scale_b=b_inverse, out_dtype=dtype, use_fast_accum=fast)
    result: Tensor = out
    return result
