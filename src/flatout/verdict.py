"""How fast a run trained, where its loss began and ended, and whether it met its criteria.

The only place for these numbers: a training run and a later reader of its folder compute the same ones.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import islice
from typing import Any

from flatout.config.settings import CriteriaSettings
from flatout.cost import Rates, Shares
from flatout.record import LARGEST_LOSS, WARM_STEPS, Outcome, Rollup, Run, Speed, StepRecord, Verdict
from flatout.record.records import BESIDE
from flatout.record.rollouts import RolloutsGraded

# The phases in which a model learns.
UPDATE = ("forward", "backward", "reduce", "optimize")
ROLES = ("actor", "critic")
# The parts of a step of reinforcement learning, and the phases that each one sums; all others are the rest.
RL_PARTS: Mapping[str, Sequence[str]] = {
    "wait for prompts": ("data",),
    "weight sync": ("sampler/sync",),
    "generate": ("sampler/generate",),
    "grade: queue": ("grader/queue",),
    "grade: work": ("grader/grade",),
    "old log-probs": ("actor/old_logprobs",),
    "reference": ("reference/logprobs",),
    "values": ("critic/values",),
    "actor update": tuple(f"actor/{phase}" for phase in UPDATE),
    "critic update": tuple(f"critic/{phase}" for phase in UPDATE),
}


class Speedometer:
    """Sums up steps as they finish, or many at once, in constant memory.

    The first steps of each attempt are warm-up; only training phases count.
    """

    def __init__(self, rates: Rates | None, *, warm_steps: int = WARM_STEPS) -> None:
        self.rates, self.warm_steps = rates, warm_steps
        self.steps, self.tokens, self.padded_tokens = 0, 0, 0
        self.seconds, self.wall = 0.0, 0.0
        self._phases: dict[str, float] = defaultdict(float)
        self._seen: Counter[int] = Counter()  # by attempt

    @property
    def data(self) -> float:
        """Seconds spent waiting for data."""
        return self._phases.get("data", 0.0)

    def see(self, record: StepRecord) -> None:
        self._seen[record.attempt] += 1
        if self._seen[record.attempt] > self.warm_steps:
            self.add(record)

    def add(self, some: StepRecord | Rollup, *, sign: int = 1) -> None:
        """Counts it, even if it is warm-up, but never under the profiler; with a `sign` of -1, subtracts it again."""
        if some.profiled:
            return
        self.steps += sign * some.num_steps
        self.tokens += sign * some.tokens
        self.padded_tokens += sign * some.padded_tokens
        self.wall += sign * some.seconds
        self.seconds += sign * some.training_s
        for phase, seconds in some.phases.items():
            self._phases[phase] += sign * seconds

    def read(self) -> Speed:
        if self.steps <= 0 or self.seconds <= 0:
            return Speed()
        shares = self.rates.shares(tokens=self.tokens, seconds=self.seconds) if self.rates else Shares()
        learning = learning_shares(self.rates, tokens=self.tokens, phases=self._phases)
        timed = bool(self._phases)
        return Speed(
            steps=self.steps,
            tokens_per_s=self.tokens / self.seconds,
            tokens_per_s_per_device=self.tokens / self.seconds / self.rates.num_devices if self.rates else None,
            padded_tokens_per_s=self.padded_tokens / self.seconds,
            step_s=self.seconds / self.steps,
            mfu=shares.mfu,
            hfu=shares.hfu,
            mfu_common=shares.mfu_common,
            data_share=max(0.0, self.data / self.seconds) if timed else None,
            # Two clocks never agree to the last digit.
            unattributed_share=max(0.0, 1 - sum(self._phases.values()) / self.wall) if timed else None,
            actor_mfu=learning.actor,
            critic_mfu=learning.critic,
            phases_s={phase: spent / self.steps for phase, spent in self._phases.items() if spent > 0},
        )


@dataclass(frozen=True, kw_only=True)
class Learning:
    """The MFU of a policy and of its critic, each in the seconds of its own update, by the common convention."""

    actor: float | None = None
    critic: float | None = None


def learning_shares(rates: Rates | None, *, tokens: int, phases: Mapping[str, float]) -> Learning:
    """Unknown for runs without rollouts, and where both models learn in one CUDA graph."""
    actor_s, critic_s = (sum(phases.get(phase, 0.0) for phase in RL_PARTS[f"{role} update"]) for role in ROLES)
    if rates is None or not actor_s or phases.get("forward"):
        return Learning()
    return Learning(
        actor=rates.shares(tokens=tokens, seconds=actor_s).mfu_common,
        critic=rates.shares(tokens=tokens, seconds=critic_s).critic if critic_s else None,
    )


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part of a step: its seconds, and their share of the step."""

    name: str
    seconds: float
    share: float


def rl_parts(speed: Speed) -> list[Part]:
    """The parts of a step of reinforcement learning, without evaluations and saves; empty for other recipes."""
    spent, step_s = speed.phases_s, speed.step_s
    if not step_s or not any(phase.startswith("actor/") for phase in spent):
        return []
    seconds = {name: sum(spent.get(phase, 0.0) for phase in phases) for name, phases in RL_PARTS.items()}
    named = {*BESIDE, *(phase for phases in RL_PARTS.values() for phase in phases)}
    seconds["rest"] = sum(took for phase, took in spent.items() if phase not in named)
    return [Part(name=name, seconds=took, share=took / step_s) for name, took in seconds.items()]


def speed_of(run: Run, parts: Sequence[Rollup], *, rates: Rates | None, rank: int = 0) -> Speed:
    """The speed of a run folder, from its `latest_rollups`: a million steps take only a few thousand lines."""
    meter = Speedometer(rates)
    for part in parts:
        meter.add(part)
    for step in warm_up(run, parts, rank=rank):
        meter.add(step, sign=-1)
    return meter.read()


def speed_of_steps(records: Iterable[StepRecord], *, rates: Rates | None) -> Speed:
    """The speed of a few steps, warm-up included: the current speed."""
    meter = Speedometer(rates, warm_steps=0)
    for record in records:
        meter.see(record)
    return meter.read()


def warm_up(run: Run, parts: Sequence[Rollup], *, rank: int = 0) -> list[StepRecord]:
    """The first steps of each attempt that still count."""
    left = Counter({part.attempt: WARM_STEPS for part in parts})
    found: list[StepRecord] = []
    for part in parts:
        if left[part.attempt]:
            found += islice(run.steps_in(part, rank=rank), left[part.attempt])
            left[part.attempt] -= min(left[part.attempt], part.num_steps)
    return found


class LossTrend:
    """Mean loss of the first and the last tenth of the steps a run has taken."""

    def __init__(self) -> None:
        self.losses = array("d")

    def see(self, loss: float) -> None:
        self.losses.append(loss)

    def ends(self) -> tuple[float | None, float | None]:
        """Both means; None if there are too few steps."""
        if len(self.losses) < 2:
            return None, None
        tenth = max(1, len(self.losses) // 10)
        return _mean_loss(self.losses[:tenth]), _mean_loss(self.losses[-tenth:])


def loss_ends(run: Run, parts: Sequence[Rollup]) -> tuple[float | None, float | None]:
    """The same for a run folder, from its `latest_rollups`; single steps are read only at the edges of a tenth."""
    parts = [part for part in parts if part.loss is not None or part.num_non_finite]
    steps = sum(part.num_steps for part in parts)
    if steps < 2:
        return None, None
    tenth = max(1, steps // 10)
    return _end(run, parts, tenth, last=False), _end(run, parts[::-1], tenth, last=True)


def _end(run: Run, parts: Sequence[Rollup], count: int, *, last: bool) -> float:
    total, finite = 0.0, 0
    for part in parts:
        if part.num_steps <= count:
            number = part.num_steps - part.num_non_finite
            total, finite, count = total + (part.loss or 0.0) * number, finite + number, count - part.num_steps
            continue
        losses = [step.loss for step in run.steps_in(part) if step.loss is not None]
        of_it = (losses[-count:] if last else losses[:count]) if count else []
        known = [loss for loss in of_it if abs(loss) <= LARGEST_LOSS]
        total, finite = total + sum(known), finite + len(known)
        break
    return total / finite if finite else math.nan


def _mean_loss(losses: Iterable[float]) -> float:
    """The mean of the finite losses; skipped updates and diverged runs have others."""
    known = [loss for loss in losses if abs(loss) <= LARGEST_LOSS]
    return sum(known) / len(known) if known else math.nan


def reward_ends(run: Run) -> tuple[float | None, float | None]:
    """Mean reward of the first and the last tenth of the phases of rollouts; None without any."""
    phases = {event.step: event.reward for event in run.events() if isinstance(event, RolloutsGraded)}
    rewards = [reward for reward in phases.values() if reward is not None]
    if len(rewards) < 2:
        return None, None
    tenth = max(1, len(rewards) // 10)
    return sum(rewards[:tenth]) / tenth, sum(rewards[-tenth:]) / tenth


def peak_words(rates: Rates | None, hardware: Mapping[str, Any]) -> str | None:
    """The peak that MFU refers to, such as `989 TFLOPS bf16 (datasheet)`; None if it is unknown."""
    if rates is None or not rates.peak_flops:
        return None
    measured = ((hardware.get("measured") or {}).get("flops") or {}).get(rates.precision)
    beside = f"; {measured / 1e12:.3g} measured here" if measured and rates.peak_source != "measured" else ""
    return rates.peak_words + beside


def judge(criteria: CriteriaSettings, outcome: Outcome) -> list[Verdict]:
    """One verdict per criterion that was set."""
    losses, vals = (outcome.loss_first_tenth, outcome.loss_last_tenth), outcome.val_losses
    speed = outcome.speed
    measured: dict[str, float | None] = {
        "tokens_per_s": speed.tokens_per_s,
        "tokens_per_s_per_device": speed.tokens_per_s_per_device,
        "mfu": speed.mfu_common,
        "utilisation": outcome.utilisation,
        "memory_share": outcome.memory_share,
        "hours": outcome.hours,
        "saves": float(outcome.saves),
        "actor_mfu": speed.actor_mfu,
        "critic_mfu": speed.critic_mfu,
        "reward": outcome.reward_last_tenth,
        "task_score": outcome.task_scores[-1] if outcome.task_scores else None,
    }
    at_most = {"memory_share", "hours"}
    unit = {"tokens_per_s": " in total", "tokens_per_s_per_device": " per device"}
    verdicts = []
    for criterion in fields(criteria):
        name, wanted = criterion.name, getattr(criteria, criterion.name)
        if wanted is None:
            continue
        if name == "loss_falling":
            verdicts.append(_trend(name, wanted, *losses))
        elif name == "validation_improving":
            verdicts.append(
                _trend(name, wanted, *_ends(vals)) if vals else _rise(name, wanted, *_ends(outcome.task_scores))
            )
        else:
            got = measured[name]
            sign = "at most" if name in at_most else "at least"
            met = None if got is None else (got <= wanted if name in at_most else got >= wanted)
            shown = "not measured" if got is None else _figure(got)
            verdicts.append(
                Verdict(criterion=name, wanted=f"{sign} {_figure(wanted)}{unit.get(name, '')}", got=shown, met=met)
            )
    return verdicts


def _figure(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _ends(values: Sequence[float]) -> tuple[float | None, float | None]:
    return (values[0], values[-1]) if len(values) > 1 else (None, None)


def _rise(name: str, wanted: bool, first: float | None, last: float | None) -> Verdict:
    """Of a score, where higher is better."""
    if first is None or last is None:
        return _trend(name, wanted, first, last)
    fall = _trend(name, wanted, -first, -last)
    return replace(fall, got=f"task score {first:.4f} to {last:.4f}")


def _trend(name: str, wanted: bool, first: float | None, last: float | None) -> Verdict:
    if first is None or last is None:
        return Verdict(criterion=name, wanted=str(wanted).lower(), got="not measured", met=None)
    return Verdict(
        criterion=name,
        wanted=str(wanted).lower(),
        got=f"{first:.4f} to {last:.4f}",
        met=(last < first) == wanted,
    )
