"""One gradient from the gradients of several tasks where they conflict: PCGrad, CAGrad and MGDA on the Gram matrix.

Each result is a linear combination of the K task gradients, so it needs only their K x K dot products. They are taken
in float64: in float32, gradients that are nearly parallel go wrong. The K x K arithmetic stays on the device, so a
step waits for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Literal, TypeGuard, get_args

import numpy as np
import torch
from torch import Tensor

# The dot products of every two tasks' gradients.
Products = Callable[[Sequence[Sequence[Tensor]]], Tensor]
Method = Literal["pcgrad", "cagrad", "mgda"]
# Elements of each gradient that are in float64 at a time.
CHUNK = 1 << 22
# Iterations of the two small minimisations over the simplex; the tests say how close they come.
ITERATIONS = 100
# How far from the mean gradient CAGrad searches, as a share of its norm; its authors' default.
CAGRAD_C = 0.5


def is_method(name: str) -> TypeGuard[Method]:
    return name in get_args(Method)


@dataclass(frozen=True, kw_only=True)
class Combined:
    """Combines the gradients of the tasks by one of the methods, and measures the cosine of every two of them.

    PCGrad projects each gradient onto the normal plane of every other one that it conflicts with, in an order that the
    seed and the step give, the same on all ranks.
    """

    tasks: tuple[str, ...]
    seed: int
    method: Method = "pcgrad"

    @property
    def metrics(self) -> tuple[str, ...]:
        return ("conflicts", *(f"cosine/{a}/{b}" for a, b in combinations(self.tasks, 2)))

    def __call__(
        self, gradients: Mapping[str, Sequence[Tensor]], *, step: int, products: Products | None = None
    ) -> tuple[list[Tensor], Tensor]:
        by_task = [gradients[task] for task in self.tasks]
        products_KK = (products or gram)(by_task)
        if self.method == "pcgrad":
            generator = np.random.default_rng([self.seed, step])
            order = [generator.permutation(len(by_task)).tolist() for _ in by_task]
            weights = pcgrad_weights(products_KK, order=order)
        else:
            weights = (cagrad_weights if self.method == "cagrad" else mgda_weights)(products_KK)
        first, second = torch.triu_indices(len(by_task), len(by_task), 1, device=products_KK.device)
        pairs = cosines(products_KK)[first, second]
        return combined(by_task, weights), torch.cat([(pairs < 0).double().mean()[None], pairs])


def gram(gradients: Sequence[Sequence[Tensor]]) -> Tensor:
    """The dot products of every two tasks' gradients, in float64."""
    total = torch.zeros((len(gradients), len(gradients)), dtype=torch.float64, device=gradients[0][0].device)
    for begin, end in _spans([gradient.numel() for gradient in gradients[0]]):
        flat = [torch.cat([part.reshape(-1) for part in of_task[begin:end]]) for of_task in gradients]
        for pieces in zip(*(part.split(CHUNK) for part in flat), strict=True):
            piece_KN = torch.stack(pieces).double()
            total += piece_KN @ piece_KN.T
    return total


def _spans(sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Neighbours of together at most CHUNK elements, or one that is larger: adapters are hundreds of small tensors."""
    begin, total = 0, 0
    for at, size in enumerate(sizes):
        if total and total + size > CHUNK:
            yield begin, at
            begin, total = at, 0
        total += size
    yield begin, len(sizes)


def pcgrad_weights(products_KK: Tensor, *, order: Sequence[Sequence[int]]) -> Tensor:
    """The weight of each task's gradient in the sum of the projected gradients.

    `order[i]` lists the tasks in the order in which gradient i is projected. A projection against gradient j changes
    one coefficient of row i, so K x K numbers represent all projected gradients. All rows go through their orders at
    the same time: they do not depend on each other.
    """
    coefficients = torch.eye(len(products_KK), dtype=products_KK.dtype, device=products_KK.device)
    squares_K, rows_K = products_KK.diagonal(), torch.arange(len(products_KK), device=products_KK.device)
    on_host = torch.tensor(order, pin_memory=products_KK.is_cuda)  # so that the copy waits for nothing
    for others_K in on_host.to(products_KK.device, non_blocking=True).T:
        overlaps_K = (coefficients * products_KK[others_K]).sum(dim=1)
        # Where gradient j is zero the overlap is zero too, and nothing is divided by it.
        conflicts_K = (overlaps_K < 0) & (others_K != rows_K)
        shares_K = torch.where(conflicts_K, overlaps_K / squares_K[others_K], torch.zeros_like(overlaps_K))
        coefficients[rows_K, others_K] -= shares_K
    return coefficients.sum(dim=0)


def mgda_weights(products_KK: Tensor) -> Tensor:
    """The convex combination of least norm, times K: the sum of the gradients where all of them are equal.

    Accelerated projected gradients on the simplex.
    """
    count = len(products_KK)
    size = 1 / products_KK.diagonal().sum().clamp(min=1e-300)  # no less than the largest curvature
    weights = ahead = torch.full_like(products_KK[0], 1 / count)
    for i in range(ITERATIONS):
        before, weights = weights, on_simplex(ahead - size * (products_KK @ ahead))
        ahead = weights + i / (i + 3) * (weights - before)
    return count * weights


def on_simplex(point_K: Tensor) -> Tensor:
    """The nearest point with coordinates that are not negative and sum to one."""
    ordered = point_K.sort(descending=True).values
    excess = (ordered.cumsum(0) - 1) / torch.arange(1, len(point_K) + 1, device=point_K.device)
    kept = (ordered > excess).sum() - 1
    return (point_K - excess.gather(0, kept[None])).clamp(min=0)


def cagrad_weights(products_KK: Tensor, *, c: float = CAGRAD_C) -> Tensor:
    """The update that helps the worst task most, within `c` times the norm of the mean gradient from the mean, times K.

    Minimises g_w . g_0 + c |g_0| |g_w| over the simplex by exponentiated gradients.
    """
    count = len(products_KK)
    mean = torch.full_like(products_KK[0], 1 / count)
    radius = c * (mean @ products_KK @ mean).clamp(min=0).sqrt()
    scale = products_KK.diagonal().max().clamp(min=1e-300)
    logits = torch.zeros_like(mean)

    def norm(weights: Tensor) -> Tensor:
        return (weights @ products_KK @ weights).clamp(min=1e-300).sqrt()

    for i in range(ITERATIONS):
        weights = logits.softmax(0)
        slopes = products_KK @ mean + radius * (products_KK @ weights) / norm(weights)
        logits = logits - slopes / scale * (10 / (1 + i) ** 0.5)
    weights = logits.softmax(0)
    return count * (mean + radius / norm(weights) * weights)


def combined(gradients: Sequence[Sequence[Tensor]], weights_K: Tensor) -> list[Tensor]:
    """The weighted sum, parameter by parameter."""
    weights = weights_K.to(gradients[0][0].dtype).unbind()
    total: list[Tensor] = list(torch._foreach_mul(list(gradients[0]), weights[0]))
    for of_task, weight in zip(gradients[1:], weights[1:], strict=True):
        torch._foreach_add_(total, torch._foreach_mul(list(of_task), weight))
    return total


def cosines(products_KK: Tensor) -> Tensor:
    """The cosine of every two gradients; 0 where one of them is zero."""
    norms = products_KK.diagonal().clamp(min=0).sqrt()
    scale = norms[:, None] * norms[None, :]
    return torch.where(scale > 0, products_KK / scale.clamp(min=1e-300), torch.zeros_like(scale))
