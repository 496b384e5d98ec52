"""The head's matmul and the loss in 8 bits, a chunk of rows at a time.

Legend: N tokens, C hidden width, V vocabulary.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from flatout.kernels import fp8
from flatout.kernels.rows import cross_entropy8


class Head8:
    """The head's 8-bit weight and the fixed scale of the logits' gradient, which is in [-1, 1]."""

    def __init__(self, weight_VC: Tensor) -> None:
        self.weight = fp8.Weight(weight_VC)
        # The largest power of two that leaves a bit of headroom above 1.
        power = 2.0 ** math.floor(math.log2(torch.finfo(fp8.BACKWARD).max / 2))
        self.gradient = fp8.Scale.own(fp8.BACKWARD, weight_VC.device, power)
        self.hidden = fp8.Scale.own(fp8.FORWARD, weight_VC.device)


class _LinearCrossEntropy8(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, targets: Tensor, chunk: int, head: Head8) -> Tensor:
        w, dtype = head.weight.both, hidden.dtype
        # The hidden state is narrow, so its current largest value is computed here.
        largest = float(torch.finfo(fp8.FORWARD).max)
        scale = torch.exp2(torch.floor(torch.log2(largest / hidden.abs().amax().float().clamp(min=1e-12))))
        head.hidden.scale.copy_(scale)
        head.hidden.inverse.copy_(1.0 / scale)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for start in range(0, hidden.shape[0], chunk):
            part = slice(start, start + chunk)
            x = fp8.quantise(hidden[part], head.hidden, count=False)
            logits = fp8.matmul(x.rows, w.rows, x.inverse, w.inverse, dtype=dtype, fast=True)
            loss, g = cross_entropy8(logits, targets[part], head.gradient)
            total += loss
            del logits
            grad_hidden[part] = fp8.matmul(g.rows, w.cols, g.inverse, w.inverse, dtype=dtype, fast=False)
            grad_weight += fp8.matmul(g.cols, x.cols, g.inverse, x.inverse, dtype=dtype, fast=False)
            del g
        ctx.save_for_backward(grad_hidden, grad_weight)
        return total

    @staticmethod
    def backward(ctx: Any, grad_total: Tensor) -> tuple[Any, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden.mul_(grad_total), grad_weight.mul_(grad_total), None, None, None


def linear_cross_entropy8(
    hidden_NC: Tensor, weight_VC: Tensor, targets_N: Tensor, *, chunk: int, head: Head8
) -> Tensor:
    """Cross-entropy of `hidden @ weight.T` against the targets, summed, with 8-bit matmuls."""
    total: Tensor = _LinearCrossEntropy8.apply(hidden_NC, weight_VC, targets_N, chunk, head)
    return total
