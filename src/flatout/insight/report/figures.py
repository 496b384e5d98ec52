"""Which charts a run has, and what they are drawn from."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from flatout.insight.report.charts import Band, Bands, Chart, Level, Line, Point, share, short
from flatout.insight.report.roofline import roofline
from flatout.insight.story import Story, names_of
from flatout.record import Rollup
from flatout.record.events import Compiled, MicroBatchSearched

# Phases in the order they are stacked, with the class that colours them.
PHASES = {
    "data": "p2",
    "forward": "p1",
    "backward": "p4",
    "reduce": "p3",
    "optimize": "p6",
    "optimizer": "p6",
    "generate": "p3",
    "sync": "p5",
    "queue": "p5",
    "grade": "p5",
    "old_logprobs": "p8",
    "logprobs": "p8",
    "values": "p8",
    "reference": "p8",
    "reward": "p5",
    "record": "p7",
    "eval": "p5",
    "save": "p8",
    "profile": "p7",
    "other": "p0",
    "unattributed": "p0",
}
LONGEST_LABEL = 10  # characters that fit beside a chart
# Of the monitor's numbers, those that are shares of one; `busy` is NVML's utilisation.
ACTIVITY = {"busy": "GPU busy", "sm_active": "SM", "tensor_active": "tensor", "dram_active": "DRAM"}


def charts(story: Story, *, id: str) -> list[Chart | Bands]:
    """All charts of one run; rewards and task scores where it has any."""
    scores = [_scores(story, id=f"{id}scores")] if any(score.metric != "perplexity" for score in story.tasks) else []
    rewards = [_rewards(story, id=f"{id}rewards")] if story.rollouts else []
    routes = any("routed_right" in part.extra for part in story.parts)
    parts = [_loss_parts(story, id=f"{id}parts"), _temperature(story, id=f"{id}temperature")] if routes else []
    searched = [event for event in story.events if isinstance(event, MicroBatchSearched)]
    sizes = [_micro_batches(searched[-1], id=f"{id}micro-batch")] if searched else []
    roof = roofline(story, id=f"{id}roofline")
    paid = _payback(story, id=f"{id}payback")
    return [
        *rewards,
        loss_chart([story], id=f"{id}loss"),
        *parts,
        *_steering(story, id=id),
        *scores,
        speed_chart([story], id=f"{id}speed"),
        _mfu(story, id=f"{id}mfu"),
        _memory(story, id=f"{id}memory"),
        _bands(story, id=f"{id}phases"),
        _utilisation(story, id=f"{id}utilisation"),
        *([roof] if roof else []),
        *([paid] if paid else []),
        *sizes,
    ]


def loss_chart(stories: Sequence[Story], *, id: str) -> Chart:
    lines = [
        Line(name=_label(stories, n, "training"), colour=_colour(stories, n, 1), points=_points(story, _loss))
        for n, story in enumerate(stories)
    ]
    if len(stories) == 1:
        points = [Point(x=found.step, y=found.val_loss) for found in stories[0].evaluations]
        lines.append(Line(name="validation", colour=2, points=points, dots=True))
    broken = [part.last_step + 1.0 for story in stories for part in story.parts if part.num_non_finite]
    return Chart(
        id=id,
        title="Loss",
        about=_about(stories, "Loss", lines, number=short)
        + (f" Not finite in {len(broken)} places." if broken else ""),
        show=short,
        lines=lines,
        broken=broken,
        from_zero=False,
    )


def validation_chart(stories: Sequence[Story], *, id: str) -> Chart:
    lines = [
        Line(
            name=_label(stories, n, "validation"),
            colour=_colour(stories, n, 2),
            points=[Point(x=found.step, y=found.val_loss) for found in story.evaluations],
            dots=True,
        )
        for n, story in enumerate(stories)
    ]
    about = _about(stories, "Validation loss", lines, number=short)
    missing = "no run was evaluated"
    return Chart(id=id, title="Validation loss", about=about, show=short, lines=lines, from_zero=False, missing=missing)


def _steering(story: Story, *, id: str) -> list[Chart]:
    """The learning rate and the norm of the gradient, where they were recorded."""
    found = []
    for key, title, name in (("lr", "Learning rate", "rate"), ("grad_norm", "Gradient norm", "norm")):
        if lines := _metric_lines(story, {key: name}):
            about = _about([story], title, lines, number=short)
            found.append(Chart(id=f"{id}{key}", title=title, about=about, show=short, lines=lines))
    return found


def _rewards(story: Story, *, id: str) -> Chart:
    names = list(dict.fromkeys(one.task for phase in story.rollouts for one in phase.tasks))
    lines = []
    for at, name in enumerate(names):
        found = [(phase.step or 0, one) for phase in story.rollouts for one in phase.tasks if one.task == name]
        points = [Point(x=step, y=one.reward) for step, one in found if one.reward is not None]
        lines.append(Line(name=name, colour=at % 6 + 1, points=points))
    about = _about([story], "Mean reward of the completions of each phase", lines, number=short)
    return Chart(id=id, title="Reward", about=about, show=short, lines=lines)


def _metric_lines(story: Story, names: Mapping[str, str]) -> list[Line]:
    """A line for each metric of the objective that the run has."""
    lines = []
    for at, (key, name) in enumerate(names.items()):
        points = [Point(x=part.last_step, y=part.extra[key]) for part in story.parts if key in part.extra]
        if points:
            lines.append(Line(name=name, colour=at % 6 + 1, points=points))
    return lines


def _loss_parts(story: Story, *, id: str) -> Chart:
    names = ("task", "balance", "sparsity", "consistency", "entropy")
    lines = _metric_lines(story, {name: name for name in names})
    about = _about([story], "The parts of the loss, before their weights", lines, number=short)
    return Chart(id=id, title="Parts of the loss", about=about, show=short, lines=lines)


def _temperature(story: Story, *, id: str) -> Chart:
    names = {"temperature": "temperature", "confidence": "mean confidence", "routed_right": "routed to own adapter"}
    lines = _metric_lines(story, names)
    about = _about(
        [story], "The router's temperature, its confidence, and its share of right choices", lines, number=short
    )
    return Chart(id=id, title="Router", about=about, show=short, lines=lines)


def _scores(story: Story, *, id: str) -> Chart:
    names = list(dict.fromkeys(score.task for score in story.tasks if score.metric != "perplexity"))
    lines = [
        Line(
            name=name,
            colour=at % 6 + 1,
            points=[
                Point(x=score.step, y=score.value, low=score.low, high=score.high)
                for score in story.tasks
                if score.task == name
            ],
            dots=True,
        )
        for at, name in enumerate(names)
    ]
    about = _about([story], "Share of questions answered right, with its 95 % interval", lines, number=share)
    return Chart(id=id, title="Task scores", about=about, show=share, lines=lines)


def _micro_batches(event: MicroBatchSearched, *, id: str) -> Chart:
    points = [Point(x=one.micro_batch, y=one.tokens_per_s) for one in event.trials if one.tokens_per_s]
    line = Line(name="tokens/s", colour=1, points=sorted(points, key=lambda point: point.x), dots=True)
    failed = ", ".join(str(one.micro_batch) for one in event.trials if not one.tokens_per_s)
    about = f"Tokens per second of the micro-batches that were tried; {failed or 'none'} did not fit."
    lines = [line] if points else []
    return Chart(id=id, title="Micro-batch search", about=about, show=short, lines=lines, x_name="sequences")


def _payback(story: Story, *, id: str) -> Chart | None:
    """From the measured time of compiling and of a step; what a step would take without it is the plan's estimate."""
    compiled = next((event for event in reversed(story.events) if isinstance(event, Compiled)), None)
    if compiled is None or not compiled.break_even or not story.speed.step_s:
        return None
    paid, step_s = compiled.break_even, story.speed.step_s
    return payback_chart(
        id=id,
        about=f"Compiling took {compiled.seconds:.1f} s and pays off at step {paid:,}, by the plan's estimate.",
        compiled=(compiled.seconds, step_s),
        plain=(0.0, step_s + compiled.seconds / paid),
        even=paid,
        x_name="step",
    )


def payback_chart(
    *,
    id: str,
    about: str,
    compiled: tuple[float, float],
    plain: tuple[float, float],
    even: float,
    x_name: str,
) -> Chart:
    """Seconds with and without compiling, each as those of the start and of a step (or token); equal at `even`."""
    xs = (0.0, even, 2 * even)
    lines = [
        Line(name=name, colour=colour, points=[Point(x=x, y=start_s + x * each_s) for x in xs])
        for name, colour, (start_s, each_s) in (("compiled", 1, compiled), ("not compiled", 2, plain))
    ]
    title = "Time with and without compiling, s"
    return Chart(id=id, title=title, about=about, show=short, lines=lines, x_name=x_name)


def speed_chart(stories: Sequence[Story], *, id: str) -> Chart:
    lines = [
        Line(name=_label(stories, n, "tokens/s"), colour=_colour(stories, n, 1), points=_points(story, _speed))
        for n, story in enumerate(stories)
    ]
    levels = _level("predicted", stories[0].plan.get("predicted", {}).get("tokens_per_s")) if len(stories) == 1 else ()
    about = _about(stories, "Tokens per second, evaluations and saves apart", lines, number=short)
    return Chart(id=id, title="Tokens per second", about=about, show=short, lines=lines, levels=levels)


def _mfu(story: Story, *, id: str) -> Chart:
    def by(convention: str) -> Callable[[Rollup], Point | None]:
        def read(part: Rollup) -> Point | None:
            if story.rates is None or part.profiled:
                return None
            shares = story.rates.shares(tokens=part.training_tokens, seconds=part.training_s)
            value: float | None = getattr(shares, convention)
            return None if value is None else Point(x=part.last_step + 1, y=value)

        return read

    lines = [
        Line(name="as done", colour=1, points=_points(story, by("mfu"))),
        Line(name="6N + 12LHT", colour=2, points=_points(story, by("mfu_common"))),
    ]
    levels = _level("predicted, as done", story.plan.get("predicted", {}).get("mfu"))
    about = _about([story], "Share of the device's peak arithmetic", lines, number=share)
    return Chart(
        id=id,
        title="MFU",
        about=about,
        show=share,
        lines=lines,
        levels=levels,
        missing="the peak of this device or the FLOPs of this model are unknown",
    )


def _memory(story: Story, *, id: str) -> Chart:
    def by(key: str) -> Callable[[Rollup], Point | None]:
        return lambda part: Point(x=part.last_step + 1, y=part.memory[key]) if key in part.memory else None

    names = {"peak_gib": "peak", "reserved_gib": "reserved"}
    lines = [
        Line(name=name, colour=n, points=_points(story, by(key))) for n, (key, name) in enumerate(names.items(), 1)
    ]
    levels = [
        *_level("predicted peak", story.plan.get("predicted", {}).get("peak_gib")),
        *_level(f"all there is: {short(story.total_gib or 0)} GiB", story.total_gib),
    ]
    about = _about([story], "Memory in GiB", lines, number=short)
    return Chart(id=id, title="Memory, GiB", about=about, show=short, lines=lines, levels=levels)


def _bands(story: Story, *, id: str) -> Bands:
    parts = [part for part in story.parts if part.spans]
    names = sorted({name for part in parts for name in part.spans}, key=_order)
    whole = {phase.name: phase.share for phase in story.phases}
    shares = {name: [part.spans.get(name, 0.0) / _wall(part) for part in parts] for name in names}
    if "unattributed" in whole:
        shares["unattributed"] = [1 - sum(part.spans.values()) / _wall(part) for part in parts]
    bands = [
        Band(name=name, colour=phase_colour(name), shares=column, share=whole.get(name, 0.0))
        for name, column in shares.items()
    ]
    about = ", ".join(f"{phase.name} {100 * phase.share:.1f} %" for phase in story.phases)
    return Bands(
        id=id,
        title="Phases",
        about=f"Share of time by phase. Over the whole run: {about}.",
        xs=[part.last_step + 1 for part in parts],
        bands=bands,
    )


def _utilisation(story: Story, *, id: str) -> Chart:
    lines = [
        Line(name=name, colour=colour, points=_samples(story, partial(_of_gpus, key=key)))
        for colour, (key, name) in zip((1, 3, 2, 4), ACTIVITY.items(), strict=True)
    ]
    lines.append(Line(name="CPU", colour=5, points=_samples(story, lambda sample: sample.get("cpu"))))
    about = _about([story], "Share of time the machine was busy", [line for line in lines if line.points], number=share)
    return Chart(id=id, title="Utilisation", about=about, show=share, lines=lines)


def phase_colour(name: str) -> str:
    return PHASES.get(name.rsplit("/", 1)[-1], "p7")


def _order(name: str) -> tuple[int, str]:
    base = name.rsplit("/", 1)[-1]
    return ([*PHASES].index(base) if base in PHASES else len(PHASES), name)


def _wall(part: Rollup) -> float:
    """Recorded seconds; where the phases' own clock runs ahead of it, theirs."""
    return max(part.seconds, sum(part.spans.values()), 1e-9)


def _points(story: Story, read: Callable[[Rollup], Point | None]) -> list[Point]:
    return [point for part in story.parts if (point := read(part)) is not None]


def _loss(part: Rollup) -> Point | None:
    if part.loss is None:
        return None
    return Point(x=part.last_step + 1, y=part.loss, low=part.loss_low, high=part.loss_high)


def _speed(part: Rollup) -> Point | None:
    if part.profiled:
        return None
    a_step = part.tokens / part.num_steps
    return Point(
        x=part.last_step + 1,
        y=part.training_tokens / part.training_s,
        low=a_step / part.slowest_s,
        high=a_step / part.fastest_s,
    )


def _samples(story: Story, read: Callable[[Mapping[str, Any]], float | None]) -> list[Point]:
    """A number of the monitor at the step that was under way."""
    times = [part.last_time for part in story.parts]
    points: list[Point] = []
    for sample in story.samples:
        value = read(sample)
        if value is not None and times and sample["time"] <= times[-1]:
            points.append(Point(x=_step_at(story.parts, times, sample), y=value))
    return points


def _of_gpus(sample: Mapping[str, Any], *, key: str) -> float | None:
    """Mean over the GPUs that tell."""
    values = [float(gpu[key]) for gpu in sample.get("gpus", []) if key in gpu]
    return sum(values) / len(values) if values else None


def _step_at(parts: Sequence[Rollup], times: Sequence[float], sample: Mapping[str, Any]) -> float:
    part = parts[bisect_left(times, sample["time"])]
    spent = part.last_time - part.first_time + part.seconds / part.num_steps
    done = 1 - (part.last_time - float(sample["time"])) / max(spent, 1e-9)
    return part.first_step + max(0.0, min(1.0, done)) * part.num_steps


def _level(name: str, y: float | None) -> Sequence[Level]:
    return () if y is None else (Level(name=name, y=y),)


def _label(stories: Sequence[Story], at: int, alone: str) -> str:
    """What stands at the end of a line: the run's name, or its end, by which names of one kind differ."""
    if len(stories) == 1:
        return alone
    name = names_of(stories)[at]
    return name if len(name) <= LONGEST_LABEL else f"…{name[1 - LONGEST_LABEL :]}"


def _colour(stories: Sequence[Story], at: int, alone: int) -> int:
    return alone if len(stories) == 1 else at % 6 + 1


def _about(stories: Sequence[Story], what: str, lines: Sequence[Line], *, number: Callable[[float], str]) -> str:
    said = []
    for line in lines:
        if not line.points:
            continue
        low, high = min(point.bottom for point in line.points), max(point.top for point in line.points)
        said.append(f"{line.name} from {number(low)} to {number(high)}, last {number(line.points[-1].y)}")
    steps = max((story.num_steps for story in stories), default=0)
    return f"{what} over {steps:,} steps: {'; '.join(said) or 'nothing recorded'}."
