"""What a run folder says, worked out once for all who show it (`report`, `watch`): speed, phases, memory, verdict.

Everything is derived from the folder alone, from roll-ups where the run is long. Unknown is None. A folder made by
a foreign script has no plan and no criteria: what is missing there is left out, never guessed.
"""

from __future__ import annotations

import math
import socket
import time
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import islice
from typing import Any, Literal

import psutil

from flatout.config.settings import CriteriaSettings
from flatout.cost import Rates, Shares
from flatout.recipes.verdict import WARM_STEPS, Outcome, Speed, Verdict, judge
from flatout.record import BESIDE, Event, Finding, Rollup, Run, StepRecord, redact, redacted
from flatout.terminal import duration, number, percent

# Parts a history is drawn from, steps the current speed is averaged over, and samples that are read of a long run.
NUM_PARTS, RECENT_STEPS, NUM_SAMPLES = 240, 20, 400
# Without a sign of life for this long, a run on another machine is no longer called running.
SILENT_S = 60.0

Grade = Literal["good", "bad", "open"]


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One number of a run: its stable key, how it is said to people, and where it comes from."""

    key: str
    name: str
    value: float | None
    text: str
    source: str


@dataclass(frozen=True, kw_only=True)
class State:
    """Whether a run goes on, as far as its folder and this machine can tell."""

    kind: Literal["waiting", "running", "finished", "stopped", "lost", "silent"]
    sentence: str

    @property
    def over(self) -> bool:
        return self.kind in ("finished", "stopped", "lost")


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    step: int
    val_loss: float


@dataclass(frozen=True, kw_only=True)
class Phase:
    name: str
    seconds: float
    share: float  # of all recorded time


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One decision of the plan: why it was taken, and what the device then granted."""

    name: str
    value: Any
    reason: str
    active: str | None


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """A prediction beside what came of it."""

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
    seconds: float
    speed: Speed
    recent: Speed
    left_s: float | None
    last: StepRecord | None
    parts: Sequence[Rollup]
    evaluations: Sequence[Evaluation]
    phases: Sequence[Phase]
    peak_gib: float | None
    total_gib: float | None
    num_non_finite: int
    rates: Rates | None
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
    def memory_share(self) -> float | None:
        return self.peak_gib / self.total_gib if self.peak_gib is not None and self.total_gib else None

    @property
    def grade(self) -> Grade:
        """The verdict in one word: bad where a criterion or the loss failed, good only where something was met."""
        met = [verdict.met for verdict in self.criteria]
        if False in met or self.state.kind == "lost" or (self.last and _broken(self.last.loss)):
            return "bad"
        return "good" if self.state.kind == "finished" and True in met else "open"

    @property
    def judged(self) -> str:
        """How the criteria stand, in one sentence."""
        if not self.criteria:
            return "No criteria were set."
        met = [verdict.met for verdict in self.criteria]
        so_far = "" if self.state.over else " so far"
        words = [f"{met.count(True)} of {len(met)} criteria met{so_far}"]
        words += [f"{met.count(False)} not met"] if False in met else []
        words += [f"{met.count(None)} not measured"] if None in met else []
        return f"{', '.join(words)}."

    def figures(self) -> list[Figure]:
        return [*_speed_figures(self), *_memory_figures(self), *_loss_figures(self), *_length_figures(self)]

    def figure(self, key: str) -> Figure:
        return next(figure for figure in self.figures() if figure.key == key)


def tell(run: Run, *, num_parts: int = NUM_PARTS, now: float | None = None) -> Story:
    """Reads a run folder; `now` is the time to judge signs of life by."""
    now = time.time() if now is None else now
    events = [replace(event, data=redacted(event.data)) for event in run.events()]
    attempts = [event for event in events if event.kind == "attempt"]
    current = [event for event in events if not attempts or event.time >= attempts[-1].time]
    plan = redacted(_last(current, "plan") or run.plan)
    rates = Rates.from_json(plan["rates"]) if "rates" in plan else None
    latest = run.latest_rollups()
    recent = run.recent_steps(RECENT_STEPS, latest=latest)
    speed = speed_of(latest, rates=rates, warm=_warm_steps(run, latest))
    config, diagnosis = redacted(run.config), run.diagnosis
    memory = [part.memory for part in latest]
    samples = list(run.samples(at_most=NUM_SAMPLES))
    start, outcome = _last(events, "start"), _last(current, "end")
    total_steps = start.get("total_steps") if start else plan.get("job", {}).get("steps")
    num_steps = latest[-1].last_step + 1 if latest else 0
    now_speed = speed_of_steps(recent, rates=rates)
    story = Story(
        name=redact(run.path.resolve().name),
        path=redact(str(run.path)),
        recipe=config.get("recipe"),
        state=state_of(attempts, outcome, recent[-1] if recent else None, now=now),
        num_attempts=len(attempts),
        num_steps=num_steps,
        total_steps=total_steps,
        tokens=sum(part.tokens for part in latest),
        seconds=sum(part.seconds for part in latest),
        speed=speed,
        recent=now_speed,
        left_s=_left(num_steps, total_steps, now_speed, over=outcome is not None),
        last=recent[-1] if recent else None,
        parts=run.history(at_most=num_parts, latest=latest),
        evaluations=_evaluations(events),
        phases=_phases(latest),
        peak_gib=max((row["peak_gib"] for row in memory if "peak_gib" in row), default=None),
        total_gib=max((row["total_gib"] for row in memory if "total_gib" in row), default=None),
        num_non_finite=sum(part.num_non_finite for part in latest),
        rates=rates,
        criteria=(),
        choices=_choices(plan, _last(current, "active") or {}),
        active=_last(current, "active") or {},
        forecasts=(),
        memory_parts=plan.get("predicted", {}).get("memory_gib", {}),
        gpus=_gpus(samples),
        samples=samples,
        last_sample=run.last_sample(),
        ranks=[_rank(run, rank) for rank in run.ranks()] if len(run.ranks()) > 1 else (),
        events=events,
        host=attempts[-1].data.get("host") if attempts else None,
        verdict=redact(diagnosis.verdict) if diagnosis else None,
        limit=redacted(diagnosis.limit) if diagnosis else {},
        findings=[_redacted_finding(finding) for finding in diagnosis.findings] if diagnosis else (),
        config_text=redact(run.config_text),
        config=config,
        plan=plan,
        hardware=redacted(run.hardware),
        environment=redacted(run.environment),
        told_at=now,
    )
    return replace(story, criteria=_criteria(story, outcome), forecasts=_forecasts(story))


def state_of(
    attempts: Sequence[Event], outcome: Mapping[str, Any] | None, last: StepRecord | None, *, now: float
) -> State:
    if outcome is not None:
        return _ended(str(outcome["outcome"]["stopped_by"]))
    if not attempts:
        return State(kind="waiting", sentence="Nothing was recorded yet")
    attempt = attempts[-1]
    seen = max(attempt.time, last.time if last else 0.0)
    if attempt.data.get("host") == socket.gethostname():
        if _alive(attempt.data.get("pid"), since=attempt.time):
            return State(kind="running", sentence="Running")
        return State(kind="lost", sentence=f"Ended without a last word (killed, or failed) {_ago(now - seen)}")
    if now - seen <= SILENT_S:
        return State(kind="running", sentence=f"Running on {attempt.data.get('host', 'another machine')}")
    host = attempt.data.get("host", "another machine")
    return State(kind="silent", sentence=f"No word from {host} since {_ago(now - seen)}")


def _ended(stopped_by: str) -> State:
    match stopped_by:
        case "end":
            return State(kind="finished", sentence="Finished")
        case "target":
            return State(kind="finished", sentence="Finished early: target reached")
        case "patience":
            return State(kind="finished", sentence="Finished early: validation stopped improving")
        case _:
            return State(kind="stopped", sentence=f"Stopped by {stopped_by}")


def _alive(pid: Any, *, since: float) -> bool:
    """Whether the process still runs; another one that was given its number later does not count."""
    try:
        return isinstance(pid, int) and psutil.Process(pid).create_time() <= since + 1
    except psutil.Error:
        return False


def _ago(seconds: float) -> str:
    return f"{duration(max(0.0, seconds))} ago"


def speed_of(parts: Iterable[Rollup], *, rates: Rates | None, warm: Sequence[StepRecord] = ()) -> Speed:
    """Training speed of whole roll-ups without the steps that warmed up, evaluations and saves apart."""
    steps, tokens = -len(warm), -sum(step.tokens for step in warm)
    wall, seconds = -sum(step.seconds for step in warm), -sum(step.training_s for step in warm)
    spans: dict[str, float] = defaultdict(float)
    for step in warm:
        for span in step.spans:
            spans[span.phase] -= span.seconds
    for part in parts:
        steps, tokens, wall = steps + part.num_steps, tokens + part.tokens, wall + part.seconds
        seconds += training_s(part)
        for phase, spent in part.spans.items():
            spans[phase] += spent
    return _speed(steps, tokens=tokens, seconds=seconds, wall=wall, spans=spans, rates=rates)


def speed_of_steps(records: Sequence[StepRecord], *, rates: Rates | None) -> Speed:
    """The same of a few steps, warm or not: how fast it goes now."""
    spans: dict[str, float] = defaultdict(float)
    for record in records:
        for span in record.spans:
            spans[span.phase] += span.seconds
    return _speed(
        len(records),
        tokens=sum(record.tokens for record in records),
        seconds=sum(record.training_s for record in records),
        wall=sum(record.seconds for record in records),
        spans=spans,
        rates=rates,
    )


def _speed(
    steps: int, *, tokens: int, seconds: float, wall: float, spans: Mapping[str, float], rates: Rates | None
) -> Speed:
    if steps <= 0 or seconds <= 0:
        return Speed(steps=0)
    shares = rates.shares(tokens=tokens, seconds=seconds) if rates else Shares()
    return Speed(
        steps=steps,
        tokens_per_s=tokens / seconds,
        step_s=seconds / steps,
        mfu=shares.mfu,
        hfu=shares.hfu,
        mfu_common=shares.mfu_common,
        data_share=spans["data"] / seconds if "data" in spans else None,
        unattributed_share=1 - sum(spans.values()) / wall if spans else None,
    )


def training_s(part: Rollup) -> float:
    """Seconds of a roll-up without what was done beside training."""
    return max(part.seconds - sum(part.spans.get(phase, 0.0) for phase in BESIDE), 1e-9)


def _warm_steps(run: Run, parts: Sequence[Rollup], *, rank: int = 0) -> list[StepRecord]:
    """The first steps of each attempt that still count."""
    first: dict[int, Rollup] = {}
    for part in parts:
        first.setdefault(part.attempt, part)
    return [step for part in first.values() for step in islice(run.steps_in(part, rank=rank), WARM_STEPS)]


def _phases(parts: Iterable[Rollup]) -> list[Phase]:
    spans: dict[str, float] = defaultdict(float)
    total = 0.0
    for part in parts:
        total += part.seconds
        for phase, seconds in part.spans.items():
            spans[phase] += seconds
    if spans and total > sum(spans.values()) * 1.001:
        spans["unattributed"] = total - sum(spans.values())
    return [Phase(name=name, seconds=seconds, share=seconds / total) for name, seconds in spans.items() if total]


def _evaluations(events: Iterable[Event]) -> list[Evaluation]:
    """What led to the weights as they are now: a resumed run forgets what came after the step it went back to."""
    found: dict[int, Evaluation] = {}
    for event in events:
        if event.kind == "resume" and event.step is not None:
            found = {step: evaluation for step, evaluation in found.items() if step <= event.step}
        if event.kind == "eval" and event.step is not None:
            found[event.step] = Evaluation(step=event.step, val_loss=float(event.data["val_loss"]))
    return [found[step] for step in sorted(found)]


def _criteria(story: Story, outcome: Mapping[str, Any] | None) -> list[Verdict]:
    """The verdict the run ended with; before its end, how it stands so far."""
    if outcome is not None:
        return [Verdict(**verdict) for verdict in outcome["verdicts"]]
    known = {field.name for field in fields(CriteriaSettings)}
    wanted = {name: value for name, value in story.config.get("criteria", {}).items() if name in known}
    if not wanted or not story.num_steps:
        return []
    busy = [(part.utilisation["gpu"], part.num_steps) for part in story.parts if "gpu" in part.utilisation]
    first, last = loss_ends(story.parts)
    so_far = Outcome(
        steps=story.num_steps,
        tokens=story.tokens,
        hours=story.seconds / 3600,
        speed=story.speed,
        loss_first_tenth=first,
        loss_last_tenth=last,
        val_losses=tuple(evaluation.val_loss for evaluation in story.evaluations),
        peak_gib=story.peak_gib,
        memory_share=story.memory_share,
        utilisation=sum(v * n for v, n in busy) / sum(n for _, n in busy) if busy else None,
        saves=sum(event.kind == "save" for event in story.events),
    )
    return judge(CriteriaSettings(**wanted), so_far)


def loss_ends(parts: Sequence[Rollup]) -> tuple[float | None, float | None]:
    """Mean loss of about the first and the last tenth of the steps."""
    losses = [(part.loss, part.num_steps - part.num_non_finite) for part in parts if part.loss is not None]
    if len(losses) < 2:
        return None, None
    tenth = max(1, len(losses) // 10)

    def mean(some: Sequence[tuple[float, int]]) -> float:
        return sum(loss * count for loss, count in some) / sum(count for _, count in some)

    return mean(losses[:tenth]), mean(losses[-tenth:])


def _choices(plan: Mapping[str, Any], active: Mapping[str, str]) -> list[Choice]:
    decisions, reasons = plan.get("decisions", {}), plan.get("reasons", {})
    granted = {**active, "fused_optimizer": active.get("optimizer")}
    return [
        Choice(name=name, value=value, reason=str(reasons.get(name, "")), active=granted.get(name))
        for name, value in decisions.items()
    ]


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
    return [Forecast(name=name, unit=unit, predicted=predicted.get(name), measured=got) for name, unit, got in rows]


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
            if key != "index" and isinstance(value, int | float):
                columns[key].append(value)
        for reason in row.get("throttle", []):
            reasons[reason] += 1
    gauges = {key: Gauge(mean=sum(values) / len(values), high=max(values)) for key, values in columns.items()}
    return Gpu(index=index, gauges=gauges, throttle={reason: n / len(rows) for reason, n in reasons.items()})


def _rank(run: Run, rank: int) -> Rank:
    parts = run.latest_rollups(rank=rank)
    speed = speed_of(parts, rates=None, warm=_warm_steps(run, parts, rank=rank))
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


def _last(events: Sequence[Event], kind: str) -> Mapping[str, Any] | None:
    return next((event.data for event in reversed(events) if event.kind == kind), None)


def _broken(loss: float | None) -> bool:
    return loss is not None and not math.isfinite(loss)


def _speed_figures(story: Story) -> list[Figure]:
    speed = story.speed
    counted = (
        f"steps.jsonl, {speed.steps:,} steps: the first {WARM_STEPS} of each attempt, eval, save and profile apart"
    )
    peak = "plan.json rates (operations per token, datasheet peak)"
    return [
        Figure(
            key="tokens_per_s",
            name="tokens/s",
            value=speed.tokens_per_s,
            text=number(speed.tokens_per_s),
            source=f"tokens ÷ seconds; {counted}",
        ),
        Figure(
            key="mfu",
            name="MFU, as done",
            value=speed.mfu,
            text=percent(speed.mfu),
            source=f"tokens/s x {peak}; n/a where the peak is not known",
        ),
        Figure(
            key="mfu_common",
            name="MFU, 6N + 12LHT",
            value=speed.mfu_common,
            text=percent(speed.mfu_common),
            source=f"the convention most projects report; tokens/s x {peak}",
        ),
        Figure(
            key="step_s",
            name="step time",
            value=speed.step_s,
            text=number(speed.step_s, unit=" s"),
            source=f"seconds ÷ steps; {counted}",
        ),
        Figure(
            key="data_share",
            name="waiting for data",
            value=speed.data_share,
            text=percent(speed.data_share),
            source="steps.jsonl, spans: data ÷ training seconds",
        ),
        Figure(
            key="unattributed_share",
            name="unattributed",
            value=speed.unattributed_share,
            text=percent(_no_minus_zero(speed.unattributed_share)),
            source="steps.jsonl: 1 - spans ÷ seconds, two clocks compared",
        ),
    ]


def _no_minus_zero(share: float | None) -> float | None:
    """Two clocks never agree to the last digit, and -0.0 % reads like a fault."""
    return 0.0 if share is not None and abs(share) < 0.0005 else share


def _memory_figures(story: Story) -> list[Figure]:
    share = story.memory_share
    of = "" if share is None else f" ({percent(share)})"
    return [
        Figure(
            key="peak_gib",
            name="peak memory",
            value=story.peak_gib,
            text=number(story.peak_gib, unit=" GiB") + of,
            source="steps.jsonl, memory: highest peak_gib; share of total_gib",
        )
    ]


def _loss_figures(story: Story) -> list[Figure]:
    first, last = loss_ends(story.parts)
    evaluations = story.evaluations
    return [
        Figure(
            key="loss",
            name="training loss",
            value=last,
            text=number(last, digits=4),
            source=f"steps.jsonl: mean of the last tenth; the first tenth's was {number(first, digits=4)}",
        ),
        Figure(
            key="val_loss",
            name="validation loss",
            value=evaluations[-1].val_loss if evaluations else None,
            text=number(evaluations[-1].val_loss if evaluations else None, digits=4),
            source=f"events.jsonl, eval: the last of {len(evaluations)}"
            + (f"; the first was {number(evaluations[0].val_loss, digits=4)}" if evaluations else ""),
        ),
    ]


def _length_figures(story: Story) -> list[Figure]:
    total = "" if story.total_steps is None else f" of {story.total_steps:,}"
    return [
        Figure(
            key="steps",
            name="steps",
            value=story.num_steps,
            text=f"{story.num_steps:,}{total}",
            source="steps.jsonl, last step; events.jsonl, start",
        ),
        Figure(
            key="tokens",
            name="tokens",
            value=story.tokens,
            text=f"{story.tokens:,}",
            source="steps.jsonl, sum of tokens",
        ),
        Figure(
            key="seconds",
            name="time in steps",
            value=story.seconds,
            text=duration(story.seconds),
            source="steps.jsonl, sum of seconds; everything between two steps counts",
        ),
        Figure(
            key="left_s",
            name="time left",
            value=story.left_s,
            text="none" if story.state.over else duration(story.left_s),
            source=f"steps left x mean of the last {story.recent.steps} steps",
        ),
    ]
