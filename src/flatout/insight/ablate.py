"""Measures optimizations one at a time: `flatout ablate CONFIG`.

Four questions, each with its own rows: what does a switch bring alone, on the guides' starting point; what is lost
without it, from the full plan; what do the switches bring one after the other, the largest gain first; and, on request,
how fast is the recipe without what the guides changed in it.

A block measures every variant once, in a random order; the next block measures them in the reverse order, so drift
affects all alike. Within a block, all variants have the same seed and the same data. The unit of evidence is a block's
pair of a variant and its reference (`parity`), both measured in the same call.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median
from typing import Any

from flatout import parity
from flatout.errors import RunFailed, UsageError
from flatout.insight.rows import QUESTIONS, USUAL, Ablation, LossVerdict, Question, Row
from flatout.insight.switches import (
    FOLLOW,
    FOLLOW_SIZES,
    SWITCHES,
    Kind,
    Switch,
    after_of,
    applies,
    before_of,
    changes,
    planned_of,
    recipe_changes,
)
from flatout.insight.switches import PLAN as PLAN_KEY
from flatout.insight.trials import Measured, Trial, Trials
from flatout.parity import Difference

BEFORE, PLAN = "before", "full plan"
# Losses of changed numerics that differ by less are called equal.
LOSS_MARGIN = 0.005
BLOCKS, MOST_BLOCKS = parity.LOOKS[0], parity.LOOKS[-1]
TOO_SHORT = "the budget was too short"
# From the first seed of one session to that of the next.
SEEDS = 1000


@dataclass(frozen=True, kw_only=True)
class Variant:
    """Settings to measure, and the variant they are compared with."""

    name: str
    settings: Mapping[str, Any]
    reference: str | None
    code: str = ""
    switch: Switch | None = None
    kind: Kind | None = None
    question: Question = "alone"


def ablate(
    trials: Trials,
    *,
    blocks: int | None = None,
    budget_s: float | None = None,
    switches: Sequence[Switch] = SWITCHES,
    only: Sequence[str] = (),
    tables: Collection[Question] = USUAL,
    loss_margin: float = LOSS_MARGIN,
) -> Ablation:
    """Measures every switch; those of the guides, or those that lead from a baseline to the configuration.

    `blocks` is exactly how many; without it there are four, and more where a budget lasts for the next look.
    """
    seed = trials.settings.seed
    known = [switch for switch in switches if applies(switch, trials.settings)]
    if "recipe" in tables and trials.samples:
        raise UsageError(
            f"--table recipe is about training, and trials of recipe {trials.settings.recipe} only sample: use recipe "
            "sft on its rows"
        )
    recipe = recipe_changes(trials.settings) if "recipe" in tables else []
    offered = [switch.name for switch in (*known, *recipe)]
    if only and not any(name in offered for name in only):
        raise UsageError(
            f"trials of recipe {trials.settings.recipe} cannot show {', '.join(only)}; choose from: "
            f"{', '.join(offered)}"
        )
    first = trials.run(Trial(settings={}, seed=seed), name=PLAN, again=True)
    if first.problem is not None:
        raise RunFailed(f"the configuration itself cannot be measured: {first.problem}")
    session = _Session(trials, blocks=blocks, budget_s=budget_s, loss_margin=loss_margin)
    every, left_out = _variants(known, first.decisions, only=only, on_gpu=trials.on_gpu)
    variants = _in_tables(every, tables)
    asked = {variant.switch.name for variant in variants if variant.switch is not None}
    unasked = {variant.switch.name for variant in every if variant.switch is not None} - asked
    left_out |= dict.fromkeys(sorted(unasked), "not part of the plan, so only the table alone measures it")
    if "recipe" in tables:
        earlier, unchanged = _earlier(recipe, first.decisions, only=only, planned=every[1].settings)
        variants, left_out = [*variants, *earlier], unchanged if set(tables) == {"recipe"} else left_out | unchanged
    if all(variant.switch is None for variant in variants):
        told = ", ".join(f"{name} ({why})" for name, why in left_out.items())
        raise UsageError(f"there is no switch to measure: {told}")
    alone = [variant for variant in variants if variant.question == "alone"]
    session.measure(variants, ahead=len(alone) if "cumulative" in tables else 0)
    if "cumulative" in tables:
        planned = {variant.switch.name for variant in every if variant.switch and variant.question == "without"}
        steps = _cumulative(variants, session, known=known, planned=planned)
        if len(steps) > 1:
            session.measure(steps, references=[BEFORE], first_seed=seed + SEEDS)
        else:
            missed = any(variant.name in session.left_out for variant in alone)
            why = TOO_SHORT if missed else "it takes two switches that may be faster"
            left_out['the table "one after the other"'] = why
    return Ablation(
        rows=session.rows(),
        left_out=left_out | session.left_out,
        decisions=first.decisions,
        seconds=trials.spent_s,
        about=trials.about,
    )


def _variants(
    known: Sequence[Switch], full: Mapping[str, Any], *, only: Sequence[str], on_gpu: bool
) -> tuple[list[Variant], dict[str, str]]:
    """The references and what is compared with them, the most important first."""
    free = dict.fromkeys(FOLLOW)
    before = free | {key: value for switch in known for key, value in before_of(switch, full).items()}
    planned = free | {key: value for switch in known for key, value in planned_of(switch, full).items()}
    found = [
        Variant(name=BEFORE, settings=before, reference=None, code=_code(known)),
        Variant(name=PLAN, settings=planned, reference=BEFORE, kind=_kind(known)),
    ]
    chosen, left_out = [], {}
    for switch in known:
        if only and switch.name not in only:
            continue
        if switch.needs_gpu and not on_gpu:
            left_out[switch.name] = "needs a GPU"
        elif switch.on_request and not only:
            left_out[switch.name] = "takes minutes; measured if --only names it"
        elif changes(switch, full):
            chosen.append(switch)
        else:
            left_out[switch.name] = "not part of the plan here"
    for switch in chosen:
        on = before | after_of(switch, full)
        code = _code(known, on=[switch])
        found.append(Variant(name=f"+ {switch.name}", settings=on, reference=BEFORE, code=code, switch=switch))
    for switch in chosen:
        off, code = planned | before_of(switch, full), switch.code_before
        if off != planned or code:
            found.append(
                Variant(
                    name=f"- {switch.name}", settings=off, reference=PLAN, code=code, switch=switch, question="without"
                )
            )
    return found, left_out


def _earlier(
    recipe: Sequence[Switch], full: Mapping[str, Any], *, only: Sequence[str], planned: Mapping[str, Any]
) -> tuple[list[Variant], dict[str, str]]:
    """The full plan without each change of the recipe; what depends on its sizes is planned again."""
    chosen = [switch for switch in recipe if not only or switch.name in only]
    made = [
        Variant(
            name=f"- {switch.name}",
            settings={**planned, **dict.fromkeys(FOLLOW_SIZES), **switch.before},
            reference=PLAN,
            switch=switch,
            question="recipe",
        )
        for switch in chosen
        if changes(switch, full)
    ]
    return made, {switch.name: "not part of this recipe" for switch in chosen if not changes(switch, full)}


def _in_tables(variants: Sequence[Variant], tables: Collection[Question]) -> list[Variant]:
    """Those of some tables. The starting point is measured where something is compared with it."""
    if "alone" in tables or "cumulative" in tables:
        return [one for one in variants if one.switch is None or one.question in tables or one.question == "alone"]
    return [
        replace(one, reference=None) if one.name == PLAN else one
        for one in variants
        if one.name == PLAN or one.question in tables
    ]


def _kind(switches: Sequence[Switch]) -> Kind:
    """What several switches change together."""
    return "recipe" if any(switch.kind == "recipe" for switch in switches) else "numerics"


def _code(known: Sequence[Switch], on: Sequence[Switch] = ()) -> str:
    """The code of a variant in which only some switches are on."""
    return "".join(switch.code if switch in on else switch.code_before for switch in known)


def _cumulative(
    variants: Sequence[Variant], session: _Session, *, known: Sequence[Switch], planned: Collection[str]
) -> list[Variant]:
    """The switches added one after the other, the largest gain alone first.

    One that is not part of the plan must have been shown to be faster alone. One of the plan is only left out if it was
    shown not to be: it may take effect after another, as FP8 does after bf16.
    """
    rows = {row.name: row for row in session.rows()}
    ratios = dict[str, float]()
    for variant in variants:
        row = rows[variant.name]
        if variant.question != "alone" or variant.switch is None or row.time is None or row.problem is not None:
            continue
        no_effect = row.time.verdict == "no effect shown" and row.not_in_effect is None
        may_help = variant.switch.name in planned and row.verdict != "slower" and not no_effect
        if row.verdict == "faster" or may_help:
            ratios[variant.name] = row.time.ratio
    helped = sorted((variant for variant in variants if variant.name in ratios), key=lambda one: ratios[one.name])
    settings, found = dict(variants[0].settings), list[Variant]()
    on, reference = list[Switch](), BEFORE
    for variant in helped:
        assert variant.switch is not None
        settings = settings | {key: variant.settings[key] for key in variant.switch.before}
        on.append(variant.switch)
        name = f"then {variant.switch.name}" if found else f"first {variant.switch.name}"
        found.append(
            Variant(
                name=name,
                settings=settings,
                reference=reference,
                code=_code(known, on),
                switch=variant.switch,
                question="cumulative",
            )
        )
        reference = name
    return found


class _Session:
    """Measures variants block by block, and remembers everything."""

    def __init__(self, trials: Trials, *, blocks: int | None, budget_s: float | None, loss_margin: float) -> None:
        self.trials, self.budget_s, self.loss_margin = trials, budget_s, loss_margin
        self.blocks, self.fixed = blocks or BLOCKS, blocks is not None
        self.variants: dict[str, Variant] = {}
        self.measured: dict[str, dict[int, Measured]] = {}  # by name, then by seed
        self.left_out: dict[str, str] = {}

    def _trial(self, name: str, seed: int) -> Trial:
        variant = self.variants[name]
        return Trial(settings=variant.settings, seed=seed, code=variant.code)

    def measure(
        self,
        variants: Sequence[Variant],
        *,
        references: Sequence[str] = (),
        first_seed: int | None = None,
        ahead: int = 0,
    ) -> None:
        """Measures variants in blocks, and then more blocks of those whose evidence is short, if there is a budget.

        Every session has its own seeds, so that all its pairs are measured next to each other. `ahead` is how many
        variants the next one has: the budget for their first blocks is kept.
        """
        self.variants |= {variant.name: variant for variant in variants}
        start = self.trials.settings.seed if first_seed is None else first_seed
        every = [*references, *(variant.name for variant in variants)]
        first = self._recall(every, start)
        if references and not self._fits(self._due(every[:2])):
            self.left_out |= dict.fromkeys((variant.name for variant in variants), "the budget was spent")
            return
        names, complete = self._affordable(every), False
        for block in range(first, first + 2 * MOST_BLOCKS):  # rows that come back begin later
            due = self._due(names)
            if block == first + 1 or not (due or complete):  # now it is known better what the trials take
                names = self._affordable(every)
                due = self._due(names)
            if not due:
                due, complete = self._undecided(names, ahead=ahead), True
            if not due or (block and not self._fits(due, most=1)):
                return
            self._block(due, start, block, every=every)

    def _affordable(self, names: Sequence[str]) -> list[str]:
        """Leaves out the last unfinished rows until the rest fits the budget; the first two are always kept."""
        kept = list(names)
        while not self._fits(due := self._due(kept)):
            last = next((name for name in reversed(kept[2:]) if name in due), None)
            if last is None:
                break
            kept.remove(last)
        for name in names:
            self.left_out.pop(name, None)
            if name not in kept:
                self.left_out[name] = f"{TOO_SHORT} for all blocks" if name in self.measured else TOO_SHORT
        return kept

    def _recall(self, names: Sequence[str], start: int) -> int:
        """Takes over the blocks of earlier calls, and returns their number."""
        blocks = 0
        for seed in sorted({one.seed for one in self.trials.found.values() if start <= one.seed < start + SEEDS}):
            for name in names:
                if self.trials.known(trial := self._trial(name, seed)):
                    self.measured.setdefault(name, {})[seed] = self.trials.run(trial, name=name)
                    blocks = seed - start + 1
        return blocks

    def _due(self, names: Sequence[str]) -> dict[str, int]:
        """The trials that each variant lacks. A reference is measured again with what is compared with it."""
        lack = {name: 0 if self._failed(name) else max(0, self.blocks - self._evidence(name)) for name in names}
        due = dict(lack)
        for name, count in lack.items():
            reference = self.variants[name].reference
            if reference in due and not self._failed(reference):
                due[reference] = max(due[reference], count)
        return {name: count for name, count in due.items() if count}

    def _evidence(self, name: str) -> int:
        """A variant's blocks: pairs with its reference, or trials where nothing can be compared."""
        reference, own = self.variants[name].reference, self.measured.get(name, {})
        if reference is None or self._failed(reference):
            return len(own)
        return len(_pairs(own, self.measured.get(reference, {})))

    def _failed(self, name: str) -> bool:
        return _problem(self.measured.get(name, {})) is not None

    def _fits(self, due: Mapping[str, int], *, most: int = MOST_BLOCKS, kept_s: float = 0.0) -> bool:
        """Whether these trials, at most so many of each variant, fit the budget, without what is kept of it."""
        needed_s = sum(min(count, most) * self._seconds(name) for name, count in due.items())
        return self.budget_s is None or self.trials.spent_s + needed_s + kept_s <= self.budget_s

    def _seconds(self, name: str) -> float:
        """What a variant's next trial probably takes: the mean of its own, or before its first the median of all."""
        if own := self.measured.get(name):
            return fmean(one.seconds for one in own.values())
        return median(one.seconds for one in self.trials.found.values()) if self.trials.found else 0.0

    def _undecided(self, names: Sequence[str], *, ahead: int) -> dict[str, int]:
        """The blocks until the next look for those that a later look is likely to decide, as far as the budget goes."""
        if self.budget_s is None or self.fixed:
            return {}
        kept_s = ahead * self.blocks * fmean(one.seconds for one in self.trials.found.values())
        usable = {name for name in names if not self._failed(name)}
        short = [row for row in self.rows() if row.name in usable and row.reference in usable and row.blocks_needed]
        wanted: dict[str, int] = {}
        for count, row in sorted(((row.enough or MOST_BLOCKS, row) for row in short), key=lambda one: one[0]):
            assert row.reference is not None
            more = wanted | {name: max(wanted.get(name, 0), row.blocks_needed) for name in (row.name, row.reference)}
            if count <= MOST_BLOCKS and self._fits(more, kept_s=kept_s):
                wanted = more
        return wanted

    def _block(self, names: Collection[str], start: int, block: int, *, every: Sequence[str]) -> None:
        order = list(every)
        random.Random(f"{start} {block // 2}").shuffle(order)
        for name in order if block % 2 == 0 else reversed(order):
            if name not in names or self._failed(name):
                continue  # it was left out, or would fail again
            seed = start + block
            found = self.trials.run(self._trial(name, seed), name=f"block {block + 1}, {name}")
            self.measured.setdefault(name, {})[seed] = found

    def _log_time(self, name: str) -> float | None:
        """The logarithm of the time per token, scaled to the newest call of the reference."""
        variant, own = self.variants[name], self.measured.get(name, {})
        against = self.measured.get(variant.reference, {}) if variant.reference is not None else {}
        pairs = [(own[seed].log_time, against[seed].log_time) for seed in _pairs(own, against)]
        if variant.reference is not None and pairs and (level := self._log_time(variant.reference)) is not None:
            return level + fmean(mine - theirs for mine, theirs in pairs if mine is not None and theirs is not None)
        good = [one for one in own.values() if one.problem is None]
        newest = max((one.call for one in good), default=0.0)
        return mean_of([one for one in good if one.call == newest], lambda one: one.log_time)

    def rows(self) -> list[Row]:
        """All rows; differences that do not remain when all of a table are judged together are not called decided."""
        rows = [self.row(variant) for variant in self.variants.values()]
        times, losses = set[str](), set[str]()
        for question in QUESTIONS:
            asked = [row for row in rows if row.question == question]
            times |= parity.holm({row.name: row.time for row in asked if row.time is not None})
            losses |= parity.holm({row.name: row.loss_difference for row in asked if row.loss_difference is not None})
        return [_judged(row, time_remains=row.name in times, loss_remains=row.name in losses) for row in rows]

    def row(self, variant: Variant) -> Row:
        own = self.measured.get(variant.name, {})
        problem = _problem(own)
        good = [one for one in own.values() if one.problem is None]
        time = loss = unused = None
        verdict: LossVerdict | None = None
        if variant.reference is not None and problem is None:
            against = self.measured.get(variant.reference, {})
            shared = _pairs(own, against)
            pairs = [against[seed] for seed in shared], [own[seed] for seed in shared]
            whole = variant.switch is not None and variant.switch.some_steps
            time, loss, verdict = compared(*pairs, margin=self.loss_margin, whole=whole)
            if own and not shared and self._failed(variant.reference):
                problem = f"{variant.reference} could not be measured"
            elif shared and variant.switch is not None:
                unused = not_in_effect(variant.switch, pairs[0][0], pairs[1][0])
        switch, log_time = variant.switch, self._log_time(variant.name)
        return Row(
            name=variant.name,
            question=variant.question if variant.reference is not None else None,
            kind=variant.kind if switch is None else switch.kind,
            reference=variant.reference,
            task=None if switch is None else switch.task,
            claim=None if switch is None else switch.claim,
            blocks=len(good),
            tokens_per_s=None if log_time is None else math.exp(-log_time),
            mfu=None if log_time is None else _mfu(good, log_time),
            peak_gib=mean_of(good, lambda one: one.peak_gib),
            start_s=mean_of(good, lambda one: one.start_s),
            longest_start_s=max((one.start_s for one in good if one.start_s is not None), default=None),
            loss=mean_of(good, lambda one: one.loss),
            time=time,
            loss_difference=loss,
            loss_verdict=verdict,
            problem=problem,
            not_in_effect=unused,
            compiles=switch is not None and switch.compiles,
            whole=switch is not None and switch.some_steps,
        )


def _pairs(own: Mapping[int, Measured], reference: Mapping[int, Measured]) -> list[int]:
    """The seeds that both were measured with in the same call: the machine may be another one in the next."""
    both = [seed for seed in sorted(own) if seed in reference and own[seed].call == reference[seed].call]
    return [seed for seed in both if own[seed].problem is None and reference[seed].problem is None]


def _problem(own: Mapping[int, Measured]) -> str | None:
    """Why a variant could not be measured; a trial that was stopped does not count if a later call had more time."""
    good = max((one.call for one in own.values() if one.problem is None), default=-math.inf)
    failed = [one for one in own.values() if one.problem is not None]
    return next((one.problem for one in failed if one.stopped_s is None or one.call >= good), None)


def _mfu(good: Sequence[Measured], log_time: float) -> float | None:
    """The MFU of a variant at this time per token."""
    known = [one.mfu * math.exp(one.log_time) for one in good if one.mfu is not None and one.log_time is not None]
    return fmean(known) * math.exp(-log_time) if known else None


def not_in_effect(switch: Switch, reference: Measured, own: Measured) -> str | None:
    """Why a switch of the plan changes nothing here: its paths are off, or the same as those of the reference."""
    reasons = []
    for name in (key.removeprefix(PLAN_KEY) for key in switch.before if key.startswith(PLAN_KEY)):
        mine, theirs = own.active.get(name), reference.active.get(name)
        off = next((words for words in (mine, theirs) if words is not None and words.startswith("off")), None)
        if mine is None and theirs is None:
            return None  # not every decision reports what is active
        if mine != theirs and (off is None or None not in (mine, theirs)):
            return None
        reasons.append(off or mine)
    return reasons[0] if reasons else None


def _judged(row: Row, *, time_remains: bool, loss_remains: bool) -> Row:
    """The row without the differences that do not remain when all of its table are judged together."""
    if row.time is not None and row.time.decided and not time_remains:
        row = replace(row, time=_undone(row.time))
    if row.loss_verdict == "different" and not loss_remains:
        row = replace(row, loss_verdict="not enough evidence")
    return row


def _undone(time: Difference) -> Difference:
    """A difference that does not remain: it is small, or the next look may decide."""
    if max(1 / time.low, time.high) <= 1 + parity.MARGIN:
        return replace(time, verdict="no effect shown")
    ahead = next((look - time.pairs for look in parity.LOOKS if look > time.pairs), 0)
    return replace(time, verdict="too noisy to tell", needed_more=ahead)


def compared(
    a: Sequence[Measured], b: Sequence[Measured], *, margin: float = LOSS_MARGIN, whole: bool = False
) -> tuple[Difference | None, Difference | None, LossVerdict | None]:
    """Time and loss of pairs of measurements with the same seeds; `whole` compares all steps instead of the median."""
    pairs = [(x, y) for x, y in zip(a, b, strict=True) if x.log_time is not None and y.log_time is not None]
    if not pairs:
        return None, None, None
    times = [[(one.log_total if whole else one.log_time) or 0.0 for one in side] for side in zip(*pairs, strict=True)]
    time = parity.paired(times[0], times[1])
    known = [(x.loss, y.loss) for x, y in pairs if x.loss is not None and y.loss is not None]
    if len(known) < len(pairs) or any(min(pair) <= 0 for pair in known):
        return time, None, None  # a policy's loss has no logarithm
    logs = [math.log(x) for x, _ in known], [math.log(y) for _, y in known]
    loss = parity.paired(*logs, looks=(len(known),), margin=margin)
    if loss.verdict == "too few pairs":
        return time, loss, "not enough evidence"
    if parity.equivalent(*logs, margin=margin):
        return time, loss, "equal"
    return time, loss, "different" if loss.decided else "not enough evidence"


def mean_of(many: Sequence[Measured], of: Callable[[Measured], float | None]) -> float | None:
    values = [value for one in many if (value := of(one)) is not None]
    return sum(values) / len(values) if values else None
