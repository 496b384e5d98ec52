"""One gradient from the gradients of several tasks where they conflict: PCGrad on the Gram matrix.

The result is a linear combination of the K task gradients, so it needs only their K x K dot products. They are taken
in float64: in float32, gradients that are nearly parallel go wrong. The K x K arithmetic stays on the device, so a
step waits for nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class PCGrad:
    """Projects each task's gradient onto the normal plane of every other task's gradient it conflicts with.

    The order of the projections is drawn from the seed and the step, the same on all ranks.
    """

    tasks: tuple[str, ...]
    seed: int

    def __call__(self, gradients: Mapping[str, Sequence[Tensor]], *, step: int) -> list[Tensor]:
        by_task = [gradients[task] for task in self.tasks]
        generator = np.random.default_rng([self.seed, step])
        order = [generator.permutation(len(by_task)).tolist() for _ in by_task]
        return combined(by_task, pcgrad_weights(gram(by_task), order=order))


def gram(gradients: Sequence[Sequence[Tensor]]) -> Tensor:
    """The dot products of every two tasks' gradients, in float64."""
    products = [
        [torch.stack([(a.double() * b).sum() for a, b in zip(one, other, strict=True)]).sum() for other in gradients]
        for one in gradients
    ]
    return torch.stack([torch.stack(row) for row in products])


def pcgrad_weights(products_KK: Tensor, *, order: Sequence[Sequence[int]]) -> Tensor:
    """The weight of each task's gradient in the sum of the projected gradients.

    `order[i]` lists the tasks in the order in which gradient i is projected. A projection against gradient j changes
    one coefficient of row i, so K x K numbers represent all projected gradients.
    """
    coefficients = torch.eye(len(products_KK), dtype=products_KK.dtype, device=products_KK.device)
    for i, others in enumerate(order):
        for j in (j for j in others if j != i):
            overlap = coefficients[i] @ products_KK[:, j]
            # Where gradient j is zero the overlap is zero too, and nothing is divided by it.
            share = torch.where(overlap < 0, overlap / products_KK[j, j], torch.zeros_like(overlap))
            coefficients[i, j] -= share
    return coefficients.sum(dim=0)


def combined(gradients: Sequence[Sequence[Tensor]], weights_K: Tensor) -> list[Tensor]:
    """The weighted sum, parameter by parameter."""
    weights = weights_K.to(gradients[0][0].dtype).unbind()
    total = [part * weights[0] for part in gradients[0]]
    for of_task, weight in zip(gradients[1:], weights[1:], strict=True):
        torch._foreach_addcmul_(total, list(of_task), [weight.expand_as(part) for part in of_task])
    return total


def cosines(products_KK: Tensor) -> Tensor:
    """The cosine of every two gradients; 0 where one of them is zero."""
    norms = products_KK.diagonal().clamp(min=0).sqrt()
    scale = norms[:, None] * norms[None, :]
    return torch.where(scale > 0, products_KK / scale.clamp(min=1e-300), torch.zeros_like(scale))
