"""Weights in 4 bits: the NF4 code of QLoRA, one scale for each block of 64 weights.

A frozen matrix is dequantised for each matmul, in the forward and again in the backward pass, and never kept.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from flatout.cost import NF4_BLOCK
from flatout.errors import UsageError

# The 16 values of the code: quantiles of a normal distribution, scaled to [-1, 1] (Dettmers et al. 2023).
VALUES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip


class Nf4(nn.Module):
    """A frozen matrix: two weights per byte, and the largest magnitude of each block. Checkpoints do not contain it."""

    codes: Tensor
    scales: Tensor

    def __init__(self, codes: Tensor, scales: Tensor, shape: torch.Size) -> None:
        super().__init__()
        self.shape = shape
        self.register_buffer("codes", codes, persistent=False)
        self.register_buffer("scales", scales, persistent=False)

    @classmethod
    @torch.no_grad()
    def of(cls, weight: Tensor) -> Nf4:
        if weight.numel() % NF4_BLOCK:
            raise UsageError(
                f"a matrix of {tuple(weight.shape)} does not divide into blocks of {NF4_BLOCK}, which 4 bits need: "
                "use lora.base: 16-bit"
            )
        blocks = weight.detach().reshape(-1, NF4_BLOCK).float()
        scales = blocks.abs().amax(dim=1, keepdim=True).clamp(min=1e-12)
        values = torch.tensor(VALUES, device=weight.device)
        between = (values[1:] + values[:-1]) / 2
        nearest = torch.bucketize(blocks / scales, between, out_int32=True).to(torch.uint8).reshape(-1, 2)
        return cls(nearest[:, 0] * 16 + nearest[:, 1], scales, weight.shape)

    def dense(self, dtype: torch.dtype) -> Tensor:
        return rebuilt(self.codes, self.scales, dtype).view(self.shape)


def rebuilt(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The weights behind the codes, rounded once to `dtype`."""
    blocks = F.embedding(codes.int(), pairs(codes.device)).view(-1, NF4_BLOCK)
    return blocks.mul_(scales).to(dtype)


def pairs(device: torch.device) -> Tensor:
    """Both weights for every byte value. Computed once, because a copy from the host waits for the device."""
    if device not in _PAIRS:
        values = torch.tensor(VALUES, device=device)
        _PAIRS[device] = torch.stack((values.repeat_interleave(16), values.repeat(16)), dim=1)
    return _PAIRS[device]


_PAIRS: dict[torch.device, Tensor] = {}


class _Linear4(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, codes: Tensor, scales: Tensor, shape: torch.Size, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(codes, scales)
        ctx.shape = shape
        return F.linear(x, rebuilt(codes, scales, x.dtype).view(shape), None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None, None]:
        codes, scales = ctx.saved_tensors
        return dy @ rebuilt(codes, scales, dy.dtype).view(ctx.shape), None, None, None, None


def linear4(x: Tensor, weight: Nf4, bias: Tensor | None) -> Tensor:
    out: Tensor = _Linear4.apply(x, weight.codes, weight.scales, weight.shape, bias)  # type: ignore[no-untyped-call]
    return out
