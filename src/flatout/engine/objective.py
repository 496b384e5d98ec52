"""What a step minimises, what it reports by name, and how the gradients of several tasks become one.

An objective is called once for each micro-batch, inside the model's forward pass, so that it decides itself which rows
of the head it needs. Whatever it returns stays on the device: recorded passes (CUDA graphs), 8-bit matmuls and
recomputation work for every objective, and nothing waits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from flatout.data.stream import Batch
from flatout.engine.ranks import Ranks

# The name of the number that is minimised.
LOSS = "loss"
# How a metric's values of micro-batches and ranks become one: their sum, their sum over all target tokens of the step,
# or the largest.
Rule = Literal["sum", "mean", "max"]
# (hidden_NC, head weight_VC, targets_N) -> summed cross-entropy
HeadLoss = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Head:
    """The last hidden states of a micro-batch, the head's weight, and the fastest cross-entropy over both."""

    hidden_NC: Tensor
    weight_VC: Tensor
    loss: HeadLoss

    def cross_entropy(self, targets: Tensor, *, rows: Tensor | None = None) -> Tensor:
        """Summed over the targets that are not ignored; `rows`: of these hidden states only."""
        hidden = self.hidden_NC if rows is None else self.hidden_NC.index_select(0, rows)
        return self.loss(hidden, self.weight_VC, targets)


class Objective(Protocol):
    @property
    def metrics(self) -> Mapping[str, Rule]:
        """What it reports beside the loss, and how values of micro-batches and ranks are joined."""
        ...

    def __call__(self, batch: Batch, head: Head) -> Mapping[str, Tensor]:
        """The `loss`, a sum that the step divides by all its target tokens, and one number for each metric."""
        ...


class CrossEntropy:
    """The next token's: pretraining and fine-tuning."""

    metrics: Mapping[str, Rule] = {}

    def __call__(self, batch: Batch, head: Head) -> Mapping[str, Tensor]:
        if batch.rows is not None and batch.row_targets is not None:
            return {LOSS: head.cross_entropy(batch.row_targets, rows=batch.rows)}
        return {LOSS: head.cross_entropy(batch.targets)}


class Tally:
    """The numbers of one step: added up over micro-batches, then over ranks, all on the device."""

    def __init__(self, metrics: Mapping[str, Rule], device: torch.device) -> None:
        self._rules = metrics
        self.loss = torch.zeros((), device=device)
        empty = {"sum": 0.0, "mean": 0.0, "max": -torch.inf}
        self._values = {name: torch.full((), empty[rule], device=device) for name, rule in metrics.items()}

    def add(self, found: Mapping[str, Tensor]) -> None:
        """The metrics of one micro-batch; its loss is added by whoever divides it."""
        for name, rule in self._rules.items():
            value = found[name].detach().float()
            self._values[name] = self._values[name].maximum(value) if rule == "max" else self._values[name] + value

    def reduced(self, ranks: Ranks, *, denominator: Tensor) -> Tensor:
        """Every metric in the order of its declaration, joined over ranks; the loss too, in place."""
        summed = [name for name, rule in self._rules.items() if rule != "max"]
        joined = ranks.sum_(torch.stack([self.loss, *(self._values[name] for name in summed)]))
        self.loss = joined[0]
        values = dict(zip(summed, joined[1:].unbind(), strict=True))
        if largest := [name for name, rule in self._rules.items() if rule == "max"]:
            highest = ranks.max_(torch.stack([self._values[name] for name in largest]))
            values |= dict(zip(largest, highest.unbind(), strict=True))
        rules = self._rules.items()
        ordered = [values[name] / denominator if rule == "mean" else values[name] for name, rule in rules]
        return torch.stack(ordered) if ordered else self.loss.new_empty(0)


class Combine(Protocol):
    """Makes one gradient of the gradients of several tasks, as methods against conflicts between tasks do."""

    @property
    def tasks(self) -> Sequence[str]:
        """Every task a batch may name, in the same order on all ranks: each has a buffer of its own."""
        ...

    def __call__(self, gradients: Mapping[str, Sequence[Tensor]], *, step: int) -> Sequence[Tensor]:
        """`gradients`: of each task, summed over ranks, in the order of the parameters."""
        ...
