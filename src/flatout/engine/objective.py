"""Training objectives, their metrics, and how the gradients of several tasks are combined.

An objective is called once per micro-batch, inside the model's forward pass, so that it decides which rows of the head
it needs. Its results stay on the device: CUDA graphs, 8-bit matmuls and recomputation work for every objective, and
nothing synchronizes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor

from flatout.data.stream import Batch
from flatout.engine.ranks import Ranks
from flatout.losses import linear_log_probs
from flatout.model import Attend, Model, Routed

# The name of the minimised value.
LOSS = "loss"
# Roles of the models in a step of reinforcement learning.
ACTOR, CRITIC = "actor", "critic"
# Rows of logits that exist at a time where log-probabilities are computed.
LOG_PROB_ROWS = 2048
# How a metric is reduced over micro-batches and ranks: the sum, the sum divided by all target tokens, or the maximum.
Rule = Literal["sum", "mean", "max"]
# (hidden_NC, head weight_VC, targets_N) -> summed cross-entropy
HeadLoss = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Head:
    """The last hidden states of a micro-batch, the head's weight, and the fastest cross-entropy over both."""

    hidden_NC: Tensor
    weight_VC: Tensor
    loss: HeadLoss
    critic: Callable[[Tensor], Tensor] | None = None  # from the last hidden states to the value at each token
    routed: Routed | None = None  # the choice among the adapters of a bank
    backward: Callable[[str, Tensor], None] | None = None  # times the backward pass from a tensor on, by role

    def cross_entropy(self, targets: Tensor, *, rows: Tensor | None = None) -> Tensor:
        """Summed over the targets that are not ignored; `rows` selects some of the hidden states."""
        hidden = self.hidden_NC if rows is None else self.hidden_NC.index_select(0, rows)
        return self.loss(hidden, self.weight_VC, targets)

    def log_probs(
        self, targets: Tensor, *, rows: Tensor | None = None, temperature: float = 1.0
    ) -> tuple[Tensor, Tensor]:
        """The log-probability of each target, with its gradient, and the entropy there; 0 where a target is ignored."""
        hidden = self.hidden_NC if rows is None else self.hidden_NC.index_select(0, rows)
        found = linear_log_probs(hidden, self.weight_VC, targets, chunk=LOG_PROB_ROWS, temperature=temperature)
        if self.backward is not None:
            self.backward(ACTOR, found[0])
        return found

    def values(self, *, rows: Tensor | None = None, into_policy_N: Tensor | None = None) -> Tensor:
        """What the critic expects at each token. Where `into_policy_N` is false, its gradient stops at the critic."""
        assert self.critic is not None, "the model has no critic"
        hidden_NC = self.hidden_NC
        if into_policy_N is not None:
            hidden_NC = torch.where(into_policy_N[:, None], hidden_NC, hidden_NC.detach())
        found = self.critic(hidden_NC)
        if self.backward is not None:
            self.backward(CRITIC, found)
        return found if rows is None else found.index_select(0, rows)


class Objective(Protocol):
    @property
    def metrics(self) -> Mapping[str, Rule]:
        """The metrics it reports besides the loss, and how they are reduced over micro-batches and ranks."""
        ...

    def __call__(self, batch: Batch, head: Head) -> Mapping[str, Tensor]:
        """Returns the `loss`, a sum that the step divides by all its target tokens, and one value for each metric."""
        ...


class CrossEntropy:
    """Next-token cross-entropy, for pretraining and fine-tuning."""

    metrics: Mapping[str, Rule] = {}

    def __call__(self, batch: Batch, head: Head) -> Mapping[str, Tensor]:
        if batch.rows is not None and batch.row_targets is not None:
            return {LOSS: head.cross_entropy(batch.row_targets, rows=batch.rows)}
        return {LOSS: head.cross_entropy(batch.targets)}


class Route(Protocol):
    """Chooses among the adapters of a bank for a batch on the device, before the pass that is learnt from."""

    def __call__(self, model: Model, batch: Batch, attend: Attend) -> Routed: ...


class Tally:
    """The numbers of one step: added up over micro-batches, then over ranks, all on the device."""

    def __init__(self, metrics: Mapping[str, Rule], device: torch.device) -> None:
        self._rules = metrics
        self.loss = torch.zeros((), device=device)
        empty = {"sum": 0.0, "mean": 0.0, "max": -torch.inf}
        self._values = {name: torch.full((), empty[rule], device=device) for name, rule in metrics.items()}

    def add(self, found: Mapping[str, Tensor]) -> None:
        """Adds the metrics of one micro-batch. The caller adds its loss, after dividing it."""
        for name, rule in self._rules.items():
            value = found[name].detach().float()
            self._values[name] = self._values[name].maximum(value) if rule == "max" else self._values[name] + value

    def reduced(self, ranks: Ranks, *, denominator: Tensor) -> Tensor:
        """Every metric in the order of its declaration, reduced over ranks; the loss too, in place."""
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
    """Combines the gradients of several tasks into one, as methods against conflicting gradients do."""

    @property
    def tasks(self) -> Sequence[str]:
        """Every task a batch may name, in the same order on all ranks. Each has its own buffer."""
        ...

    @property
    def metrics(self) -> Sequence[str]:
        """What it measures in every step."""
        ...

    def __call__(
        self,
        gradients: Mapping[str, Sequence[Tensor]],
        *,
        step: int,
        products: Callable[[Sequence[Sequence[Tensor]]], Tensor] | None = None,
    ) -> tuple[Sequence[Tensor], Tensor | None]:
        """The combined gradient and its measurements, one for each metric.

        `gradients` are those of each task, summed over ranks, in the order of the parameters; of sharded weights only
        this rank's rows, so that dot products must be taken by `products`.
        """
        ...
