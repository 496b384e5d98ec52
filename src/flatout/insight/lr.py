"""Finds a learning rate and a warm-up by their loss at equal tokens: `flatout tune CONFIG --search lr`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from flatout import parity
from flatout.errors import RunFailed, UsageError
from flatout.insight.compare import finite
from flatout.insight.switches import LR, WARMUP
from flatout.insight.trials import Trial, Trials
from flatout.parity import Difference

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
STEPS = 60
# Warm-ups that are tried, as shares of the steps of a trial; a longer one says nothing in so few steps.
WARMUPS, LONGEST = (0.0, 1 / 12, 1 / 6, 1 / 3), 1 / 2
# The configuration's own warm-up stays unless another lowers the loss by this share.
BETTER = 0.001
# Pairs of the configuration and the best values at the end.
CONFIRMED = parity.LOOKS[0]


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The result: losses by learning rate, and with the best one by warm-up steps; each with the first seed."""

    lr: float  # of the configuration
    best: float
    losses: Mapping[float, float | None]
    warmup: int  # of the configuration
    best_warmup: int
    warmup_losses: Mapping[int, float | None]  # empty: the configuration's is too long for these trials
    difference: Difference | None  # of the loss, with several seeds
    steps: int

    @property
    def values(self) -> dict[str, Any]:
        """What changes in the configuration, by dotted key."""
        found: dict[str, Any] = {} if self.best == self.lr else {LR: self.best}
        return found if self.best_warmup == self.warmup else found | {WARMUP: self.best_warmup}

    @property
    def unconfirmed(self) -> str | None:
        lower = self.difference is not None and self.difference.verdict == "faster"
        return None if lower else "with other seeds its loss is not shown to be lower"

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = finite(asdict(self))
        if self.difference is not None:  # of losses, not of times
            words = {"faster": "lower", "slower": "higher"}
            found["difference"]["verdict"] = words.get(self.difference.verdict, self.difference.verdict)
        return found


def search(trials: Trials) -> Rates:
    """Runs the same steps with several learning rates, and then with several warm-ups."""
    if trials.samples:
        raise UsageError("--search lr trains, and trials of recipe rft only sample: search with recipe sft on its rows")
    if trials.settings.recipe == "rl":
        raise UsageError("--search lr compares losses, and that of a policy says nothing about its rewards")
    own, own_warmup, seed = trials.settings.train.lr, trials.settings.train.warmup_steps, trials.settings.seed

    def loss(lr: float, warmup: int | None = None, *, number: int = 0) -> float | None:
        told = f"learning rate {lr:.3g}" + ("" if warmup is None else f", {warmup} warm-up steps")
        settings = {LR: lr} if warmup is None else {LR: lr, WARMUP: warmup}
        return trials.run(Trial(settings=settings, seed=seed + number), name=told).last_loss

    factors, losses = list(FACTORS), dict[float, float | None]()
    while missing := [factor for factor in factors if factor not in losses]:
        losses |= {factor: loss(own * factor) for factor in missing}
        best = min(losses, key=lambda factor: _or_worst(losses[factor]))
        # The grid grows while its best is at an end.
        if best in (min(factors), max(factors)) and len(factors) < 2 * len(FACTORS):
            factors.append(best / 2 if best == min(factors) else best * 2)
    if losses[best] is None:
        raise RunFailed("no trial could be measured: every learning rate failed")
    warmups: dict[int, float | None] = {}
    if own_warmup <= LONGEST * trials.steps:
        tried = sorted({own_warmup, *(round(share * trials.steps) for share in WARMUPS)})
        warmups = {warmup: loss(own * best, warmup) for warmup in tried}
    best_warmup = min(warmups, key=lambda warmup: _or_worst(warmups[warmup]), default=own_warmup)
    if _or_worst(warmups.get(own_warmup)) <= _or_worst(warmups.get(best_warmup)) * (1 + BETTER):
        best_warmup = own_warmup
    difference = None
    if best != 1.0 or best_warmup != own_warmup:
        sides = [(own, own_warmup), (own * best, best_warmup)] if warmups else [(own, None), (own * best, None)]
        pairs = [[loss(*side, number=number) for side in sides] for number in range(1, CONFIRMED + 1)]
        known = [(math.log(a), math.log(b)) for a, b in pairs if a is not None and b is not None and min(a, b) > 0]
        difference = parity.paired([a for a, _ in known], [b for _, b in known], looks=(max(1, len(known)),))
    return Rates(
        lr=own,
        best=own * best,
        losses={own * factor: losses[factor] for factor in sorted(losses)},
        warmup=own_warmup,
        best_warmup=best_warmup,
        warmup_losses=warmups,
        difference=difference,
        steps=trials.steps,
    )


def _or_worst(loss: float | None) -> float:
    return math.inf if loss is None or not math.isfinite(loss) else loss
