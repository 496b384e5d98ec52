"""AdamW and learning-rate schedules. A schedule is a pure function of the step, so resuming needs no state."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from flatout.config.settings import TrainSettings

Schedule = Callable[[int], float]


class Optimizer(Protocol):
    """The optimizer interface for checkpoints and the engine."""

    state: Any
    param_groups: list[dict[str, Any]]

    def zero_grad(self, set_to_none: bool = True) -> None: ...


def is_sharded(tensor: Tensor) -> bool:
    """Whether each rank holds only some rows of this tensor (a DTensor, as FSDP2 makes them)."""
    return hasattr(tensor, "_local_tensor")


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a tensor: its rows of a sharded one, else all of it."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


def rows_of(tensor: Tensor, rank: int, world: int) -> tuple[int, int]:
    """The rows of a sharded tensor that a rank holds: equal parts, rounded up, so that the last may be short."""
    rows, share = tensor.shape[0], -(-tensor.shape[0] // world)
    return min(rows, rank * share), min(rows, (rank + 1) * share)


class FusedAdamW:
    """AdamW by torch's fused kernel, which also unscales, clips and skips the update in the same pass.

    `torch.optim.AdamW(fused=True)` calls the same kernel, but imports torch's compiler first, which takes seconds at
    the start of every run, even if nothing is compiled.
    """

    def __init__(self, groups: list[dict[str, Any]], *, betas: tuple[float, float], eps: float) -> None:
        self.param_groups, self.betas, self.eps = groups, betas, eps
        # Allocated now, so that running out of memory shows before the first step, never inside an update.
        self.state: dict[nn.Parameter, dict[str, Tensor]] = defaultdict(dict)
        for parameter in (parameter for group in groups for parameter in group["params"]):
            self.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(local(parameter)),
                "exp_avg_sq": torch.zeros_like(local(parameter)),
            }

    @torch.no_grad()
    def step(
        self, *, lr: float, divisor: Tensor, skip: Tensor, begin: Callable[[str], None] = lambda role: None
    ) -> None:
        """Divides the gradients by `divisor` and applies them, unless `skip` is 1; both are read on the device.

        `begin` is called with the role of each group before its update.
        """
        for group in self.param_groups:
            begin(group.get("role", ""))
            chosen = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not chosen:
                continue
            steps = self._all("step", chosen)
            torch._foreach_add_(steps, 1)
            torch._fused_adamw_(
                [local(parameter) for parameter in chosen],
                [local(parameter.grad) for parameter in chosen if parameter.grad is not None],
                self._all("exp_avg", chosen),
                self._all("exp_avg_sq", chosen),
                [],
                steps,
                lr=lr,
                beta1=self.betas[0],
                beta2=self.betas[1],
                weight_decay=group["weight_decay"],
                eps=self.eps,
                amsgrad=False,
                maximize=False,
                grad_scale=divisor,
                found_inf=skip,
            )
            torch._foreach_sub_(steps, [skip] * len(steps))

    def zero_grad(self, set_to_none: bool = True) -> None:
        gradients = [parameter for group in self.param_groups for parameter in group["params"]]
        if set_to_none:
            for parameter in gradients:
                parameter.grad = None
        elif present := [parameter.grad for parameter in gradients if parameter.grad is not None]:
            torch._foreach_zero_(present)

    def _all(self, name: str, parameters: Sequence[nn.Parameter]) -> list[Tensor]:
        return [self.state[parameter][name] for parameter in parameters]


def adamw(model: nn.Module, train: TrainSettings, *, fused: bool) -> FusedAdamW | torch.optim.AdamW:
    """AdamW with weight decay on matrices, not on gains and biases."""
    critic: Any = getattr(model, "critic", None)
    apart = set() if getattr(critic, "trunk", None) is None else {id(p) for p in critic.parameters()}
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {
            "params": [p for p in trained if (p.ndim >= 2) == matrices and (id(p) in apart) == is_critic],
            "weight_decay": train.weight_decay if matrices else 0.0,
            "role": "critic" if is_critic else "",
        }
        for is_critic in ((False, True) if apart else (False,))
        for matrices in (True, False)
    ]
    betas = (train.beta1, train.beta2)
    if fused:
        return FusedAdamW(groups, betas=betas, eps=train.eps)
    return torch.optim.AdamW(groups, lr=train.lr, betas=betas, eps=train.eps, fused=False)


def schedule(train: TrainSettings, *, total_steps: int, first: tuple[int, float] | None = None) -> Schedule:
    """Learning rate of step 0, 1, 2 …: linear warm-up, then cosine, warmup-stable-decay or constant.

    `first`: a number of steps that come before, with a peak and a cosine decay of their own.
    """
    if first is not None:
        steps, lr = first
        before = schedule(replace(train, lr=lr, schedule="cosine"), total_steps=steps)
        after = schedule(train, total_steps=total_steps - steps)
        return lambda step: before(step) if step < steps else after(step - steps)
    floor = train.lr * train.min_lr_ratio
    decay_steps = max(1, round(train.decay_share * total_steps))

    def rate(step: int) -> float:
        if step < train.warmup_steps:
            return train.lr * (step + 1) / (train.warmup_steps + 1)
        if train.schedule == "constant":
            return train.lr
        if train.schedule == "wsd":
            left = max(0, total_steps - 1 - step)
            return floor + (train.lr - floor) * min(1.0, left / decay_steps)
        done = (step - train.warmup_steps) / max(1, total_steps - 1 - train.warmup_steps)
        return floor + (train.lr - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))

    return rate
