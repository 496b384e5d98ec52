"""Finds the fastest plan by measuring: `flatout tune CONFIG`.

The cost model starts the search: it predicts the time of every combination of decisions and leaves out those that do
not fit in memory. After each trial, the main effects of the decisions are fitted to what the model got wrong (ridge
regression), and the combination that is now predicted to be fastest is measured next. The effective batch and the
lengths never change. The learning rate has a search of its own (`lr`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, median
from typing import Any

import numpy as np

from flatout import parity
from flatout.errors import FlatoutError, RunFailed
from flatout.insight.ablate import LOSS_MARGIN, SEEDS, compared
from flatout.insight.compare import finite
from flatout.insight.switches import FOLLOW, PLAN, ROWS
from flatout.insight.trials import Measured, Trial, Trials
from flatout.parity import Difference
from flatout.plan import Job, decide
from flatout.plan.batch import MOST_ROWS

Choice = dict[str, Any]  # of one knob: values by dotted key
# The strength of the ridge.
RIDGE = 0.1
# How much faster, as a logarithm, a decision that was never tried may be than predicted.
OPTIMISM = 0.05
# The search ends after this many trials in a row that are not faster by a hundredth than the best one.
PATIENCE, BETTER = 6, 0.01
# A trial that crashes counts as this much slower than the slowest, as a logarithm.
CRASHED = 0.5
# Pairs of the start and the best plan at the end.
CONFIRMED = parity.LOOKS[0]


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The result of a search. Changes are by dotted key; a ratio below 1 means less time, or a lower loss."""

    start: Measured
    best: Measured
    changes: Mapping[str, tuple[Any, Any]]  # before and after
    gain: Difference | None
    loss_verdict: str | None
    without: Mapping[str, float | None]  # by knob: time of the best plan with it as before, as a ratio; one trial each
    trials: Sequence[Measured]
    left: str | None  # why the search ended early
    unpaid: str | None = None  # why the combination with the fastest steps is not the best one

    @property
    def values(self) -> dict[str, Any]:
        return {key: after for key, (_, after) in self.changes.items()}

    @property
    def unconfirmed(self) -> str | None:
        """Why the changes should not be written; None if they should."""
        if self.gain is None or self.gain.verdict != "faster":
            return f"the pairs do not show that the best plan is faster ({self.gain.verdict if self.gain else 'none'})"
        return "its loss is different" if self.loss_verdict == "different" else None

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = finite(asdict(self))
        return found


def knobs_of(job: Job, *, samples: bool = False, completions: int | None = None) -> dict[str, list[Choice]]:
    """What a search may change on this device; with `samples`, for trials that only sample.

    A trial with `completions` generates that many for its training.
    """
    sm, on_gpu = job.hardware.sm, job.device == "gpu"
    sixteen = "fp16" if on_gpu and sm is not None and sm < (8, 0) else "bf16"
    if samples:
        rows = [1 << power for power in range(3, MOST_ROWS[job.device].bit_length())]
        return {
            "concurrent sequences": [{ROWS: number} for number in rows],
            "precision": [{"plan.precision": name} for name in ("fp32", sixteen)],
        }
    count = job.rank_sequences
    sizes = [size for size in (1 << power for power in range(count.bit_length())) if count % size == 0]
    found: dict[str, list[Choice]] = {
        "precision": [{"plan.precision": name} for name in ("fp32", sixteen)],
        "micro-batch": [{"plan.micro_batch": size} for size in sizes],
        "recomputation": [{"plan.recompute": name} for name in ("none", "selective", "full")],
        "torch.compile": [{"plan.compile": name} for name in ("none", "default")],
        "fused optimizer": [{"plan.fused_optimizer": used} for used in (True, False)],
        "workers": [{"plan.workers": number} for number in (0, 2)],
    }
    attentions = ["flash", "cudnn", "efficient"] if on_gpu and job.packing != "documents" else ["flash"]
    if len(attentions) == 1 and job.pins.attention not in (None, *attentions):
        attentions.append(str(job.pins.attention))  # the file's own choice
    found["attention"] = [{"plan.attention": name} for name in attentions]
    if on_gpu:
        fused = ("plan.fused_qkv", "plan.fused_mlp", "plan.fused_loss")
        found |= {
            "fused kernels": [dict.fromkeys(fused, used) for used in (True, False)],
            "CUDA graphs": [{"plan.graphs": used} for used in (True, False)],
        }
        if sm is not None and sm >= (8, 9) and job.adapters is None:
            found["8-bit matmuls"] = [{"plan.fp8": used} for used in (True, False)]
    if completions is not None:
        most = min(MOST_ROWS[job.device], 1 << (completions - 1).bit_length())
        found["concurrent sequences"] = [{ROWS: 1 << power} for power in range(3, most.bit_length())]
    return {name: choices for name, choices in found.items() if len(choices) > 1}


class Model:
    """Predicts the logarithm of the step time: the plan's prediction, and main effects fitted to its errors."""

    def __init__(self, job: Job, knobs: Mapping[str, Sequence[Choice]]) -> None:
        self.job, self.knobs = job, knobs
        self.names = [name for choices in knobs.values() for choice in choices for name in _features(choice)]
        # The last one is the same for all: the error that every prediction shares.
        self._strength = np.diag([RIDGE] * len(self.names) + [1e-6])
        self._effects = np.zeros(len(self.names) + 1)
        self._spread = np.linalg.inv(self._strength)
        self._known: dict[str, float | None] = {}

    def candidates(self, best: Choice) -> Iterator[Choice]:
        """Those with up to two decisions other than the best one's, and that one."""
        near = [best]
        for _ in range(2):
            near += [one | choice for one in near for choices in self.knobs.values() for choice in choices]
        for values in near:
            if self.predicted(values) is not None:
                yield values

    def predicted(self, values: Choice) -> float | None:
        """The logarithm of the seconds per token by the plan, 0 if it is unknown.

        None if the combination does not fit in memory or contradicts itself.
        """
        name = key(values)
        if name not in self._known:
            self._known[name] = _predicted(self.job, values)
        return self._known[name]

    def fit(self, measured: Sequence[Measured]) -> None:
        """Fits the effects to all trials."""
        known = [(values_of(one, self.knobs), one.log_time) for one in measured if one.log_time is not None]
        rows = [(self._row(values), log - self._prior_of(values)) for values, log in known if log is not None]
        if not rows:
            return
        worst = max(error for _, error in rows) + CRASHED
        rows += [(self._row(one.settings), worst) for one in measured if one.problem and not one.out_of_memory]
        x, y = np.array([row for row, _ in rows]), np.array([error for _, error in rows])
        self._spread = np.linalg.inv(x.T @ x + self._strength)
        self._effects = self._spread @ x.T @ y

    def predict(self, values: Choice) -> float:
        """The expected logarithm, less a bonus for decisions that were rarely tried: they may be better."""
        row = self._row(values)
        tried = row[:-1] @ self._spread[:-1, :-1] @ row[:-1]
        return self._prior_of(values) + float(row @ self._effects) - OPTIMISM * math.sqrt(max(0.0, float(tried)))

    def _prior_of(self, values: Choice) -> float:
        return self.predicted(values) or 0.0

    def _row(self, values: Mapping[str, Any]) -> np.ndarray[Any, Any]:
        has = set(_features(values))
        return np.array([*(float(name in has) for name in self.names), 1.0])


def _features(values: Mapping[str, Any]) -> list[str]:
    return [f"{name}={value}" for name, value in values.items()]


def key(values: Mapping[str, Any]) -> str:
    return " ".join(sorted(_features(values)))


def values_of(one: Measured, knobs: Mapping[str, Sequence[Choice]]) -> Choice:
    """The decisions of a trial, for the keys that the search may change."""
    names = [name for choices in knobs.values() for name in choices[0]]
    return {name: one.decisions.get(name.removeprefix(PLAN)) for name in names}


def _predicted(job: Job, values: Choice) -> float | None:
    pins = {name.removeprefix(PLAN): value for name, value in values.items() if name != ROWS}
    if not pins.keys() - {"precision"}:
        return 0.0  # the plan predicts training only
    try:
        plan = decide(replace(job, pins=replace(job.pins, accumulation=None, loss_chunk=None, **pins)))
    except FlatoutError:
        return None  # it does not fit, or contradicts itself
    if job.usable_gib is not None and plan.predicted.peak_gib > job.usable_gib:
        return None
    return -math.log(plan.predicted.tokens_per_s) if plan.predicted.tokens_per_s else 0.0


def tune(
    trials: Trials, job: Job, *, most: int = 20, budget_s: float | None = None, loss_margin: float = LOSS_MARGIN
) -> Tuned:
    """Searches, confirms the best plan against the start, and measures what each change brought."""
    seed, rl = trials.settings.seed, trials.settings.rl
    completions = rl.prompts * rl.samples if trials.settings.recipe == "rl" else None
    knobs = knobs_of(job, samples=trials.samples, completions=completions)
    start = trials.run(Trial(settings={}, seed=seed), name="as it is", again=True)
    if start.problem is not None and not start.out_of_memory:
        raise RunFailed(f"the configuration itself cannot be measured: {start.problem}")
    names = [name for choices in knobs.values() for name in choices[0]]
    free = dict.fromkeys([*names, *FOLLOW])
    unpinned = trials.run(Trial(settings=free, seed=seed), name="the plan's own choice")
    levels = Levels(trials, start if start.problem is None else unpinned)
    model, measured, left = Model(job, knobs), [start, levels.of(unpinned)], None
    reserve = 2 * CONFIRMED + len(knobs)
    stale = 0
    while len(measured) < most:
        model.fit(measured)
        values = _next(model, measured, knobs)
        if values is None:
            left = "every combination that the plan allows was measured or ruled out"
            break
        trial = Trial(settings=values | dict.fromkeys(FOLLOW), seed=seed)
        if not trials.known(trial) and not fits(trials, 1 + levels.missing + reserve, budget_s=budget_s):
            left = "the budget was spent"
            break
        best = _best(measured)
        measured.append(levels.of(trials.run(trial, name=_told(values, knobs))))
        found = measured[-1].log_time
        if measured[-1].out_of_memory:
            continue  # it rules out all that need as much
        better = found is not None and (best.log_time is None or found < best.log_time - BETTER)
        stale = 0 if better else stale + 1
        if stale >= PATIENCE:
            left = f"{PATIENCE} trials in a row were not faster by {BETTER:.0%}"
            break
    best, unpaid = _worth(measured, job)
    if best.problem is not None:
        raise RunFailed(f"no trial could be measured; the last one: {best.problem}")
    changes = _changes(start, best, trials, knobs)
    pairs = _confirmed(trials, changes, budget_s=budget_s) if changes else []
    gain, _, loss = compared([a for a, _ in pairs], [b for _, b in pairs], margin=loss_margin)
    return Tuned(
        start=start,
        best=best,
        changes=changes,
        gain=gain,
        loss_verdict=loss,
        without=_without(trials, start, best, knobs, levels=levels, budget_s=budget_s) if changes else {},
        trials=measured,
        left=left,
        unpaid=unpaid,
    )


class Levels:
    """Speeds of a search that several calls measured: the machine may be slower in one of them.

    Every call measures the same settings once, and its other trials are scaled by that.
    """

    def __init__(self, trials: Trials, first: Measured) -> None:
        self.trials, self.first = trials, first

    @property
    def missing(self) -> int:
        """How many trials this call needs to be compared with the first."""
        return 0 if self._known(self.trials.call) else 1

    def of(self, one: Measured) -> Measured:
        """The trial with the time that it would have taken in the first call."""
        if one.log_time is None or one.call == self.first.call:
            return one
        seeds = itertools.count(self.first.seed + SEEDS)
        while not (known := self._known(one.call)) and one.call == self.trials.call:
            trial = Trial(settings=self.first.settings, seed=next(seeds))
            if self.trials.run(trial, name="the first trial again").problem is not None:
                break
        there = self._known(self.first.call)
        return replace(one, log_time=one.log_time - fmean(known) + fmean(there)) if known and there else one

    def _known(self, call: float) -> list[float]:
        every = (one for one in self.trials.found.values() if one.call == call)
        return [one.log_time for one in every if one.settings == self.first.settings and one.log_time is not None]


def fits(trials: Trials, count: int, *, budget_s: float | None) -> bool:
    """Whether this many more trials fit the budget, by the mean time of all so far."""
    known = [one.seconds for one in trials.found.values()]
    mean = sum(known) / len(known) if known else 0.0
    return budget_s is None or trials.spent_s + count * mean <= budget_s


def _best(measured: Sequence[Measured]) -> Measured:
    return min(measured, key=lambda one: math.inf if one.log_time is None else one.log_time)


def _worth(measured: Sequence[Measured], job: Job) -> tuple[Measured, str | None]:
    """The trial whose run would end first, and why that is not the one with the fastest steps.

    Compilation delays the first step, by the longest start of a compiled trial, as torch caches what it compiled.
    """
    fastest = _best(measured)
    late = [one.start_s for one in measured if _compiled(one) and one.start_s is not None]
    early = [one.start_s for one in measured if not _compiled(one) and one.start_s is not None]
    if job.steps is None or not late or not early or not _compiled(fastest):
        return fastest, None
    delay_s, tokens = max(late) - median(early), job.steps * job.batch_tokens
    plain = _best([one for one in measured if not _compiled(one)])
    if plain.log_time is None or fastest.log_time is None:
        return fastest, None
    if math.exp(fastest.log_time) + delay_s / tokens < math.exp(plain.log_time):
        return fastest, None
    told = f"compiling delays the first step by {delay_s:.1f} s, which does not pay off in {job.steps:,} steps"
    return plain, told


def _compiled(one: Measured) -> bool:
    return one.decisions.get("compile") not in (None, "none")


def _next(model: Model, measured: Sequence[Measured], knobs: Mapping[str, Sequence[Choice]]) -> Choice | None:
    """The combination that is predicted to be fastest, of those that were neither measured nor ruled out."""
    tried = {key(values_of(one, knobs)) for one in measured}
    tried |= {key(_own(one.settings)) for one in measured}
    failed = [_needed(one) for one in measured if one.out_of_memory]
    possible = {
        key(values): values
        for values in model.candidates(values_of(_best(measured), knobs))
        if key(values) not in tried and not any(_as_heavy(values, settings) for settings in failed)
    }
    return min(possible.values(), key=model.predict, default=None)


def _needed(failed: Measured) -> Choice:
    """The settings of a trial that ran out of memory, with the sizes that the plan had chosen for it."""
    planned = {ROWS: failed.decisions.get(ROWS), "plan.micro_batch": failed.decisions.get("micro_batch")}
    return planned | {name: value for name, value in failed.settings.items() if value is not None}


def _as_heavy(values: Choice, failed: Mapping[str, Any]) -> bool:
    """Whether a combination needs at least the memory of one that failed."""

    def heavy(one: Mapping[str, Any]) -> tuple[int, ...]:
        kept = ("full", "selective", "none").index(one.get("plan.recompute") or "none")
        bits = 32 if one.get("plan.precision") == "fp32" else 16
        sizes = one.get(ROWS) or 0, one.get("plan.micro_batch") or 0
        return *sizes, kept, bits, int(one.get("plan.fused_loss") is False)

    return all(mine >= theirs for mine, theirs in zip(heavy(values), heavy(failed), strict=True))


def _own(settings: Mapping[str, Any]) -> Choice:
    return {name: value for name, value in settings.items() if name not in FOLLOW}


def _told(values: Choice, knobs: Mapping[str, Sequence[Choice]]) -> str:
    words = []
    for name, choices in knobs.items():
        own = [values[inner] for inner in choices[0]]
        words.append(f"{name} {own[0]}")
    return ", ".join(words)


def _changes(
    start: Measured, best: Measured, trials: Trials, knobs: Mapping[str, Sequence[Choice]]
) -> dict[str, tuple[Any, Any]]:
    """The keys of the configuration that the best plan needs, where the user's own plan differs."""
    before, after = values_of(start, knobs), values_of(best, knobs)
    found = {name: (before[name], after[name]) for name in after if after[name] != before[name]}
    # A pin that contradicts the new micro-batch is set too; the effective batch stays the same.
    if "plan.micro_batch" in found and trials.settings.plan.accumulation is not None:
        found["plan.accumulation"] = (start.decisions.get("accumulation"), best.decisions["accumulation"])
    return found


def _confirmed(
    trials: Trials, changes: Mapping[str, tuple[Any, Any]], *, budget_s: float | None
) -> list[tuple[Measured, Measured]]:
    """The start and the best plan in turn, with other seeds: what was best by chance is not best again."""
    values = {name: after for name, (_, after) in changes.items()}
    both = {"as it is": dict[str, Any](), "the best plan": values}
    pairs: list[tuple[Measured, Measured]] = []
    for block in itertools.count():
        seed = trials.settings.seed + 1 + block
        made = {name: Trial(settings=settings, seed=seed) for name, settings in both.items()}
        known = {trials.run(trial, name="").call for trial in made.values() if trials.known(trial)}
        new = sum(not trials.known(trial) for trial in made.values())
        if len(known) > 1 or (known and new and known != {trials.call}):
            continue  # another call measured one of them
        if len(pairs) == CONFIRMED or (new and not fits(trials, new, budget_s=budget_s)):
            break
        found = {
            name: trials.run(made[name], name=f"confirming, {name}")
            for name in (list(both) if len(pairs) % 2 == 0 else reversed(both))
        }
        pairs.append((found["as it is"], found["the best plan"]))
    return [(a, b) for a, b in pairs if a.problem is None and b.problem is None]


def _without(
    trials: Trials,
    start: Measured,
    best: Measured,
    knobs: Mapping[str, Sequence[Choice]],
    *,
    levels: Levels,
    budget_s: float | None,
) -> dict[str, float | None]:
    """The time of the best plan with one knob as before, as a ratio to the best plan's; None if it fails."""
    before, after, found = values_of(start, knobs), values_of(best, knobs), dict[str, float | None]()
    for name, choices in knobs.items():
        own = list(choices[0])
        if all(before[inner] == after[inner] for inner in own):
            continue
        values = after | {inner: before[inner] for inner in own}
        trial = Trial(settings=values | dict.fromkeys(FOLLOW), seed=trials.settings.seed)
        if not trials.known(trial) and not fits(trials, 1 + levels.missing, budget_s=budget_s):
            break
        one = levels.of(trials.run(trial, name=f"the best plan, {name} as before"))
        known = one.log_time is not None and best.log_time is not None
        found[name] = math.exp((one.log_time or 0.0) - (best.log_time or 0.0)) if known else None
    return found
