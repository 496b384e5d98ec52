"""What a run came to, in numbers, and whether it met its criteria."""

from __future__ import annotations

from array import array
from dataclasses import fields
from statistics import fmean

from flatout.config.settings import CriteriaSettings
from flatout.cost import Rates
from flatout.record import WARM_STEPS, Outcome, Speed, StepRecord, Verdict


class Speedometer:
    """Sums up steps as they finish, so that a long run costs no memory."""

    def __init__(self, rates: Rates, *, warm_steps: int = WARM_STEPS) -> None:
        self.rates, self.warm_left = rates, warm_steps
        self.steps, self.tokens = 0, 0
        self.seconds, self.wall, self.data, self.spans = 0.0, 0.0, 0.0, 0.0

    def see(self, record: StepRecord) -> None:
        if self.warm_left:
            self.warm_left -= 1
            return
        self.steps += 1
        self.tokens += record.tokens
        self.wall += record.seconds
        self.seconds += record.training_s
        self.spans += sum(s.seconds for s in record.spans)
        self.data += sum(s.seconds for s in record.spans if s.phase == "data")

    def read(self) -> Speed:
        if not self.steps:
            return Speed(steps=0)
        shares = self.rates.shares(tokens=self.tokens, seconds=self.seconds)
        return Speed(
            steps=self.steps,
            tokens_per_s=self.tokens / self.seconds,
            step_s=self.seconds / self.steps,
            mfu=shares.mfu,
            hfu=shares.hfu,
            mfu_common=shares.mfu_common,
            data_share=self.data / self.seconds,
            unattributed_share=1 - self.spans / self.wall,
        )


def judge(criteria: CriteriaSettings, outcome: Outcome) -> list[Verdict]:
    """One line per criterion that was set."""
    losses, vals = (outcome.loss_first_tenth, outcome.loss_last_tenth), outcome.val_losses
    speed = outcome.speed
    measured: dict[str, float | None] = {
        "tokens_per_s": speed.tokens_per_s,
        "mfu": speed.mfu_common,
        "utilisation": outcome.utilisation,
        "memory_share": outcome.memory_share,
        "hours": outcome.hours,
        "saves": float(outcome.saves),
    }
    at_most = {"memory_share", "hours"}
    verdicts = []
    for criterion in fields(criteria):
        name, wanted = criterion.name, getattr(criteria, criterion.name)
        if wanted is None:
            continue
        if name == "loss_falling":
            verdicts.append(_trend(name, wanted, *losses))
        elif name == "validation_improving":
            ends = (vals[0], vals[-1]) if len(vals) > 1 else (None, None)
            verdicts.append(_trend(name, wanted, *ends))
        else:
            got = measured[name]
            sign = "at most" if name in at_most else "at least"
            met = None if got is None else (got <= wanted if name in at_most else got >= wanted)
            shown = "not measured" if got is None else _figure(got)
            verdicts.append(Verdict(criterion=name, wanted=f"{sign} {_figure(wanted)}", got=shown, met=met))
    return verdicts


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _trend(name: str, wanted: bool, first: float | None, last: float | None) -> Verdict:
    if first is None or last is None:
        return Verdict(criterion=name, wanted=str(wanted).lower(), got="not measured", met=None)
    return Verdict(
        criterion=name,
        wanted=str(wanted).lower(),
        got=f"{first:.4f} to {last:.4f}",
        met=(last < first) == wanted,
    )


class LossTrend:
    """Mean loss of the first and the last tenth of the steps a run has taken."""

    def __init__(self) -> None:
        self.losses = array("d")

    def see(self, loss: float) -> None:
        self.losses.append(loss)

    def ends(self) -> tuple[float | None, float | None]:
        """None where there are too few steps for two ends."""
        if len(self.losses) < 2:
            return None, None
        tenth = max(1, len(self.losses) // 10)
        return fmean(self.losses[:tenth]), fmean(self.losses[-tenth:])
