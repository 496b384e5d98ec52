"""The roofline of a run: each phase below the limit that the device sets for its operations per byte."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import Any

from flatout.cost import Adapters, ModelShape
from flatout.cost.roofline import Work, phase_work
from flatout.errors import UsageError
from flatout.files import typed
from flatout.insight.report.charts import Chart, Line, Point, short
from flatout.insight.story import Story
from flatout.plan.predict import path_of
from flatout.record import Rollup

# Recipes whose steps are a cross-entropy alone: the work of their phases can be counted.
COUNTED = ("pretrain", "sft", "rft")
# What the work of a phase depends on.
DECISIONS = {"accumulation", "precision", "recompute", "compile", "fused_qkv", "fused_mlp", "fused_loss", "fp8"}
COLOURS = {"forward": 1, "backward": 4, "optimize": 2}
# The axis goes on by this factor beyond the phases and the ridge.
ROOM = 3.0


def roofline(story: Story, *, id: str) -> Chart | None:
    """None where the device's limits or the work of the phases are unknown."""
    bandwidth, peak = story.hardware.get("bandwidth"), _peak(story)
    work = _work(story)
    if not (bandwidth and peak and work):
        return None
    reached = {name: one.flops / seconds for name, one in work.items() if (seconds := _seconds(story, name))}
    if not reached:
        return None
    ridge = peak / bandwidth
    ends = [work[name].intensity for name in reached]
    low, high = min(*ends, ridge) / ROOM, max(*ends, ridge) * ROOM
    roof = [Point(x=x, y=min(peak, x * bandwidth)) for x in (low, ridge, high)]
    lines = [
        Line(name=name, colour=COLOURS[name], points=[Point(x=work[name].intensity, y=reached[name])], dots=True)
        for name in reached
    ]
    shares = {name: reached[name] / min(peak, work[name].intensity * bandwidth) for name in reached}
    said = "; ".join(f"{name} reaches {100 * share:.0f} % of its limit" for name, share in shares.items())
    return Chart(
        id=id,
        title="Roofline, FLOP/s",
        about=f"FLOP/s of each phase against the operations per byte that it moves at least: {said}.",
        show=short,
        lines=[Line(name="limit", colour=6, points=roof), *lines],
        x_name="FLOP per byte",
        log=True,
    )


def _peak(story: Story) -> float | None:
    if story.rates is None:
        return None
    if _decisions(story).get("fp8"):
        eight = story.hardware.get("peak_flops", {}).get("fp8")
        return None if eight is None else float(eight)
    return story.rates.peak_flops


def _work(story: Story) -> Mapping[str, Work]:
    """Of a typical step of one device."""
    job, made, source = story.plan.get("job", {}), _decisions(story), f"{story.path}/plan.json"
    own_objective = story.config.get("train", {}).get("objective") is not None
    if story.rates is None or not story.parts or story.recipe not in COUNTED or own_objective:
        return {}
    try:
        shape = ModelShape.from_json(job.get("shape"), source=source)
        adapters = None if job.get("adapters") is None else typed(Adapters, job["adapters"], source=source)
    except UsageError:
        return {}  # of another version
    if shape.foreign or not made.keys() >= DECISIONS:
        return {}
    tokens = median(part.tokens / part.num_steps for part in story.parts) / story.rates.num_devices
    trained = [part.extra["targets"] * part.num_steps / part.tokens for part in story.parts if "targets" in part.extra]
    return phase_work(
        shape,
        flops=story.rates.flops,
        tokens=tokens,
        targets=tokens * (median(trained) if trained else 1.0),
        micro_batches=made["accumulation"],
        precision=made["precision"],
        recompute=made["recompute"],
        path=path_of(
            fused=made["fused_qkv"] and made["fused_mlp"] and made["fused_loss"],
            fp8=made["fp8"],
            compiled=made["compile"] != "none",
        ),
        adapters=adapters,
    )


def _decisions(story: Story) -> Mapping[str, Any]:
    found: Mapping[str, Any] = story.plan.get("decisions", {})
    return found


def _seconds(story: Story, phase: str) -> float | None:
    """Of a typical step: the first ones, which compile, do not move a median."""

    def of(part: Rollup) -> float:
        return part.spans[phase] / part.num_steps

    return median(found) if (found := [of(part) for part in story.parts if part.spans.get(phase)]) else None
