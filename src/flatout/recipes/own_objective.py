"""An objective of the user's own: `train.objective: MODULE:FUNCTION`, for recipes that learn from text or rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from flatout import custom
from flatout.config.settings import Settings
from flatout.data.stream import Batch
from flatout.engine.objective import LOSS, CrossEntropy, Head, Objective, Rule
from flatout.errors import UsageError

RULES = ("sum", "mean", "max")


def objective_of(settings: Settings) -> Objective:
    name = settings.train.objective
    if name is None:
        return CrossEntropy()
    return OwnObjective(custom.function(name, what="train.objective", keywords=("batch", "head")), name=name)


class OwnObjective:
    """Calls the function with `batch` and `head`, as `engine.objective.Objective` describes them.

    It returns the summed loss of the target tokens, or a mapping with `loss` and the metrics that the function's
    attribute `metrics` declares, each with its rule: {"accuracy": "mean"}.
    """

    def __init__(self, function: Callable[..., Any], *, name: str) -> None:
        self._function, self._name = function, name
        declared = getattr(function, "metrics", {})
        if (
            not isinstance(declared, Mapping)
            or any(rule not in RULES for rule in declared.values())
            or LOSS in declared
        ):
            raise UsageError(
                f"train.objective {name}: its metrics are {declared!r:.100}; they must be names other than loss, each "
                f"with {', '.join(RULES)}"
            )
        self.metrics: Mapping[str, Rule] = dict(declared)

    def __call__(self, batch: Batch, head: Head) -> Mapping[str, Tensor]:
        found = self._function(batch=batch, head=head)
        values: Mapping[str, Any] = found if isinstance(found, Mapping) else {LOSS: found}
        for name in (LOSS, *self.metrics):
            value = values.get(name)
            if not isinstance(value, Tensor) or value.numel() != 1:
                got = f"of shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)[:60]
                raise UsageError(f"train.objective {self._name}: {name} is {got}; it must be a tensor of one number")
        if not values[LOSS].requires_grad and head.hidden_NC.requires_grad:
            raise UsageError(f"train.objective {self._name}: its loss has no gradient; it must depend on head")
        return {name: values[name].reshape(()) for name in (LOSS, *self.metrics)}
