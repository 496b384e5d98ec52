"""Finds the fastest plan by measuring: `flatout tune CONFIG`.

The cost model starts the search: it predicts the time of every combination of decisions and leaves out those that do
not fit in memory. After each trial, the main effects of the decisions are fitted to what the model got wrong (ridge
regression), and the combination that is now predicted to be fastest is measured next. A change that its own undo does
not support is dropped before the rest is measured again in pairs. The effective batch and the lengths never change. The
learning rate has a search of its own (`lr`).
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean, median
from typing import Any

import numpy as np

from flatout import parity
from flatout.config.settings import PlanSettings, settable
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
# Trials of a search without a budget.
MOST = 20
# The search ends after this many trials in a row that are not faster by a hundredth than the best one.
PATIENCE, BETTER = 6, 0.01
# A trial that crashes counts as this much slower than the slowest, as a logarithm.
CRASHED = 0.5
# With a budget the search is this many times as patient.
BUDGET_PATIENCE = 2
# Pairs of the start and the best plan at the end, up to the first look.
CONFIRMED = parity.LOOKS[0]
# Pins that no trial of one process can show, and those that follow from others.
UNTRIED = ("plan.preset", "plan.sharding", "plan.accumulation")


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The result of a search. Changes are by dotted key; a ratio below 1 means less time, or a lower loss."""

    start: Measured
    best: Measured
    changes: Mapping[str, tuple[Any, Any]]  # before and after
    gain: Difference | None
    loss_verdict: str | None
    without: Mapping[str, float | None]  # by knob: time of the best plan with it as before, as a ratio; one trial each
    dropped: Mapping[str, float]  # the same of the changes that were dropped, because their undo was not slower
    trials: Sequence[Measured]
    left: str | None  # why the search ended early
    unpaid: str | None = None  # why the combination with the fastest steps is not the best one

    @property
    def values(self) -> dict[str, Any]:
        return {key: after for key, (_, after) in self.changes.items()}

    @property
    def unconfirmed(self) -> str | None:
        """Why the changes should not be written; None if they should."""
        pairs = 0 if self.gain is None else self.gain.pairs
        if pairs < CONFIRMED:
            return f"it takes {CONFIRMED} pairs of trials, and {pairs} fit the budget; the same --run continues"
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
        precisions: list[Choice] = [{"plan.precision": name} for name in ("fp32", sixteen)]
        return {
            "concurrent sequences": [{ROWS: number} for number in rows],
            "precision": precisions,
            **_threads(job),
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
    found |= _threads(job)
    found |= _pinned(job, found)
    return {name: choices for name, choices in found.items() if len(choices) > 1}


def _threads(job: Job) -> dict[str, list[Choice]]:
    """Numbers of threads, where they do the work."""
    if job.device == "gpu" or job.hardware.num_cpus is None:
        return {}
    cores = max(1, job.hardware.num_cpus // job.num_ranks)
    counts = {1 << power for power in range(cores.bit_length())} | {cores, job.pins.threads or cores}
    return {"threads": [{"plan.threads": number} for number in sorted(counts)]} if len(counts) > 1 else {}


def _pinned(job: Job, knobs: Mapping[str, list[Choice]]) -> dict[str, list[Choice]]:
    """The knobs with the values of the user's file and of the plan itself; a pin without a knob becomes one."""
    own, by_key = own_choices(job), {name: knob for knob, choices in knobs.items() for name in choices[0]}
    found = {knob: list(choices) for knob, choices in knobs.items()}
    for field in settable(PlanSettings):
        name, pin = PLAN + field.name, getattr(job.pins, field.name)
        if name in UNTRIED or (pin is None and name not in by_key):
            continue
        choices = found.setdefault(by_key.get(name, field.name), [])
        if choices and len(choices[0]) > 1:
            continue  # several settings that change together have both values
        for value in (pin, own.get(name)):
            if value is not None and {name: value} not in choices:
                choices.append({name: value})
    return found


def own_choices(job: Job) -> Choice:
    """What the plan decides by itself, by dotted key; nothing where no such plan fits."""
    try:
        made = decide(replace(job, pins=PlanSettings(preset=job.pins.preset)))
    except FlatoutError:
        return {}
    return {PLAN + name: value for name, value in asdict(made.decisions).items()}


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
    if not pins.keys() - {"precision", "threads"}:
        return 0.0  # the plan predicts training only
    try:
        plan = decide(replace(job, pins=replace(job.pins, accumulation=None, loss_chunk=None, **pins)))
    except FlatoutError:
        return None  # it does not fit, or contradicts itself
    if job.usable_gib is not None and plan.predicted.peak_gib > job.usable_gib:
        return None
    return -math.log(plan.predicted.tokens_per_s) if plan.predicted.tokens_per_s else 0.0


def tune(
    trials: Trials,
    job: Job,
    *,
    most: int | None = None,
    budget_s: float | None = None,
    loss_margin: float = LOSS_MARGIN,
) -> Tuned:
    """Searches, drops what does not help, and confirms the best plan against the start.

    Without `most`, a search with a budget has as many trials as fit.
    """
    seed, rl = trials.settings.seed, trials.settings.rl
    completions = rl.prompts * rl.samples if trials.settings.recipe == "rl" else None
    knobs = knobs_of(job, samples=trials.samples, completions=completions)
    start = trials.run(Trial(settings={}, seed=seed), name="as it is", again=True)
    if start.problem is not None and not start.out_of_memory:
        raise RunFailed(f"the configuration itself cannot be measured: {start.problem}")
    unpinned = trials.run(Trial(settings=_free(job, knobs), seed=seed), name="the plan's own choice")
    levels = Levels(trials, start if start.problem is None else unpinned)
    search = _Search(trials, job, knobs=knobs, levels=levels, budget_s=budget_s)
    search.measured = [start, levels.of(unpinned)]
    left = search.run(most=most or (MOST if budget_s is None else sys.maxsize))
    best, unpaid = _worth(search.measured, job)
    if best.problem is not None:
        raise RunFailed(f"no trial could be measured; the last one: {best.problem}")
    best, without, dropped = search.pruned(best)
    changes = _changes(start, best, trials, knobs)
    pairs = _confirmed(trials, changes, budget_s=budget_s, loss_margin=loss_margin) if changes else []
    gain, _, loss = compared([a for a, _ in pairs], [b for _, b in pairs], margin=loss_margin)
    return Tuned(
        start=start,
        best=best,
        changes=changes,
        gain=gain,
        loss_verdict=loss,
        without=without,
        dropped=dropped,
        trials=search.measured,
        left=left,
        unpaid=unpaid,
    )


def _free(job: Job, knobs: Mapping[str, Sequence[Choice]]) -> Choice:
    """The settings with which every trial leaves its decisions to the plan, those that the plan makes here included."""
    names = [name for choices in knobs.values() for name in choices[0]]
    own = own_choices(job)
    here = {name: own[name] for name in ("plan.compile", "plan.threads") if name in names and name in own}
    return dict.fromkeys([*names, *FOLLOW]) | here


class _Search:
    """The trials of a search, from the start to the best plan without the changes that do not help."""

    def __init__(
        self,
        trials: Trials,
        job: Job,
        *,
        knobs: Mapping[str, Sequence[Choice]],
        levels: Levels,
        budget_s: float | None,
    ) -> None:
        self.trials, self.knobs, self.levels, self.budget_s = trials, knobs, levels, budget_s
        self.model, self.own = Model(job, knobs), own_choices(job)
        self.measured: list[Measured] = []
        pinned = {PLAN + name for name, value in asdict(job.pins).items() if value is not None}
        self.pins = [knob for knob, choices in knobs.items() if not pinned.isdisjoint(choices[0])]  # not tried yet

    def run(self, *, most: int) -> str | None:
        """Measures one combination after the other, and returns why it ended before `most` trials."""
        patience = PATIENCE if self.budget_s is None else PATIENCE * BUDGET_PATIENCE
        stale = 0
        while len(self.measured) < most:
            pin = self._pin()
            values = self._next() if pin is None else pin
            if values is None:
                return "every combination that the plan allows was measured or ruled out"
            if not self._affordable(self._trial(values)):
                return "the budget was spent"
            best = _best(self.measured)
            found = self._measure(values, name=_told(values, self.knobs))
            self.measured.append(found)
            if found.out_of_memory or pin is not None:
                continue  # the first rules out all that need as much, and every pin is tried
            quick = found.log_time is not None and (best.log_time is None or found.log_time < best.log_time - BETTER)
            stale = 0 if quick else stale + 1
            if stale >= patience:
                return f"{patience} trials in a row were not faster by {BETTER:.0%}"
        return None

    def pruned(self, best: Measured) -> tuple[Measured, dict[str, float | None], dict[str, float]]:
        """The best plan without the changes whose undo is not slower, and the times of all undos, as ratios.

        The best plan is measured again first: the trial that was the fastest of many had luck, too.
        """
        without, dropped = dict[str, float | None](), dict[str, float]()
        doubtful, plan = self._changed(best), values_of(best, self.knobs)
        base = self._again(plan, name="the best plan again") if doubtful else None
        if base is None or base.problem is not None:
            return best, without, dropped
        while doubtful:
            tried = {name: undo for name in doubtful if (undo := self._undo(plan, [name])) is not None}
            without |= {name: _ratio(undo, base) for name, undo in tried.items()}
            useless = {name: ratio for name in tried if (ratio := without[name]) is not None and ratio < 1 + BETTER}
            if not useless:
                break
            names, found = list(useless), self._undo(plan, list(useless)) if len(useless) > 1 else None
            ratio = None if found is None else _ratio(found, base)
            if found is None or ratio is None or ratio >= 1 + BETTER:
                # They may need each other: only the one that helps least goes, and the rest is tried again.
                names = [min(useless, key=lambda name: useless[name])]
                found = tried[names[0]]
            best, base, doubtful = found, found, [name for name in useless if name not in names]
            plan = self._undone(plan, names)
            dropped |= {name: useless[name] for name in names}
        if dropped:
            self.measured.append(best)
        return best, {name: ratio for name, ratio in without.items() if name not in dropped}, dropped

    def _next(self) -> Choice | None:
        self.model.fit(self.measured)
        return _next(self.model, self.measured, self.knobs)

    def _pin(self) -> Choice | None:
        """The best plan with a pin of the file as the plan would have it, or otherwise; each of them in turn."""
        best, start = values_of(_best(self.measured), self.knobs), values_of(self.measured[0], self.knobs)
        while self.pins:
            choices = self.knobs[self.pins.pop(0)]
            if any(best[name] != start[name] for name in choices[0]):
                continue  # what it brings is measured at the end
            own = {name: self.own.get(name) for name in choices[0]}
            for choice in (own, *reversed(choices)):
                values = best | choice
                if None not in choice.values() and values != best and self.model.predicted(values) is not None:
                    if key(values) not in _tried(self.measured, self.knobs):
                        return values
                    break
        return None

    def _affordable(self, trial: Trial) -> bool:
        """Whether a trial fits beside what confirming takes; before there is something to confirm, alone."""
        if self.trials.known(trial):
            return True
        count, start, best = 1 + self.levels.missing, self.measured[0], _best(self.measured)
        if best is not start and (changed := self._changed(best)):
            count += 2 * CONFIRMED + 1 + len(changed)
        return fits(self.trials, count, budget_s=self.budget_s)

    def _trial(self, values: Choice) -> Trial:
        return Trial(settings=dict.fromkeys(FOLLOW) | values, seed=self.trials.settings.seed)

    def _measure(self, values: Choice, *, name: str) -> Measured:
        return self.levels.of(self.trials.run(self._trial(values), name=name))

    def _changed(self, best: Measured) -> list[str]:
        """The knobs that the best plan has elsewhere than the start."""
        before, after = values_of(self.measured[0], self.knobs), values_of(best, self.knobs)
        return [
            knob
            for knob, choices in self.knobs.items()
            if any(before[name] is not None and before[name] != after[name] for name in choices[0])
        ]

    def _undone(self, plan: Choice, names: Sequence[str]) -> Choice:
        before = values_of(self.measured[0], self.knobs)
        return plan | {inner: before[inner] for name in names for inner in self.knobs[name][0]}

    def _undo(self, plan: Choice, names: Sequence[str]) -> Measured | None:
        return self._again(self._undone(plan, names), name=f"the best plan, {' and '.join(names)} as before")

    def _again(self, values: Choice, *, name: str) -> Measured | None:
        """A plan with another seed than in the search; None if the budget does not last for it and the pairs."""
        trial = replace(self._trial(values), seed=self.trials.settings.seed + 2 * SEEDS)
        count = 1 + self.levels.missing + 2 * CONFIRMED
        if not self.trials.known(trial) and not fits(self.trials, count, budget_s=self.budget_s):
            return None
        return self.levels.of(self.trials.run(trial, name=name))


def _ratio(undo: Measured, best: Measured) -> float | None:
    """The time of a plan as a ratio to the best one's; None if it fails."""
    return None if undo.log_time is None or best.log_time is None else math.exp(undo.log_time - best.log_time)


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
    tried = _tried(measured, knobs)
    failed = [_needed(one) for one in measured if one.out_of_memory]
    possible = {
        key(values): values
        for values in model.candidates(values_of(_best(measured), knobs))
        if key(values) not in tried and not any(_as_heavy(values, settings) for settings in failed)
    }
    return min(possible.values(), key=model.predict, default=None)


def _tried(measured: Sequence[Measured], knobs: Mapping[str, Sequence[Choice]]) -> set[str]:
    return {key(values_of(one, knobs)) for one in measured} | {key(_own(one.settings)) for one in measured}


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
    trials: Trials, changes: Mapping[str, tuple[Any, Any]], *, budget_s: float | None, loss_margin: float
) -> list[tuple[Measured, Measured]]:
    """The start and the best plan in turn, with other seeds: what was best by chance is not best again.

    Pairs up to the next look are added while it can decide: as far as a budget goes, or without one if the spread so
    far says that the last look will do.
    """
    values = {name: after for name, (_, after) in changes.items()}
    both = {"as it is": dict[str, Any](), "the best plan": values}
    pairs, goal = list[tuple[Measured, Measured]](), CONFIRMED
    for block in itertools.count():
        seed = trials.settings.seed + 1 + block
        made = {name: Trial(settings=settings, seed=seed) for name, settings in both.items()}
        known = {trials.run(trial, name="").call for trial in made.values() if trials.known(trial)}
        new = sum(not trials.known(trial) for trial in made.values())
        if len(known) > 1 or (known and new and known != {trials.call}):
            continue  # another call measured one of them
        if len(pairs) >= goal and new:
            more = _worthwhile(pairs, budget_s=budget_s, loss_margin=loss_margin)
            if not more or not fits(trials, 2 * more, budget_s=budget_s):
                break
            goal += more
        if new and not fits(trials, new, budget_s=budget_s):
            break
        found = {
            name: trials.run(made[name], name=f"confirming, {name}")
            for name in (list(both) if len(pairs) % 2 == 0 else reversed(both))
        }
        pairs.append((found["as it is"], found["the best plan"]))
        if len(pairs) == parity.LOOKS[-1]:
            break
    return [(a, b) for a, b in pairs if a.problem is None and b.problem is None]


def _worthwhile(pairs: Sequence[tuple[Measured, Measured]], *, budget_s: float | None, loss_margin: float) -> int:
    """How many pairs more may decide; 0 if they are not worth it."""
    good = [(a, b) for a, b in pairs if a.problem is None and b.problem is None]
    gain, _, _ = compared([a for a, _ in good], [b for _, b in good], margin=loss_margin)
    if gain is None or len(good) < len(pairs):
        return 0
    total = parity.enough(gain) if budget_s is None else None
    return 0 if total is not None and total > parity.LOOKS[-1] else gain.needed_more
