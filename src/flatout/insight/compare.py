"""Compares runs: speed, memory, phases, loss at equal tokens and at equal time, task scores, settings, cost.

Runs of flatout whose settings, device and versions differ only in the seed are repeats of one configuration. A watched
script is a configuration of its own, since it may have been edited. With three repeats or more the unit of
evidence is a run, and runs with the same seed are a pair. With fewer, it is a block of steps. Then a machine that was
slower on the day of one run cannot be told from a slower configuration, and the answer says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any, Literal

from flatout import parity
from flatout.errors import UsageError
from flatout.insight.story import Story, TaskScore, tell
from flatout.parity import Difference
from flatout.record import Run, Verdict
from flatout.verdict import reward_ends, warm_up
from flatout.words import duration, loss_text, number, percent

# Steps of a block at least, blocks at most, and the steps at the end of a run that they are taken from.
BLOCK_STEPS, MOST_BLOCKS, STEPS_READ = 10, 16, 4096
# A loss is the mean over this share of the tokens, or of the time, before the point of comparison.
TAIL = 0.1
# Losses that are shown to differ by less are called equal.
LOSS_MARGIN = 0.01
SEED, RUNS = "seed", "runs"

LossVerdict = Literal["lower", "higher", "equal", "not enough evidence"]


@dataclass(frozen=True, kw_only=True)
class Side:
    """One configuration: its runs by seed."""

    name: str
    runs: Mapping[Any, Run]
    stories: Mapping[Any, Story]

    def mean(self, of: Callable[[Story], float | None]) -> float | None:
        """Over the runs; None if one of them does not have it."""
        values = [of(story) for story in self.stories.values()]
        return None if None in values else fmean(value for value in values if value is not None)

    @property
    def config(self) -> Mapping[str, Any]:
        return next(iter(self.stories.values())).config


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """The means over the runs of one configuration. Unknown is None."""

    name: str
    runs: int
    steps: float | None
    state: str  # of the first run, as the tasks and the criteria are
    tokens_per_s: float | None
    mfu: float | None
    peak_gib: float | None
    loss_at_equal_tokens: float | None
    loss_at_equal_time: float | None
    val_loss: float | None
    reward: float | None  # in the last tenth of the phases of rollouts
    device_hours: float
    cost: float | None
    phases: Mapping[str, float]  # seconds of a step
    tasks: Mapping[str, TaskScore]  # of the first run, by task, at its last step
    criteria: Mapping[str, Verdict]  # by criterion and what is wanted


@dataclass(frozen=True, kw_only=True)
class Against:
    """One configuration against the first. Ratios below 1 mean less time, or a lower loss."""

    name: str
    unit: str  # of the evidence for the speed
    time: Difference
    loss: Difference | None  # None without repeats, or where a loss is not positive
    loss_verdict: LossVerdict


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of text with a column for each configuration."""

    title: str
    rows: Sequence[tuple[str, Sequence[str]]]


@dataclass(frozen=True, kw_only=True)
class Comparison:
    sides: Sequence[Numbers]
    against: Sequence[Against]
    tokens: int  # up to which losses are compared
    seconds: float
    settings: Sequence[tuple[str, Sequence[Any]]] = field(default_factory=list)  # those that differ
    decisions: Sequence[tuple[str, Sequence[Any]]] = field(default_factory=list)  # of the plans, likewise

    @property
    def has_rewards(self) -> bool:
        return any(side.reward is not None for side in self.sides)

    def tables(self) -> list[Table]:
        """The numbers of all configurations next to each other."""
        numbers: list[tuple[str, Callable[[Numbers], str]]] = [
            ("runs", lambda side: str(side.runs)),
            ("state", lambda side: side.state),
            ("steps", lambda side: number(side.steps)),
            ("tokens/s", lambda side: number(side.tokens_per_s)),
            ("MFU", lambda side: percent(side.mfu)),
            ("peak memory", lambda side: number(side.peak_gib, unit=" GiB")),
            (f"loss at {self.tokens:,} tokens", lambda side: loss_text(side.loss_at_equal_tokens)),
            (f"loss at {duration(self.seconds)}", lambda side: loss_text(side.loss_at_equal_time)),
            ("last validation loss", lambda side: loss_text(side.val_loss)),
            *([("reward, last tenth", lambda side: number(side.reward))] if self.has_rewards else []),
            ("device hours", lambda side: number(side.device_hours)),
        ]
        if any(side.cost is not None for side in self.sides):
            numbers.append(("cost", lambda side: number(side.cost)))
        phases = dict.fromkeys(name for side in self.sides for name in side.phases)
        tasks = dict.fromkeys(name for side in self.sides for name in side.tasks)
        criteria = dict.fromkeys(name for side in self.sides for name in side.criteria)
        repeated = any(side.runs > 1 for side in self.sides)
        return [
            Table(
                title="Means of the runs" if repeated else "Runs",
                rows=[(name, [text(side) for side in self.sides]) for name, text in numbers],
            ),
            Table(
                title="Seconds of a step",
                rows=[(name, [number(side.phases.get(name)) for side in self.sides]) for name in phases],
            ),
            Table(
                title="Tasks, of the first run" if repeated else "Tasks",
                rows=[(name, [_score(side.tasks.get(name)) for side in self.sides]) for name in tasks],
            ),
            Table(
                title="Criteria, of the first run" if repeated else "Criteria",
                rows=[(name, [_met(side.criteria.get(name)) for side in self.sides]) for name in criteria],
            ),
        ]

    def sentences(self, one: Against) -> list[str]:
        """What the evidence says about the speed and the loss of one configuration."""
        time, loss, found = one.time, one.loss, list[str]()
        if time.verdict == "too few pairs":
            found.append(f"Speed: too few steps to tell ({time.pairs} {one.unit}).")
        else:
            speed = f"{1 / time.ratio:.3f} times the speed (95 % interval {1 / time.high:.3f} to {1 / time.low:.3f})"
            found.append(f"Speed: {time.verdict}; {speed}, from {time.pairs} pairs of {one.unit}.")
        if one.unit != RUNS:
            found.append(
                "The runs did not take turns, so a machine that was slower during one of them is not ruled out."
            )
        if self.has_rewards:
            mine, first = (
                next(number(side.reward) for side in self.sides if side.name == name)
                for name in (one.name, self.sides[0].name)
            )
            found.append(
                f"Reward in the last tenth: {mine} against {first}. A policy's loss does not tell how well it does; "
                "three runs of each with the same seeds would tell whether rewards differ by chance."
            )
        elif loss is None:
            found.append(f"Loss: {one.loss_verdict}; three runs of each with the same seeds would decide.")
        else:
            change = f"{loss.ratio - 1:+.2%} (95 % interval {loss.low - 1:+.2%} to {loss.high - 1:+.2%})"
            found.append(
                f"Loss: {one.loss_verdict}; {change} at {self.tokens:,} tokens, from {loss.pairs} pairs of runs."
            )
        return found

    def to_json(self) -> dict[str, Any]:
        """An interval without an end has null there."""
        found: dict[str, Any] = finite(asdict(self))
        return found


def compare(
    runs: Sequence[Run],
    *,
    stories: Sequence[Story] | None = None,
    price: float | None = None,
    loss_margin: float = LOSS_MARGIN,
) -> Comparison:
    """The first run's configuration is the one that others are compared with.

    `stories` are those of the runs, if they were read already; `price` is that of a device for an hour.
    """
    sides = sides_of(runs, stories or [tell(run) for run in runs])
    if len(sides) < 2:
        raise UsageError(
            "these runs differ in nothing but their seed: give runs of two configurations, devices or versions"
        )
    every = [story for side in sides for story in side.stories.values()]
    if empty := next((story.path for story in every if not story.num_steps), None):
        raise UsageError(f"{empty} has no steps yet, so there is nothing to compare")
    tokens, seconds = min(story.tokens for story in every), min(story.seconds for story in every)
    firsts = [next(iter(side.stories.values())) for side in sides]
    return Comparison(
        sides=[_numbers(side, tokens=tokens, seconds=seconds, price=price) for side in sides],
        against=[_against(sides[0], side, tokens=tokens, loss_margin=loss_margin) for side in sides[1:]],
        tokens=tokens,
        seconds=seconds,
        settings=_of_own(firsts, lambda story: _unseeded(story.config) | _setup(story)),
        decisions=_of_own(firsts, lambda story: story.plan.get("decisions", {})),
    )


def _of_own(stories: Sequence[Story], facts: Callable[[Story], Mapping[str, Any]]) -> list[tuple[str, list[Any]]]:
    """The facts that differ between runs of flatout; None for watched scripts, which have none."""
    own = [at for at, story in enumerate(stories) if not story.plan.get("foreign")]
    found = [
        (key, dict(zip(own, values, strict=True))) for key, values in differences([facts(stories[at]) for at in own])
    ]
    return [(key, [of.get(at) for at in range(len(stories))]) for key, of in found]


def _setup(story: Story) -> dict[str, Any]:
    """What a run depends on besides its settings."""
    packages = story.environment.get("packages") or {}
    device = story.hardware.get("gpu") or story.hardware.get("cpu")
    return {"device": device, "torch": packages.get("torch"), "flatout": story.environment.get("flatout")}


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _met(verdict: Verdict | None) -> str:
    if verdict is None:
        return "not set"
    return verdict.got if verdict.met is None else f"{verdict.got}: {'met' if verdict.met else 'not met'}"


def _score(score: TaskScore | None) -> str:
    return "n/a" if score is None else score.score


def sides_of(runs: Sequence[Run], stories: Sequence[Story]) -> list[Side]:
    """Runs by configuration, in the order in which each was first named."""
    found: dict[tuple[tuple[str, str], ...], list[tuple[Any, Run, Story]]] = {}
    for run, story in zip(runs, stories, strict=True):
        facts = {"watched": story.path} if story.plan.get("foreign") else _unseeded(story.config) | _setup(story)
        settings = tuple((name, repr(value)) for name, value in flatten(facts))
        found.setdefault(settings, []).append((story.config.get(SEED), run, story))
    sides, taken = [], set[str]()
    for several in found.values():
        name = base = several[0][2].name
        number = 2
        while name in taken:
            name, number = f"{base} ({number})", number + 1
        taken.add(name)
        # Repeats with the same seed are kept apart by their number.
        seeds = [(seed, [s for s, _, _ in several[:at]].count(seed)) for at, (seed, _, _) in enumerate(several)]
        runs_by_seed = {seed: run for seed, (_, run, _) in zip(seeds, several, strict=True)}
        by_seed = {seed: story for seed, (_, _, story) in zip(seeds, several, strict=True)}
        sides.append(Side(name=name, runs=runs_by_seed, stories=by_seed))
    return sides


def _unseeded(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in _of_training(config).items() if key != SEED}


def _of_training(config: Mapping[str, Any]) -> dict[str, Any]:
    """The settings without the run folder, which is only where the run lies."""
    return {key: value for key, value in config.items() if key != "run"}


def _numbers(side: Side, *, tokens: int, seconds: float, price: float | None) -> Numbers:
    hours = [story.seconds / 3600 * max(1, len(story.ranks)) for story in side.stories.values()]
    first = next(iter(side.stories.values()))
    steps = [_step(run, side.stories[seed]) for seed, run in side.runs.items()]
    return Numbers(
        name=side.name,
        runs=len(side.runs),
        steps=side.mean(lambda story: story.num_steps),
        state=first.state.sentence,
        tokens_per_s=side.mean(lambda story: story.speed.tokens_per_s),
        mfu=side.mean(lambda story: story.speed.mfu),
        peak_gib=side.mean(lambda story: story.peak_gib),
        loss_at_equal_tokens=side.mean(lambda story: loss_before(story, tokens=tokens)),
        loss_at_equal_time=side.mean(lambda story: loss_before(story, seconds=seconds)),
        val_loss=side.mean(lambda story: story.evaluations[-1].val_loss if story.evaluations else None),
        reward=fmean(rewards) if (rewards := _known(reward_ends(run)[1] for run in side.runs.values())) else None,
        device_hours=fmean(hours),
        cost=None if price is None else price * fmean(hours),
        phases={
            name: fmean(step.get(name, 0.0) for step in steps)
            for name in dict.fromkeys(name for step in steps for name in step)
        },
        tasks={score.task: score for score in first.tasks},  # they are in the order of steps
        criteria={f"{verdict.criterion}, {verdict.wanted}": verdict for verdict in first.criteria},
    )


def _step(run: Run, story: Story) -> dict[str, float]:
    """Seconds of a step by phase, without the warm-up if there are other steps."""
    found, warm = {phase.name: phase.seconds for phase in story.phases}, warm_up(run, run.latest_rollups())
    count = story.num_steps - len(warm)
    if count <= 0:
        return {name: seconds / story.num_steps for name, seconds in found.items()}
    for step in warm:
        known = step.phases
        for name, seconds in {**known, "unattributed": step.seconds - sum(known.values())}.items():
            if name in found:
                found[name] -= seconds
    return {name: max(0.0, seconds) / count for name, seconds in found.items()}


def _against(first: Side, other: Side, *, tokens: int, loss_margin: float) -> Against:
    shared = [seed for seed in first.runs if seed in other.runs]
    if len(shared) < parity.FEWEST_PAIRS:
        a, b, unit = _blocks(first, other)
        return Against(
            name=other.name,
            unit=unit,
            # Runs of the same thing on the same machine differ by this much from one hour to the next.
            time=parity.paired(a, b, looks=(max(1, len(a)),), floor=math.log1p(parity.MARGIN)),
            loss=None,
            loss_verdict="not enough evidence",
        )
    times = [[_typical(side.runs[seed]) for seed in shared] for side in (first, other)]
    losses = [[loss_before(side.stories[seed], tokens=tokens) for seed in shared] for side in (first, other)]
    known = [[math.log(loss) for loss in side if loss is not None and loss > 0] for side in losses]
    looks = (len(shared),)
    complete = all(len(side) == len(shared) for side in known)
    loss = parity.paired(known[0], known[1], looks=looks, margin=loss_margin) if complete else None
    return Against(
        name=other.name,
        unit=RUNS,
        time=parity.paired(times[0], times[1], looks=looks),
        loss=loss,
        loss_verdict=_loss_verdict(loss, equal=complete and parity.equivalent(*known, margin=loss_margin)),
    )


def _typical(run: Run) -> float:
    if not (found := costs(run)):
        raise UsageError(f"{run.path} has only warm-up steps, so its speed is unknown: let it run longer")
    return parity.typical(found)


def _loss_verdict(loss: Difference | None, *, equal: bool) -> LossVerdict:
    if equal:
        return "equal"
    if loss is None or not loss.decided:
        return "not enough evidence"
    return "lower" if loss.verdict == "faster" else "higher"


def _blocks(first: Side, other: Side) -> tuple[list[float], list[float], str]:
    """Block i of one run beside block i of the other."""
    series = [costs(next(iter(side.runs.values()))) for side in (first, other)]
    count = min(MOST_BLOCKS, *(len(one) // BLOCK_STEPS for one in series))
    if not count:
        return [], [], f"blocks of {BLOCK_STEPS} steps"
    found = []
    for one in series:
        size = len(one) // count
        found.append([parity.typical(one[at * size : (at + 1) * size]) for at in range(count)])
    sizes = sorted({len(one) // count for one in series})
    return found[0], found[1], f"blocks of {' and '.join(map(str, sizes))} steps"


def costs(run: Run) -> list[float]:
    """Seconds per token of the last steps, without the warm-up of each attempt."""
    latest = run.latest_rollups()
    warm = {(step.attempt, step.step) for step in warm_up(run, latest)}
    steps = [step for step in run.recent_steps(STEPS_READ, latest=latest) if not step.profiled]
    return [s.training_s / s.tokens for s in steps if (s.attempt, s.step) not in warm and s.tokens and s.training_s > 0]


def loss_before(story: Story, *, tokens: float | None = None, seconds: float | None = None) -> float | None:
    """The mean loss over the last tenth of the first `tokens`, or `seconds`; None if it is unknown or not finite."""
    end = tokens if tokens is not None else seconds
    assert end is not None
    start, at, total, weight = (1 - TAIL) * end, 0.0, 0.0, 0.0
    for part in story.parts:
        size = part.tokens if tokens is not None else part.seconds
        inside = min(at + size, end) - max(at, start)
        at += size
        if inside <= 0:
            continue
        if part.loss is None or part.num_non_finite:
            return None
        total, weight = total + inside * part.loss, weight + inside
    return total / weight if weight else None


def finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def differences(configs: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[Any]]]:
    """The settings that differ between the runs; a missing one counts as unset."""
    flat = [dict(flatten(config)) for config in configs]
    keys = dict.fromkeys(key for config in flat for key in config)
    rows = [(key, [config.get(key) for config in flat]) for key in keys]
    return [(key, values) for key, values in rows if any(value != values[0] for value in values)]


def settings_that_differ(stories: Sequence[Story]) -> list[tuple[str, list[Any]]] | None:
    """The settings that differ between runs, None where they cannot: a watched script has no settings of flatout."""
    if sum(not story.plan.get("foreign") for story in stories) < 2:
        return None
    return _of_own(stories, lambda story: _of_training(story.config))


def flatten(facts: Mapping[str, Any], *, under: str = "") -> Iterable[tuple[str, Any]]:
    """Nested facts as dotted names."""
    for key, value in facts.items():
        name = f"{under}{key}"
        if isinstance(value, Mapping) and value:
            yield from flatten(value, under=f"{name}.")
        elif isinstance(value, list) and any(isinstance(item, Mapping) for item in value):
            yield from flatten({str(at): item for at, item in enumerate(value)}, under=f"{name}.")
        else:
            yield name, value
