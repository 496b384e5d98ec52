"""Judges a log over the run: a loss that does not fall, a speed that falls, skipped updates, a target loss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean, median

from flatout.insight.diagnose.host import finding_of
from flatout.insight.logs.formats import Log
from flatout.record import Finding
from flatout.words import duration

# Fewer losses or speeds than this show no trend.
_FEWEST_LOSSES, _FEWEST_SPEEDS, _FEWEST_FOR_TARGET = 30, 9, 8
# A speed below this share of the earlier one is reported; a loss that fell by less than this share has not fallen.
_SLOWER, _FALLEN = 0.6, 0.01
# With more skipped updates than this, the loss scale does not settle.
_MANY_SKIPPED = 0.1


def flat_loss(log: Log) -> Finding | None:
    """A loss that is at the end what it was at the beginning of training, where its noise is small enough to tell."""
    losses, rates = log.values("loss"), log.values("lr")
    if len(losses) < _FEWEST_LOSSES or not all(map(math.isfinite, losses)):
        return None
    steps = [row["step"] for row in log.rows if "loss" in row and "step" in row]
    if len(steps) == len(losses) and steps[0] > max(10.0, 2 * (steps[1] - steps[0])):
        return None  # a later part of a run, where a loss falls slowly
    if rates and rates[-1] > rates[0]:  # the warm-up is not over
        return None
    third = len(losses) // 3
    first, last = fmean(losses[:third]), fmean(losses[-third:])
    error = math.hypot(_deviation(losses[:third]), _deviation(losses[-third:])) / math.sqrt(third)
    if first <= 0 or first - last > max(_FALLEN * first, 2 * error) or error > 0.5 * _FALLEN * first:
        return None
    ids = f" It is the loss of a uniform guess over about {math.exp(last):,.0f} ids." if 6 < last < 13 else ""
    return finding_of(
        "slow-convergence",
        f"The loss does not fall: {first:.4g} in the first third of {len(losses)} lines, {last:.4g} in the last.{ids}",
        None,
        None,
        [f"learning rate {rates[-1]:.3g}" if rates else "learning rate unknown", f"standard error {error:.2g}"],
        "as advice: check that the labels belong to the inputs and that every parameter is in the optimizer; "
        "try ten times the learning rate for 100 steps",
    )


def slowed(log: Log) -> Finding | None:
    """A speed that falls during the run."""
    unit = next((name for name in ("tokens_per_s", "seconds") if len(log.finite(name)) >= _FEWEST_SPEEDS), None)
    if unit is None:
        return None
    steps = [row.get("step") for row in log.rows if math.isfinite(row.get(unit, math.nan))]
    speeds = log.finite(unit)
    steps = steps[-len(speeds) :]
    speeds = [speed if unit == "tokens_per_s" else 1 / speed if speed > 0 else 0.0 for speed in speeds]
    third = len(speeds) // 3
    first, last = median(speeds[:third]), median(speeds[-third:])
    if first <= 0 or last >= _SLOWER * first:
        return None
    since = next(at for at in range(len(speeds)) if median(speeds[max(0, at - 1) : at + 2]) < (first + last) / 2)
    place = f"step {steps[since]:,.0f}" if steps[since] is not None else f"line {since} of {len(speeds)}"
    words = {"tokens_per_s": "{:,.0f} tokens/s", "seconds": "{:.3g} steps/s"}[unit]
    return finding_of(
        "speed-drop",
        f"The speed falls to {last / first:.0%} during the run, around {place}.",
        1 - last / first,
        None,
        [f"{words.format(first)} in the first third, {words.format(last)} in the last"],
        "compare a step before and after: other jobs on the machine, clocks and temperature (nvidia-smi), the length "
        "of the rows, memory that runs full, logging or evaluation that grows",
    )


def skipped(log: Log) -> Finding | None:
    """Updates that were skipped because gradients overflowed in float16."""
    rows = [row for row in log.rows if "step" in row and "skipped" in row]
    nans = sum(log.values("nan_now"))
    if len(rows) > 1:
        steps, missed = rows[-1]["step"] - rows[0]["step"], rows[-1]["skipped"] - rows[0]["skipped"]
    else:
        placed = [row["step"] for row in log.rows if "skipped_now" in row and "step" in row]
        steps = placed[-1] - placed[0] + 1 if placed else 0.0
        missed = sum(log.values("skipped_now"))
    if steps <= 0 or not (missed + nans) / steps > _MANY_SKIPPED:
        return None
    return finding_of(
        "unstable-loss",
        f"{missed + nans:,.0f} of {steps:,.0f} updates were skipped, because a gradient was not finite.",
        None,
        None,
        ["skipped steps as the log counts them"],
        "as advice: bfloat16 instead of float16 where the GPU has it; otherwise a lower learning rate, clipping at 1.0",
    )


def target(log: Log, wanted: float) -> str:
    """Steps and time until the loss reaches a target at the present trend, or why that cannot be told."""
    name = "val_loss" if len(log.finite("val_loss")) >= _FEWEST_FOR_TARGET else "loss"
    called = "validation loss" if name == "val_loss" else "loss"
    points = [(row["step"], row[name]) for row in log.rows if "step" in row and math.isfinite(row.get(name, math.nan))]
    reached = next((step for step, loss in points if loss <= wanted), None)
    if reached is not None:
        return f"the {called} reached {wanted:g} at step {reached:,.0f}"
    cannot = f"whether the {called} reaches {wanted:g} cannot be told: "
    if len(points) < _FEWEST_FOR_TARGET:
        return f"{cannot}the log has {len(points)} lines with a step and a loss, {_FEWEST_FOR_TARGET} are needed"
    if any(later <= earlier for (earlier, _), (later, _) in pairwise(points)):
        return f"{cannot}its step numbers start again"
    half = points[len(points) // 2 :]
    slope, error, now = _line([x for x, _ in half], [y for _, y in half])
    if not slope < -2 * error:
        return f"{cannot}the loss does not fall clearly in the last half of the log"
    needed = max(1.0, (now - wanted) / -slope)
    seconds, totals = log.steady("seconds"), log.values("total")
    time = f", {duration(needed * seconds)}" if seconds else "; the log does not show how long a step takes"
    beyond = ""
    if totals and points[-1][0] + needed > totals[-1]:
        beyond = f"; the run ends at step {totals[-1]:,.0f}, before that"
    return (
        f"the {called} is {now:.4g}; at the trend of the last {len(half)} lines, {wanted:g} needs about {needed:,.0f} "
        f"more steps{time}{beyond}; losses usually fall more slowly later"
    )


def _deviation(values: Sequence[float]) -> float:
    """The standard deviation; that of `statistics` is exact, and slow for a million lines."""
    mean = fmean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def _line(x: Sequence[float], y: Sequence[float]) -> tuple[float, float, float]:
    """The slope of a straight line through the points, its standard error, and its value at the last point."""
    mean_x, mean_y = fmean(x), fmean(y)
    spread = sum((value - mean_x) ** 2 for value in x)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
    rest = sum((b - mean_y - slope * (a - mean_x)) ** 2 for a, b in zip(x, y, strict=True))
    return slope, math.sqrt(rest / max(1, len(x) - 2) / spread), mean_y + slope * (x[-1] - mean_x)
