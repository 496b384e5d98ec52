"""Cross-entropy of rows of logits: the loss, and softmax - one-hot, which overwrites the logits.

A row is read twice, the second time from the cache, and written once.
Legend: R rows, V vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flatout.kernels.fp8 import Both, Scale, limits
from flatout.kernels.launch import cdiv


@triton.jit
def _rows(logits, targets, losses, norms, ignored, V: tl.constexpr, WRITE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * V
    target = tl.load(targets + row)
    most = -float("inf")
    total = 0.0
    for at in range(0, V, BLOCK):
        col = at + tl.arange(0, BLOCK)
        x = tl.load(start + col, mask=col < V, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(most, tl.max(x, axis=0))
        total = total * tl.exp(most - higher) + tl.sum(tl.exp(x - higher), axis=0)
        most = higher
    norm = most + tl.log(total)
    trained = target != ignored
    x_target = tl.load(start + tl.where(trained, target, 0)).to(tl.float32)
    tl.store(losses + row, tl.where(trained, norm - x_target, 0.0))
    tl.store(norms + row, norm)
    if WRITE:
        # The target's logit was read above; every program writes its own row only.
        for at in range(0, V, BLOCK):
            col = at + tl.arange(0, BLOCK)
            x = tl.load(start + col, mask=col < V, other=-float("inf")).to(tl.float32)
            g = tl.exp(x - norm) - tl.where(col == target, 1.0, 0.0)
            tl.store(start + col, tl.where(trained, g, 0.0).to(logits.dtype.element_ty), mask=col < V)


@triton.jit
def _gradient8(
    logits, targets, norms, out, out_t, scale, R, V, ignored, low, high,
    ROWS: tl.constexpr, COLS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    col = tl.program_id(0) * COLS + tl.arange(0, COLS)
    inside = (row[:, None] < R) & (col[None, :] < V)
    at = row[:, None].to(tl.int64) * V + col[None, :]
    target = tl.load(targets + row, mask=row < R, other=ignored)
    norm = tl.load(norms + row, mask=row < R, other=0.0)
    x = tl.load(logits + at, mask=inside, other=-float("inf")).to(tl.float32)
    g = tl.exp(x - norm[:, None]) - tl.where(col[None, :] == target[:, None], 1.0, 0.0)
    g = tl.where((target != ignored)[:, None], g, 0.0) * tl.load(scale)
    g = tl.minimum(tl.maximum(g, low), high).to(out.dtype.element_ty)
    tl.store(out + at, g, mask=inside)
    tl.store(out_t + col[:, None].to(tl.int64) * R + row[None, :], tl.trans(g), mask=tl.trans(inside))


IGNORED = -100
BLOCK = 4096


def cross_entropy_(logits_RV: Tensor, targets_R: Tensor) -> tuple[Tensor, Tensor]:
    """The summed loss, and the logits' gradient, which overwrites the logits."""
    losses, _ = _losses(logits_RV, targets_R, write=True)
    return losses.sum(), logits_RV


def cross_entropy8(logits_RV: Tensor, targets_R: Tensor, fp8: Scale) -> tuple[Tensor, Both]:
    """The summed loss, and the logits' gradient in 8 bits, by rows and by columns.

    The gradient is in [-1, 1], so its scale is fixed. 16-bit logits only (see `fp8.quantise`).
    """
    r, v = logits_RV.shape
    losses, norms = _losses(logits_RV, targets_R, write=False)
    both = fp8.empty(r, v, device=logits_RV.device)
    _gradient8[(cdiv(v, 128), cdiv(r, 32))](
        logits_RV, targets_R, norms, both.rows, both.cols, fp8.scale, r, v, IGNORED, *limits(fp8),
        ROWS=32, COLS=128, num_warps=4,
    )  # fmt: skip
    return losses.sum(), both


def _losses(logits_RV: Tensor, targets_R: Tensor, *, write: bool) -> tuple[Tensor, Tensor]:
    r, v = logits_RV.shape
    losses = torch.empty(r, dtype=torch.float32, device=logits_RV.device)
    norms = torch.empty_like(losses)
    _rows[(r,)](logits_RV, targets_R, losses, norms, IGNORED, V=v, WRITE=write, BLOCK=BLOCK, num_warps=4)
    return losses, norms
