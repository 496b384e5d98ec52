"""The contents of a run folder as `report` and `watch` show them: speed, phases, memory, verdict.

Everything is derived from the folder alone, and from roll-ups if the run is long. Unknown is None. The folder of
a watched script has no plan and no criteria: missing values are left out, never guessed.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Literal, TypeVar

from flatout.config.settings import CriteriaSettings
from flatout.cost import Rates
from flatout.files import typed
from flatout.insight.diagnose import FAILURES
from flatout.insight.state import State, state_of, watched
from flatout.record import (
    GPU_NUMBERS,
    Event,
    Finding,
    Outcome,
    Rollup,
    Run,
    Speed,
    StepRecord,
    Verdict,
    redact,
    redacted,
)
from flatout.record.events import (
    AttemptBegan,
    Ended,
    Evaluated,
    PathsActive,
    PathsRan,
    Planned,
    Resumed,
    Saved,
    Started,
    TaskResult,
    TasksScored,
)
from flatout.record.records import PEAK
from flatout.record.rollouts import RolloutsGraded
from flatout.record.routed import PhaseScored
from flatout.verdict import judge, loss_ends, peak_words, rl_parts, speed_of, speed_of_steps, warm_up
from flatout.words import percent

# Parts a history is drawn from, steps the current speed is averaged over, samples that are read of a long run.
# Names of the metrics that combined gradients have, see `engine.conflicts`.
COSINE = "cosine/"
NUM_PARTS, RECENT_STEPS, NUM_SAMPLES = 240, 20, 400
# A run with a possible gain above this share of step time is graded not good.
MUCH_GAIN = 0.05

# Of the speed that the plan predicted: a run below this share has lost time to something.
LEAST_OF_PREDICTED = 0.7

T = TypeVar("T", bound=Event)
Grade = Literal["good", "bad", "open"]
Word = Literal["Good", "Slow", "Failed", "Unfinished", "Unjudged"]
GRADES: Mapping[Word, Grade] = {
    "Good": "good",
    "Slow": "bad",
    "Failed": "bad",
    "Unfinished": "open",
    "Unjudged": "open",
}


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    step: int
    val_loss: float


@dataclass(frozen=True, kw_only=True)
class TaskScore(TaskResult):
    """The score of one step's model on a task, measured during the run or later by `flatout eval`."""

    step: int


@dataclass(frozen=True, kw_only=True)
class Phase:
    name: str
    seconds: float
    share: float  # of all recorded time
    peak_gib: float | None = None  # allocated on a GPU; None: it was not recorded


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One decision of the plan, its reason, what is active on the device, and what a step then ran."""

    name: str
    value: Any
    reason: str
    active: str | None
    ran: str | None = None


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A prediction and its measurement."""

    name: str
    unit: str
    predicted: float | None
    measured: float | None

    @property
    def ratio(self) -> float | None:
        if self.measured is None or not self.predicted:
            return None
        return self.measured / self.predicted


@dataclass(frozen=True, kw_only=True)
class Gauge:
    """One number of a GPU over the samples that were read."""

    mean: float
    high: float


@dataclass(frozen=True, kw_only=True)
class Gpu:
    index: int
    gauges: Mapping[str, Gauge]
    throttle: Mapping[str, float]  # reason to share of the samples in which it held


@dataclass(frozen=True, kw_only=True)
class Rank:
    rank: int
    steps: int
    step_s: float | None
    data_share: float | None
    peak_gib: float | None


@dataclass(frozen=True, kw_only=True)
class Story:
    name: str
    path: str
    recipe: str | None
    state: State
    num_attempts: int
    num_steps: int
    total_steps: int | None
    tokens: int
    padded_tokens: int
    seconds: float
    speed: Speed
    recent: Speed
    left_s: float | None
    last: StepRecord | None
    parts: Sequence[Rollup]
    losses: Sequence[float]  # for the rules: means of parts whose number does not depend on who asks
    evaluations: Sequence[Evaluation]
    tasks: Sequence[TaskScore]  # by task, then by step
    phases: Sequence[Phase]
    peak_gib: float | None
    total_gib: float | None
    num_non_finite: int
    recompiled: int  # graphs compiled after the warm-up of the last attempt
    loss_ends: tuple[float | None, float | None]  # means of the first and the last tenth
    rates: Rates | None
    peak: str | None  # what MFU is a share of
    criteria: Sequence[Verdict]
    choices: Sequence[Choice]
    active: Mapping[str, str]
    forecasts: Sequence[Forecast]
    memory_parts: Mapping[str, float]
    gpus: Sequence[Gpu]
    samples: Sequence[Mapping[str, Any]]
    last_sample: Mapping[str, Any] | None
    ranks: Sequence[Rank]
    events: Sequence[Event]
    host: str | None  # where the last attempt ran
    verdict: str | None  # the doctor's sentence
    limit: Mapping[str, Any]
    findings: Sequence[Finding]  # the doctor's
    config_text: str
    config: Mapping[str, Any]
    plan: Mapping[str, Any]
    hardware: Mapping[str, Any]
    environment: Mapping[str, Any]
    told_at: float

    @property
    def rollouts(self) -> list[RolloutsGraded]:
        """The phases of rollouts by step; of one that was repeated, the last."""
        phases = {event.step or 0: event for event in self.events if isinstance(event, RolloutsGraded)}
        return [phases[step] for step in sorted(phases)]

    @property
    def routed(self) -> list[PhaseScored]:
        """The scores after each phase of recipe router; of a phase that was scored again, the last."""
        phases = {event.phase: event for event in self.events if isinstance(event, PhaseScored)}
        return [phases[phase] for phase in sorted(phases)]

    @property
    def cosines(self) -> Mapping[str, float]:
        """The mean cosine of every two tasks' gradients, if they were measured."""
        names = dict.fromkeys(name for part in self.parts for name in part.extra if name.startswith(COSINE))
        found = {}
        for name in names:
            with_it = [part for part in self.parts if name in part.extra]
            total = sum(part.extra[name] * part.num_steps for part in with_it)
            found[name.removeprefix(COSINE)] = total / sum(part.num_steps for part in with_it)
        return found

    @property
    def memory_share(self) -> float | None:
        return self.peak_gib / self.total_gib if self.peak_gib is not None and self.total_gib else None

    @property
    def word(self) -> Word:
        """The verdict. Failed: the run broke or missed a criterion. Slow: the doctor found much to gain, or the plan
        predicted more. Good: it finished, and criteria or the doctor had nothing against it."""
        met = [verdict.met for verdict in self.criteria]
        broken = any(finding.cause in FAILURES for finding in self.findings) or (self.last and _broken(self.last.loss))
        if False in met or broken or self.state.kind == "lost":
            return "Failed"
        if any((finding.gain or 0.0) > MUCH_GAIN or finding.cause == "low-mfu" for finding in self.findings):
            return "Slow"
        if self.of_predicted is not None:
            return "Slow"
        if self.state.kind != "finished":
            return "Unfinished"
        return "Good" if True in met or self.verdict is not None else "Unjudged"

    @property
    def grade(self) -> Grade:
        return GRADES[self.word]

    @property
    def of_predicted(self) -> float | None:
        """The share of the predicted speed that was reached, where it is far below."""
        ratio = next((row.ratio for row in self.forecasts if row.name == "tokens_per_s"), None)
        return ratio if ratio is not None and ratio < LEAST_OF_PREDICTED else None

    @property
    def judged(self) -> str:
        """The state of the criteria, and a speed far below the prediction, in sentences."""
        slow = "" if self.of_predicted is None else f" It reached {percent(self.of_predicted)} of the predicted speed."
        return self._met + slow

    @property
    def _met(self) -> str:
        if not self.criteria:
            wanted = sum(value is not None for value in self.config.get("criteria", {}).values())
            return f"{wanted} criteria set, none measured yet." if wanted else "No criteria were set."
        met = [verdict.met for verdict in self.criteria]
        so_far = "" if self.state.over else " so far"
        words = [f"{met.count(True)} of {len(met)} criteria met{so_far}"]
        words += [f"{met.count(False)} not met"] if False in met else []
        words += [f"{met.count(None)} not measured"] if None in met else []
        return f"{', '.join(words)}."


def names_of(stories: Sequence[Story]) -> list[str]:
    """The names of several runs; those of the same name are numbered."""
    names = [story.name for story in stories]
    return [f"{name} ({at})" if names.count(name) > 1 else name for at, name in enumerate(names, 1)]


def tell(run: Run, *, num_parts: int = NUM_PARTS, now: float | None = None, doctor: bool = True) -> Story:
    """Reads a run folder; `now` is the time to judge signs of life by, `doctor` whether its findings are read."""
    now = time.time() if now is None else now
    events: list[Event] = redacted(list(run.events()))
    attempts = [event for event in events if isinstance(event, AttemptBegan)]
    current = [event for event in events if not attempts or event.time >= attempts[-1].time]
    planned, active, ran = _last(current, Planned), _last(current, PathsActive), _last(current, PathsRan)
    plan = planned.facts if planned else redacted(run.plan)
    rates = Rates.from_json(plan["rates"]) if "rates" in plan else None
    latest = run.latest_rollups()
    recent = run.recent_steps(RECENT_STEPS, latest=latest)
    config, hardware, diagnosis = redacted(run.config), redacted(run.hardware), run.diagnosis if doctor else None
    memory = [part.memory for part in latest]
    samples = list(run.samples(at_most=NUM_SAMPLES))
    start, ended = _last(events, Started), _last(current, Ended)
    total_steps = start.total_steps if start else plan.get("job", {}).get("steps")
    num_steps = latest[-1].last_step + 1 if latest else 0
    warm = warm_up(run, latest)
    known = {(step.attempt, step.step) for step in warm}
    # Right after a start there is only warm-up.
    steady = [step for step in recent if (step.attempt, step.step) not in known] or recent
    now_speed = speed_of_steps(steady, rates=rates)
    parts = run.history(at_most=NUM_PARTS, latest=latest)
    story = Story(
        name=redact(run.path.resolve().name),
        path=redact(str(run.path)),
        recipe=config.get("recipe"),
        state=watched(current)
        or state_of(attempts, ended.outcome if ended else None, recent[-1] if recent else None, now=now),
        num_attempts=len(attempts),
        num_steps=num_steps,
        total_steps=total_steps,
        tokens=sum(part.tokens for part in latest),
        padded_tokens=sum(part.padded_tokens for part in latest),
        seconds=sum(part.seconds for part in latest),
        speed=speed_of(run, latest, rates=rates),
        recent=now_speed,
        left_s=_left(num_steps, total_steps, now_speed, over=ended is not None),
        last=recent[-1] if recent else None,
        parts=parts if num_parts == NUM_PARTS else run.history(at_most=num_parts, latest=latest),
        losses=[part.loss for part in parts if part.loss is not None],
        evaluations=_evaluations(events),
        tasks=_tasks(events),
        phases=_phases(latest),
        peak_gib=max((row["peak_gib"] for row in memory if "peak_gib" in row), default=None),
        total_gib=_total_gib(memory, hardware),
        num_non_finite=sum(part.num_non_finite for part in latest),
        recompiled=_recompiled(warm, recent),
        loss_ends=loss_ends(run, latest),
        rates=rates,
        peak=peak_words(rates, hardware),
        criteria=(),
        choices=_choices(plan, active.facts if active else {}, ran=ran.facts if ran else {}),
        active=active.facts if active else {},
        forecasts=(),
        memory_parts=plan.get("predicted", {}).get("memory_gib", {}),
        gpus=_gpus(samples),
        samples=samples,
        last_sample=run.last_sample(),
        ranks=[_rank(run, rank) for rank in run.ranks()] if len(run.ranks()) > 1 else (),
        events=events,
        host=attempts[-1].host if attempts else None,
        verdict=redact(diagnosis.verdict) if diagnosis else None,
        limit=redacted(diagnosis.limit) if diagnosis else {},
        findings=[_redacted_finding(finding) for finding in diagnosis.findings] if diagnosis else (),
        config_text=redact(run.config_text),
        config=config,
        plan=plan,
        hardware=hardware,
        environment=redacted(run.environment),
        told_at=now,
    )
    return replace(story, criteria=_criteria(story, ended), forecasts=_forecasts(story))


def _total_gib(memory: Iterable[Mapping[str, float]], hardware: Mapping[str, Any]) -> float | None:
    """The device's memory; on a CPU no more than a container allows, which the record of the hardware knows."""
    total = max((row["total_gib"] for row in memory if "total_gib" in row), default=None)
    allowed = None if hardware.get("gpu") else hardware.get("ram_gib")
    return min(total, allowed) if total is not None and isinstance(allowed, int | float) and allowed else total


def _phases(parts: Iterable[Rollup]) -> list[Phase]:
    spans: dict[str, float] = defaultdict(float)
    peaks: dict[str, float] = {}
    total = 0.0
    for part in parts:
        total += part.seconds
        peaks |= {key: max(gib, peaks.get(key, 0.0)) for key, gib in part.memory.items() if key.startswith(PEAK)}
        for phase, seconds in part.spans.items():
            spans[phase] += seconds
    if spans and total > sum(spans.values()) * 1.001:
        spans["unattributed"] = total - sum(spans.values())
    return [
        Phase(name=name, seconds=seconds, share=seconds / total, peak_gib=peaks.get(f"{PEAK}/{name}"))
        for name, seconds in spans.items()
        if total
    ]


def _recompiled(warm: Iterable[StepRecord], recent: Sequence[StepRecord]) -> int:
    then = [step.extra.graphs for step in warm if recent and step.attempt == recent[-1].attempt]
    now = recent[-1].extra.graphs if recent else None
    return 0 if now is None or not then or then[-1] is None else max(0, now - then[-1])


def _evaluations(events: Iterable[Event]) -> list[Evaluation]:
    """The evaluations that led to the current weights; those after a step that a resume went back to are dropped."""
    found: dict[int, Evaluation] = {}
    for event in events:
        if isinstance(event, Resumed) and event.step is not None:
            found = {step: evaluation for step, evaluation in found.items() if step <= event.step}
        if isinstance(event, Evaluated) and event.step is not None:
            found[event.step] = Evaluation(step=event.step, val_loss=event.val_loss)
    return [found[step] for step in sorted(found)]


def _tasks(events: Iterable[Event]) -> list[TaskScore]:
    """As with evaluations; of the same task, step, number of questions and of samples, the newest."""
    found: dict[tuple[str, int, int, int], TaskScore] = {}
    specs: dict[str, set[str]] = defaultdict(set)
    for event in events:
        if isinstance(event, Resumed) and event.step is not None:
            found = {key: score for key, score in found.items() if score.step <= event.step}
        if isinstance(event, TasksScored) and event.step is not None:
            for task in event.tasks:
                found[task.spec, event.step, task.n, task.samples] = TaskScore(step=event.step, **vars(task))
                specs[task.task].add(task.spec)
    # Two files of one kind are told apart by all of their spec.
    return [
        replace(found[key], task=key[0]) if len(specs[found[key].task]) > 1 else found[key] for key in sorted(found)
    ]


def _criteria(story: Story, ended: Ended | None) -> Sequence[Verdict]:
    """The verdict at the end of the run; before its end, the verdict so far."""
    if ended is not None:
        return ended.verdicts
    known = {field.name for field in fields(CriteriaSettings)}
    wanted = {name: value for name, value in story.config.get("criteria", {}).items() if name in known}
    if not wanted or not story.num_steps:
        return []
    busy = [(part.utilisation["gpu"], part.num_steps) for part in story.parts if "gpu" in part.utilisation]
    first, last = story.loss_ends
    so_far = Outcome(
        stopped_by="",
        steps=story.num_steps,
        tokens=story.tokens,
        hours=story.seconds / 3600,
        speed=story.speed,
        loss_first_tenth=first,
        loss_last_tenth=last,
        val_losses=tuple(evaluation.val_loss for evaluation in story.evaluations),
        task_scores=_task_scores(story.events),
        peak_gib=story.peak_gib,
        memory_share=story.memory_share,
        utilisation=sum(v * n for v, n in busy) / sum(n for _, n in busy) if busy else None,
        saves=sum(isinstance(event, Saved) for event in story.events),
    )
    return judge(typed(CriteriaSettings, wanted, source=f"{story.path}/config.json, section criteria,"), so_far)


def _task_scores(events: Iterable[Event]) -> tuple[float, ...]:
    """As `Questions.ask` returns them: the mean over the tasks that have answers."""
    scores = [[task.value for task in event.tasks if task.metric != "perplexity"] for event in _scored(events)]
    return tuple(sum(values) / len(values) for values in scores if values)


def _scored(events: Iterable[Event]) -> list[TasksScored]:
    """By step; of one that was repeated, the last."""
    found = {event.step: event for event in events if isinstance(event, TasksScored) and event.step is not None}
    return [found[step] for step in sorted(found)]


def _choices(
    plan: Mapping[str, Any], active: Mapping[str, str], *, ran: Mapping[str, Mapping[str, str]]
) -> list[Choice]:
    decisions, reasons = plan.get("decisions", {}), plan.get("reasons", {})
    granted = {**active, "fused_optimizer": active.get("optimizer")}
    return [
        Choice(
            name=name,
            value=value,
            reason=str(reasons.get(name, "")),
            active=granted.get(name),
            ran=_ran(ran[name]) if name in ran else None,
        )
        for name, value in decisions.items()
    ]


def _ran(path: Mapping[str, str]) -> str:
    ran, seen = path.get("ran", "n/a"), path.get("seen", "n/a")
    return f"{'' if ran == path.get('planned') else 'not as planned: '}{ran} ({seen})"


def _forecasts(story: Story) -> list[Forecast]:
    predicted, speed = story.plan.get("predicted", {}), story.speed
    if not predicted:
        return []
    whole = story.total_steps is not None and story.num_steps >= story.total_steps
    rows = [
        ("tokens_per_s", "tokens/s", speed.tokens_per_s),
        ("step_s", "s a step", speed.step_s),
        ("mfu", "MFU, as done", speed.mfu),
        ("mfu_common", "MFU, 6N + 12LHT", speed.mfu_common),
        ("peak_gib", "GiB at the peak", story.peak_gib),
        ("hours", "hours", story.seconds / 3600 if whole else None),
    ]
    if parts := predicted.get("parts_s"):
        rows += [
            ("actor_mfu", "MFU of the actor", speed.actor_mfu),
            ("critic_mfu", "MFU of the critic", speed.critic_mfu),
        ]
    found = [Forecast(name=name, unit=unit, predicted=predicted.get(name), measured=got) for name, unit, got in rows]
    measured = {part.name: part.seconds for part in rl_parts(speed)}
    if "grade: queue" in measured:
        measured["grade"] = measured["grade: queue"] + measured["grade: work"]
    return found + [
        Forecast(name=name, unit=f"s a step, {name}", predicted=seconds, measured=measured.get(name))
        for name, seconds in (parts or {}).items()
    ]


def _gpus(samples: Sequence[Mapping[str, Any]]) -> list[Gpu]:
    seen: dict[int, list[Mapping[str, Any]]] = defaultdict(list)
    for sample in samples:
        for gpu in sample.get("gpus", []):
            seen[gpu["index"]].append(gpu)
    return [_gpu(index, rows) for index, rows in sorted(seen.items())]


def _gpu(index: int, rows: Sequence[Mapping[str, Any]]) -> Gpu:
    columns: dict[str, list[float]] = defaultdict(list)
    reasons: dict[str, int] = defaultdict(int)
    for row in rows:
        for key, value in row.items():
            if key in GPU_NUMBERS:
                columns[key].append(value)
        for reason in row.get("throttle", []):
            reasons[reason] += 1
    gauges = {key: Gauge(mean=sum(values) / len(values), high=max(values)) for key, values in columns.items()}
    return Gpu(index=index, gauges=gauges, throttle={reason: n / len(rows) for reason, n in reasons.items()})


def _rank(run: Run, rank: int) -> Rank:
    parts = run.latest_rollups(rank=rank)
    speed = speed_of(run, parts, rates=None, rank=rank)
    peaks = [part.memory["peak_gib"] for part in parts if "peak_gib" in part.memory]
    return Rank(
        rank=rank,
        steps=sum(part.num_steps for part in parts),
        step_s=speed.step_s,
        data_share=speed.data_share,
        peak_gib=max(peaks, default=None),
    )


def _redacted_finding(finding: Finding) -> Finding:
    told = redacted(asdict(finding))
    return Finding(**{**told, "evidence": tuple(told["evidence"])})


def _left(num_steps: int, total: int | None, speed: Speed, *, over: bool) -> float | None:
    if over or total is None or speed.step_s is None:
        return None
    return max(0, total - num_steps) * speed.step_s


def _last(events: Sequence[Event], kind: type[T]) -> T | None:
    return next((event for event in reversed(events) if isinstance(event, kind)), None)


def _broken(loss: float | None) -> bool:
    return loss is not None and not math.isfinite(loss)
