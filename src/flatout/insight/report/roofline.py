"""The roofline of a run: each phase below the limit that the device sets for its operations per byte."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from flatout.cost import BYTES, Adapters, ModelShape
from flatout.cost.roofline import Work, phase_work
from flatout.errors import UsageError
from flatout.files import typed
from flatout.insight.report.charts import Chart, Line, Point, short
from flatout.insight.story import Story
from flatout.plan.predict import path_of
from flatout.record import WARM_STEPS, Rollup
from flatout.record.events import HardwareFound

# Recipes whose steps are a cross-entropy alone: the work of their phases can be counted.
COUNTED = ("pretrain", "sft", "rft")
# What the work of a phase depends on.
DECISIONS = {
    "accumulation",
    "precision",
    "recompute",
    "sharding",
    "compile",
    "fused_qkv",
    "fused_mlp",
    "fused_loss",
    "fp8",
}
COLOURS = {"forward": 1, "backward": 4, "optimize": 6}
# The axis goes on by this factor beyond the phases and the ridge.
ROOM = 3.0


def roofline(story: Story, *, id: str) -> Chart | None:
    """Of the last attempt; None where the limits of its device or the work of its phases are unknown."""
    hardware, parts = _hardware(story), _parts(story)
    bandwidth, peak = hardware.get("bandwidth"), _peak(story, hardware)
    if not bandwidth or not peak:
        return None
    work = {name: one for name, one in _work(story, parts).items() if one.flops > 0 and one.bytes > 0}
    spent = {name: seconds for name in work if (seconds := _seconds(parts, name))}
    if not spent:
        return None

    def limit(intensity: float) -> float:
        return float(min(peak, intensity * bandwidth))

    ends = [peak / bandwidth, *(work[name].intensity for name in spent)]
    xs = sorted({min(ends) / ROOM, *ends, max(ends) * ROOM})
    reached = {name: Point(x=work[name].intensity, y=work[name].flops / seconds) for name, seconds in spent.items()}
    said = "; ".join(f"{name} reaches {100 * at.y / limit(at.x):.0f} % of its limit" for name, at in reached.items())
    return Chart(
        id=id,
        title="Roofline, FLOP/s",
        about=f"FLOP/s of each phase, by its operations for each byte that it must move: {said}.",
        show=short,
        lines=[
            Line(name="limit", colour=2, points=[Point(x=x, y=limit(x)) for x in xs]),
            *(Line(name=name, colour=COLOURS[name], points=[at], dots=True) for name, at in reached.items()),
        ],
        x_name="FLOP per byte",
        log=True,
    )


def _hardware(story: Story) -> Mapping[str, Any]:
    """Of the last attempt, which may run on another machine than the first."""
    found = [event.facts for event in story.events if isinstance(event, HardwareFound)]
    return found[-1] if found else story.hardware


def _peak(story: Story, hardware: Mapping[str, Any]) -> float | None:
    if story.rates is None or not _decisions(story).get("fp8"):
        return None if story.rates is None else story.rates.peak_flops
    eight: float | None = hardware.get("peak_flops", {}).get("fp8")
    return eight


def _parts(story: Story) -> list[Rollup]:
    """Of the last attempt, as soon as it has so many steps that those of the warm-up do not move a median."""
    parts = [part for part in story.parts if part.attempt == story.parts[-1].attempt and part.tokens]
    return parts if sum(part.num_steps for part in parts) > 2 * WARM_STEPS else []


def _work(story: Story, parts: Sequence[Rollup]) -> Mapping[str, Work]:
    """Of a typical step of one device."""
    job, made, source = story.plan.get("job", {}), _decisions(story), f"{story.path}/plan.json"
    own_objective = (story.config.get("train") or {}).get("objective") is not None
    if story.rates is None or not parts or story.recipe not in COUNTED or own_objective:
        return {}
    if not made.keys() >= DECISIONS or not made["accumulation"] or made["precision"] not in BYTES:
        return {}
    try:
        shape = ModelShape.from_json(job.get("shape"), source=source)
        adapters = None if job.get("adapters") is None else typed(Adapters, job["adapters"], source=source)
    except UsageError:
        return {}  # of another version
    if shape.foreign:
        return {}
    ranks = story.rates.num_devices
    tokens = median(part.tokens / part.num_steps for part in parts) / ranks
    trained = [part.extra["targets"] * part.num_steps / part.tokens for part in parts if "targets" in part.extra]
    return phase_work(
        shape,
        flops=story.rates.flops,
        tokens=tokens,
        targets=tokens * min(1.0, median(trained) if trained else 1.0),
        micro_batches=made["accumulation"],
        precision=made["precision"],
        recompute=made["recompute"],
        path=path_of(
            fused=made["fused_qkv"] or made["fused_mlp"] or made["fused_loss"],
            fp8=made["fp8"],
            compiled=made["compile"] != "none",
        ),
        adapters=adapters,
        update_ranks=ranks if made["sharding"] == "full" and adapters is None else 1,
    )


def _decisions(story: Story) -> Mapping[str, Any]:
    found: Mapping[str, Any] = story.plan.get("decisions", {})
    return found


def _seconds(parts: Sequence[Rollup], phase: str) -> float | None:
    """Of a typical step: a median, which the first steps do not move."""
    found = [part.spans[phase] / part.num_steps for part in parts if part.spans.get(phase)]
    return median(found) if found else None
