"""A simulated machine for searches: trials in the same process, with times that vary in one of several ways."""

from __future__ import annotations

import math
import random
from pathlib import Path
from statistics import median
from typing import Literal

from tests.insight.stand_in import PLANNED, does_not_fit, factor

from flatout.config import load
from flatout.insight.compare import BLOCK_STEPS
from flatout.insight.trials import OUT_OF_MEMORY, Measured, Trial

Noise = Literal["iid", "drift", "spikes", "all"]


class Simulated:
    """As much of `Trials` as `ablate` uses: a trial takes a second.

    Step times vary independently (iid); or the machine also becomes slower from trial to trial, and wanders (drift); or
    some steps and some whole trials take much longer (spikes); or they wander and some steps take much longer (all).
    """

    samples, on_gpu, about = False, True, None

    def __init__(
        self,
        config: Path,
        *,
        chance: random.Random,
        gain: float | None = None,
        noise: float = 0.01,
        kind: Noise = "all",
        broken: bool = False,
        loss_noise: float = 0.003,
    ) -> None:
        """`gain` is what the only switch saves, as a logarithm; without it, decisions cost what the stand-in says."""
        self.settings, self.found, self.spent_s = load(config).settings, dict[str, Measured](), 0.0
        self.gain, self.chance, self.noise, self.kind, self.broken = gain, chance, noise, kind, broken
        self.level, self.loss_noise = 0.0, loss_noise
        self.call = 0.0

    def _disturbance(self) -> float:
        """The median of a trial's steps, as a logarithm, on a machine where nothing costs anything."""
        if self.kind in ("drift", "all"):
            self.level += self.chance.gauss(0, 0.15 * self.noise)
        if self.kind == "drift":
            self.level += 0.2 * self.noise
        spiky = self.kind in ("spikes", "all")
        spikes = [0.4 if spiky and self.chance.random() < 0.05 else 0.0 for _ in range(BLOCK_STEPS)]
        slow = self.chance.uniform(0.1, 0.3) if self.kind == "spikes" and self.chance.random() < 0.05 else 0.0
        return self.level + slow + median(self.chance.gauss(0, self.noise) + spike for spike in spikes)

    def call_again(self, *, log_factor: float) -> None:
        """Another call of the same search, on a machine that takes longer by this factor, as a logarithm."""
        self.call, self.level, self.spent_s = self.call + 1, self.level + log_factor, 0.0

    def known(self, trial: Trial) -> bool:
        return trial.key in self.found

    def run(self, trial: Trial, *, name: str, again: bool = False) -> Measured:
        if trial.key in self.found:
            return self.found[trial.key]
        self.spent_s += 1.0
        on = trial.settings.get("plan.recompute") == "none"
        given = {key.removeprefix("plan."): value for key, value in trial.settings.items()}
        decisions = PLANNED | {key: value for key, value in given.items() if value is not None}
        if does_not_fit(decisions):
            problem = f"{OUT_OF_MEMORY} with micro-batch {decisions['micro_batch']}"
            failed = Measured(
                key=trial.key,
                settings=dict(trial.settings),
                seed=trial.seed,
                seconds=1.0,
                problem=problem,
                call=self.call,
            )
            return self.found.setdefault(trial.key, failed)
        time = self._disturbance()
        time += math.log(factor(decisions)) if self.gain is None else -self.gain if on else 0.0
        # The seed decides the loss, but for little: kernels add up in different orders.
        loss = 3.0 + random.Random(trial.seed).gauss(0, 0.1) + self.chance.gauss(0, self.loss_noise)
        loss *= 1.01 if self.broken and on else 1.0
        self.found[trial.key] = Measured(
            key=trial.key,
            settings=dict(trial.settings),
            seed=trial.seed,
            seconds=1.0,
            log_time=time,
            log_total=time,
            tokens_per_s=math.exp(-time),
            loss=loss,
            last_loss=loss + abs(math.log(trial.settings.get("train.lr", 1e-3) / 4e-3)),
            decisions=decisions,
            call=self.call,
        )
        return self.found[trial.key]
