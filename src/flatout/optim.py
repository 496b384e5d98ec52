"""AdamW and learning-rate schedules. A schedule is a pure function of the step, so resuming needs no state."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from flatout.config.settings import TrainSettings

Schedule = Callable[[int], float]


def adamw(model: nn.Module, train: TrainSettings, *, fused: bool) -> torch.optim.AdamW:
    """Matrices are decayed, gains and biases are not."""
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": train.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=train.lr, betas=(train.beta1, train.beta2), eps=train.eps, fused=fused)
    if fused:
        # Allocated now: running out of memory then shows before the first step, never inside an update.
        for parameter in (*matrices, *vectors):
            optimizer.state[parameter] = {
                "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }
    return optimizer


def schedule(train: TrainSettings, *, total_steps: int) -> Schedule:
    """Learning rate of step 0, 1, 2 …: linear warm-up, then cosine, warmup-stable-decay or constant."""
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
